"""Gradients: taken from autograd, brought down, added, measured."""
