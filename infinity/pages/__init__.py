"""Pages: parameters, gradients and optimizer states at rest and under way."""
