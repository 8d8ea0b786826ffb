"""Prefetch: the order in which units are used, and which pages to fetch and evict for it."""

from infinity.prefetch.schedule import Schedule, schedule, victims
from infinity.prefetch.trace import Access, AccessKind, Trace

__all__ = ["Access", "AccessKind", "Schedule", "Trace", "schedule", "victims"]
