"""Prefetch: the order in which a step uses its units, and the pages to fetch and evict for this order."""

from infinity.prefetch.schedule import Schedule, schedule, victims
from infinity.prefetch.trace import Access, AccessKind, Trace

__all__ = ["Access", "AccessKind", "Schedule", "Trace", "schedule", "victims"]
