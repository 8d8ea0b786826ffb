"""Accumulation: the micro-batches of a step, page by page."""
