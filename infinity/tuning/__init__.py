"""`infinity tune` as a library: the sweep of each disk, how several share the bytes, memory and the link."""
