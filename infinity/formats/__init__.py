"""Formats: what bytes of masters and moments mean, and the rules that update them. Pure."""
