"""`crystallite export`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from crystallite.cli.running import open_data, print_result
from crystallite.export.run import export
from crystallite.models.opening import open_model

__all__ = ["run"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Write the file and say how near it comes; 0."""
    data = None if options.data is None else open_data(options, options.model, options.batch)
    model = open_model(options.model, options.weights, options.original)  # the reorganized one, not the dense one
    done = export(model, options.out, data, **given)
    print_result(done, asdict(done), options, options.model)
    return 0
