"""The optimizer: chains of updates, the order in which they run, and torch's optimizer interface to them."""
