"""Dense layers with planted blocks, by operator."""
