"""Tours on real networks: `crystallite demo`."""
