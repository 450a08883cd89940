"""NVSHMEM: its symmetric heap for Buffers, and its queue pairs for their kernels. Nothing of it is imported before a
Buffer asks for it.
"""
