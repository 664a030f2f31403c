"""Endpoints whose answers are vectors, scores and classes."""
