"""Kernels and the engine that runs layers of blocks."""
