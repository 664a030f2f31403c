"""Tool calls in the text of a model: one description per chat family, and what is driven by it.

:mod:`families` has the descriptions, in the terms of :mod:`format`. :mod:`parser` reads calls by them while the text
arrives, :mod:`writer` writes calls by them, and :mod:`constraint` makes the grammar of what they allow.
"""
