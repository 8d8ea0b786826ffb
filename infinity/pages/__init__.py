"""Pages: parameters, gradients and optimizer states, at home and on their way between tiers."""
