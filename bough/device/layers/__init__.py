"""Layers: parameters by their Hugging Face names, computed with registered ops and linear methods."""
