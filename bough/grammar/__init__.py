"""Constraints on what is generated: admission, compiling, and the state of each answer. No torch."""
