"""The part of bough that computes: torch, compiled kernels, one package per kind of part."""
