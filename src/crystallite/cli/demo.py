"""`crystallite demo`."""

from __future__ import annotations

import argparse
from typing import Any

from crystallite.demo import digits, minilm

__all__ = ["run"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Take the tour; 0."""
    (digits if options.model == "digits" else minilm).run(options.out)
    return 0
