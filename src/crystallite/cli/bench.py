"""`crystallite bench --baselines`: a compressed model beside other methods at the same cost; `--serve`: the load."""

from __future__ import annotations

import argparse
from typing import Any

from crystallite.baselines.compare import compare, table
from crystallite.cli import bench_serve
from crystallite.cli.running import open_calibration, open_data, open_dense, print_result
from crystallite.compression.compress import compress
from crystallite.core.errors import InvalidOption

__all__ = ["run"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Print what was measured; 0."""
    if options.baselines is None:
        return bench_serve.run(options, given)
    for name, value in {**vars(options), "budget": given.get("budget")}.items():
        if name in ("budget", "calibration", "data") and value is None:
            raise InvalidOption(f"--baselines needs --{name}")
    size = 32 if options.batch is None else options.batch
    calibration = open_calibration(options, options.baselines, size)
    data = open_data(options, options.baselines, size, halves=given.get("metric") == "retrieval")
    model = open_dense(options.baselines, options.weights, options.original).eval()
    budget, metric = given.pop("budget"), given.pop("metric", None)
    small = compress(model, calibration, budget=budget, **given)
    rows = compare(model, small, data, metric, calibration=calibration, **given)
    print_result(table(rows), [row.to_json() for row in rows], options, options.baselines)
    return 0
