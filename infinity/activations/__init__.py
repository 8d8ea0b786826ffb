"""Activations: the tensors that autograd saves, and the heap where they lie."""
