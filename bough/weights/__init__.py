"""Weights: where they come from (fetch), the two file formats, and one view over both (loader)."""
