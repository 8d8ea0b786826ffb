"""Checkpoints: the files of commits; export to and loading from safetensors files, streamed."""
