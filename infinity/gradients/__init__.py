"""Gradients: taken from autograd, copied to the host, added and measured."""
