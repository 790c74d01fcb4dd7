"""The `crystallite` command."""
