"""Measurements. Every number is a ratio against a peer in the same run; results are stored as JSON."""
