"""Losses: computed together with the layer before them, so that its outputs take little memory."""
