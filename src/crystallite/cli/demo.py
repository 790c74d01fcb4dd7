"""`crystallite demo`."""

from __future__ import annotations

import argparse
from typing import Any

from crystallite.demo import digits, minilm, paper

__all__ = ["run"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Take the tour; 0, or 1 where a result differs from the paper's."""
    if options.paper:
        return 0 if paper.run() else 1
    (digits if options.model == "digits" else minilm).run(options.out)
    return 0
