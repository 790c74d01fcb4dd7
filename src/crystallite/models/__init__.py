"""Layers of a model, exchanging them, the record of what was done, and models as files."""
