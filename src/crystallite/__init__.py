"""Take trained neural networks apart along the structure that training left in them."""
