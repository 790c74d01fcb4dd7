"""What everything else stands on: errors, arrays and their magnitudes, index maps, threads, tables."""
