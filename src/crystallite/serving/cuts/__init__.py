"""How operators are cut: what of them runs side by side elsewhere, and what takes their place in the transform tier."""
