"""`crystallite analyze`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from crystallite.analysis import analyze
from crystallite.cli.running import print_result
from crystallite.core.tables import terminal_width

__all__ = ["run"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Print the table and the verdict; 0."""
    analysis = analyze(options.source, progress=sys.stderr.isatty(), **given)
    tables = (analysis.table(terminal_width()), analysis.chain_table(terminal_width()))
    text = "\n\n".join([*filter(None, tables), analysis.verdict])
    if analysis.skipped:
        text += f"\nLeft out: {len(analysis.skipped)} tensors that are no matrices of weights (--json lists them)."
    print_result(text, analysis.to_json(), options)
    return 0
