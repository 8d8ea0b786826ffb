"""Device update: optimizer updates on the device, by the CPU's kernels compiled for the device."""
