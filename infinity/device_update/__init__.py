"""Device update: updates on the device that computes, by the CPU's kernels compiled for it."""
