"""Activations: the tensors that autograd saves for backward, and the heap in which they are allocated."""
