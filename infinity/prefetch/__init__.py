"""Prefetch: the order in which units are used, and what to fetch and evict for it."""

from infinity.prefetch.trace import Access, AccessKind, Trace

__all__ = ["Access", "AccessKind", "Trace"]
