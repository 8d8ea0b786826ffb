"""Accumulation: all micro-batches of a step use a page before the next page is fetched."""
