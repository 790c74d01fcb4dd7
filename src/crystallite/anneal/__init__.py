"""Annealing (paper section 3): the statistical tests that separate structure from what chance left in the weights."""

from crystallite.anneal import nulls
from crystallite.anneal.annealing import Annealing, anneal
from crystallite.anneal.neyman import percolation_level
from crystallite.anneal.random_walk import RandomWalk, random_walk_test

__all__ = ["Annealing", "RandomWalk", "anneal", "nulls", "percolation_level", "random_walk_test"]
