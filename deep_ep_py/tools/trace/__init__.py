"""Timelines for Perfetto and Chrome: what a rank's operations, kernels, waits and software NICs did, and when."""
