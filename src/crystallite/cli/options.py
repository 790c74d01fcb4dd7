"""Options that several commands share."""

from __future__ import annotations

import argparse

__all__ = ["add_annealing"]


def add_annealing(command: argparse.ArgumentParser) -> None:
    """How weights are tested: level, null, correction, rule, random walk."""
    command.add_argument(
        "--level", default=0.01, type=_level, help='significance level, or "percolation" (default: 0.01)'
    )
    command.add_argument("--null", choices=["auto", "init", "empirical"], default="auto", help="what noise looks like")
    command.add_argument("--correction", choices=["bonferroni", "holm", "bh"], help="for testing many weights at once")
    command.add_argument("--rule", choices=["both", "neyman"], default="both", help="tests a kept weight must pass")
    command.add_argument("--random-walk", choices=["calibrated", "literal"], default="calibrated")
    command.add_argument("--alpha", type=float, help="significance level of the random-walk test (the paper's α)")
    command.add_argument("--delta0", type=float, default=1 / 64, help="its first bandwidth δ₀, times n (default: 1/64)")
    command.add_argument("--tau", type=float, default=1 / 64, help="its step τ, times n (default: 1/64)")


def _level(text: str) -> float | str:
    if text == "percolation":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected a number or "percolation", got {text!r}') from None
