"""Formats: how master weights and moments are stored, and which states each torch optimizer has."""
