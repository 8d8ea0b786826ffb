"""Accumulation: takes all micro-batches of a step through a page before the next page is fetched."""
