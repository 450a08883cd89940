"""Kernels on the rows of torch tensors, in Triton or torch: gathering and summing rows, and FP8 casts."""
