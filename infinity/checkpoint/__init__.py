"""The model on its way out and in: safetensors, whole directories or nothing."""
