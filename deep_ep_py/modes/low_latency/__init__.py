"""Low-latency mode: the calls of decoding."""
