"""From a model to the same model made of blocks."""
