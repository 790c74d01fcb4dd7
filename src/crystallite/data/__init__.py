"""Batches, positions and padding, what models return, and calibration data."""
