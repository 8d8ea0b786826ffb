"""Casts: where a value becomes another floating-point dtype because parameters have it."""
