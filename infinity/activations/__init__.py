"""Activations: what autograd saves, and the heap that it lies in."""
