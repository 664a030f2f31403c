"""The ops as Triton kernels, for CUDA devices. Importing a module of this package needs Triton."""
