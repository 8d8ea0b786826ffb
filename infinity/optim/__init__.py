"""The optimizer: chains of updates, their order, and torch's protocol over them."""
