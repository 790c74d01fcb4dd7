"""Batches, what models return on them, and calibration data."""
