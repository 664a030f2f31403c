"""The reasoning in the text of a model: how each family marks it, and the parsers that tell it from the answer."""
