"""Checkpoints: export to and loading from safetensors files; directories appear whole or not at all."""
