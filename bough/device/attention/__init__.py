"""Attention over the paged KV."""
