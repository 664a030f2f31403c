"""Nouns shared by both columns: configuration, messages, plans, limits. Stdlib, numpy and msgspec only."""
