"""Formats: the bytes of masters and moments, and the rules that update them. Pure."""
