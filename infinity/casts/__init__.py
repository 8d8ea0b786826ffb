"""Casts: conversions of a model's inputs and of operands to the dtype of its parameters."""
