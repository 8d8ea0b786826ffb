"""`infinity tune` as a library: sweeps of disks, their shares of the bytes, speeds of memory and the link."""
