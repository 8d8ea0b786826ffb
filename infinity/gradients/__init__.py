"""Gradients: taken from autograd, copied to the host, added up, and their sums of squares computed."""
