"""The operations that models are made of: a reference in torch and compiled kernels for CPUs."""
