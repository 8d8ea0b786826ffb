"""The update on a device: the CPU's kernels, compiled for it."""
