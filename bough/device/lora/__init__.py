"""Adapters: low-rank updates that a row of the batch may have, and the next row not."""
