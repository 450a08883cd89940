"""Low-latency mode: the calls for decoding."""
