"""Accumulation: all micro-batches of a step take a page before the next page is fetched."""
