"""The model: hooks, parameters that fault, and how it is filled."""
