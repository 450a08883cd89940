"""Where kernels run and tensors live: a CPU or a GPU."""
