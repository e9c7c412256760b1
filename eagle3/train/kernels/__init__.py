"""Triton kernels for the GPU. Each has the same result in plain torch, in the module that calls it; import them only
where there is a GPU."""
