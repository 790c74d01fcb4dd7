"""Annealing (paper section 3): the statistical tests that separate structure from what chance left in the weights."""
