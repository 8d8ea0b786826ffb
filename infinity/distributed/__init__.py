"""Distributed: N ranks that share one model's pages. Each rank pulls from its owner what it needs.

Nothing here is imported where there is one rank only.
"""
