"""`report`: analyse a model, collect its pictures, and hold the page that shows them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import torch

from crystallite.analysis.matrix import LayerAnalysis, Options
from crystallite.analysis.run import Analysis, analyze_with
from crystallite.annealing.random_walk import DELTA0, TAU
from crystallite.core.drawing import Drawing
from crystallite.core.errors import InvalidOption
from crystallite.core.files import write_file
from crystallite.core.suggest import check_choice, suggest_keywords
from crystallite.report.layer_charts import class_chart, histogram_chart, matrix_figure
from crystallite.report.page import page
from crystallite.report.rebuilt import Rebuilt, Row, rebuilt_model
from crystallite.report.sections import (
    Section,
    chains_section,
    layers_section,
    result_section,
    roles_section,
    run_sections,
    validation_section,
)
from crystallite.report.view import View, view_layer

__all__ = ["Report", "report"]

Source = torch.nn.Module | Mapping[str, Any] | str | os.PathLike[str]
_MOST_CELLS = 64  # along a side of a picture
_FEWEST_CELLS = 24
_PICTURE_BYTES = 1_500_000  # of all pictures together, as long as they stay readable
_BYTES_PER_CELL = 8  # as stored, reordered, and six shares of the level picture


@dataclass(frozen=True, eq=False)
class Report:
    """A report: the analysis, what its pictures show, and whatever else was there to show."""

    title: str
    analysis: Analysis
    views: list[View]
    rebuilt: tuple[Rebuilt, ...] = ()
    verdict: Row | None = None  # of a model that is not here
    sweep: tuple[Row, ...] = ()
    front: tuple[Row, ...] = ()
    monitor: tuple[Row, ...] = ()

    @cached_property
    def html(self) -> str:
        """The page, self-contained."""
        alone = len(self.rebuilt) == 1
        results = [result_section(self.rebuilt)] if self.rebuilt else []
        results += [layers_section(one, alone) for one in self.rebuilt]
        runs = run_sections(self.sweep, self.front, self.monitor)
        results += [section for section in runs if section.title == "Quality and cost" and self.rebuilt]
        results += [validation_section(verdict, name) for name, verdict in self._verdicts.items()]
        results += self._roles
        chains = chains_section(self.analysis.chains)
        after = ([] if chains is None else [chains]) + [section for section in runs if section not in results]
        return page(self.title, self.analysis, self.views, self.rebuilt, self.verdict, results, after)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write or replace the page and return its path."""
        return write_file(path, self.html.encode())

    def figures(self, folder: str | os.PathLike[str], format: str = "svg") -> list[Path]:
        """Write every figure as a file of its own for papers, and return their paths; "png" needs Pillow."""
        check_choice("format", format, ("svg", "png"))
        return [
            write_file(Path(folder) / f"{name}.{format}", drawing.svg().encode() if format == "svg" else drawing.png())
            for name, drawing in self._drawings.items()
        ]

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that neither its script nor its style touches the notebook."""
        frame = 'sandbox="allow-scripts" width="100%" height="800" loading="lazy"'
        return f'<iframe title="{escape(self.title)}" {frame} srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        return f"Report({self.title!r}: {self.analysis.verdict})"

    @property
    def _roles(self) -> list[Section]:
        """What blocks are for, of each model whose verdict says it."""
        found = (roles_section(verdict, name) for name, verdict in self._verdicts.items())
        return [section for section in found if section is not None]

    @property
    def _verdicts(self) -> dict[str, Row]:
        """By the name of the model, "" where there is only one."""
        alone = len(self.rebuilt) == 1
        judged = {"" if alone else one.name: one.verdict for one in self.rebuilt} or {"": self.verdict}
        return {name: verdict for name, verdict in judged.items() if verdict}

    @property
    def _drawings(self) -> dict[str, Drawing]:
        drawings: dict[str, Drawing] = {}
        for i, view in enumerate(self.views):
            name = f"{i:03d}-{_file_name(view.row.name)}"
            drawings[f"{name}-matrix"] = matrix_figure(view)
            drawings[f"{name}-weights"] = histogram_chart(view.histogram, view.row.null)
            drawings[f"{name}-classes"] = class_chart(view.row)
            if view.directed is not None:
                drawings[f"{name}-condensation"] = view.directed.plot()
        for one in self.rebuilt:
            drawings |= {_file_name(f"rebuilt-{one.name}-{title}"): chart for title, chart in one.pictures.items()}
        for section in [*self._roles, *run_sections(self.sweep, self.front, self.monitor)]:
            drawings |= {f"{section.anchor}-{_file_name(title)}": chart for title, chart in section.charts.items()}
        return drawings


@suggest_keywords
def report(
    source: Source,
    path: str | os.PathLike[str] | None = None,
    *,
    reorganized: torch.nn.Module | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    verdict: Any = None,
    sweep: Any = None,
    front: Sequence[Row] | None = None,
    monitor: str | os.PathLike[str] | Sequence[Row] | None = None,
    title: str | None = None,
    null: str = "auto",
    level: float | str = 0.01,
    correction: str | None = None,
    random_walk: str = "calibrated",
    rule: str = "both",
    alpha: float | None = None,
    delta0: float = DELTA0,
    tau: float = TAU,
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
    progress: bool = False,
) -> Report:
    """A report on a module, state dict, checkpoint file or folder; written to `path` if there is one.

    A page that is there is replaced, so that the cell of a notebook can run again; the command `crystallite report`
    replaces one with `--force` only. In a notebook a report shows itself. Cost: that of `analyze`, and the pictures;
    nothing is annealed twice.

    Args:
        source: a module, a state dict, a checkpoint file or a folder, as for `analyze`.
        path: where to write the page, or replace it; None: nowhere.
        reorganized: what `reorganize`, `compress` or `upgrade` made of the model, or the folder it was saved in;
            several by name.
        verdict: what `validate` returned for it, or its `to_json()`; of several models by the same names; None: that
            which a folder holds. It may hold a sweep.
        sweep: what `sweep` returned, or its `to_json()`.
        front: rows with name, family, macs, latency_ms and quality, baselines among them.
        monitor: rows with step, layer, kept_share, largest_share, blocks and sigma, or a file with one in each line.
        null, level, correction, random_walk, rule, alpha, delta0, tau, targets, ignore: as for `analyze`.
        title: what the page calls the model; None: the name of its file.
        progress: a bar on standard error.

    Returns:
        A `Report`, which shows itself in a notebook and can `save` its page and its `figures`.

    Raises:
        InvalidOption: an option outside the values it may take, or a pattern that matches no layer; it names the
            nearest.

    Examples:
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> report(nn.Linear(64, 32), title="Noise")
        Report('Noise': No exact block structure: 1 of 1 not distinguishable from the initialisation.)
    """
    models = _by_name(reorganized)
    verdicts = _verdicts(verdict, models, isinstance(reorganized, Mapping))
    known = [value for value in verdicts.values() if value]
    swept = _plain(sweep) if sweep is not None else next((v["sweep"] for v in known if v.get("sweep")), None)
    extras: dict[str, Any] = {
        "rebuilt": tuple(rebuilt_model(name, model, verdicts.get(name)) for name, model in models.items()),
        "verdict": None if models else next(iter(known), None),
        "sweep": _rows("sweep", swept["points"] if isinstance(swept, Mapping) else swept, ("level",)),
        "front": _rows("front", front, ("name", "quality")),
        "monitor": _rows("monitor", _lines(monitor), ("step",)),
    }
    views: list[View] = []

    def show(layer: LayerAnalysis, layers: int) -> None:
        affordable = int((_PICTURE_BYTES / _BYTES_PER_CELL / layers) ** 0.5)
        views.append(view_layer(layer, min(_MOST_CELLS, max(_FEWEST_CELLS, affordable))))

    options = Options(null, level, correction, random_walk, rule, alpha, delta0, tau)
    found = analyze_with(source, options, targets, ignore, show=show, progress=progress)
    made = Report(title or Path(found.source).name or found.source, found, views, **extras)
    if path is not None:
        made.save(path)
    return made


def _plain(value: Any) -> Any:
    """What another stage returned, as plain values."""
    return value.to_json() if hasattr(value, "to_json") else value


def _by_name(reorganized: Any) -> dict[str, Any]:
    """Rebuilt models by the names that the page gives them."""
    if reorganized is None:
        return {}
    return dict(reorganized) if isinstance(reorganized, Mapping) else {"rebuilt": reorganized}


def _verdicts(verdict: Any, models: Mapping[str, Any], named: bool) -> dict[str, Row | None]:
    """The verdict of each model, as plain values."""
    if verdict is None:
        return {}
    if not named:
        return {next(iter(models), ""): dict(_plain(verdict))}
    if not isinstance(verdict, Mapping) or not {*verdict} <= {*models}:
        raise InvalidOption(f"verdict: expected verdicts by name, for {', '.join(models)}, got {verdict!r:.80}")
    return {name: dict(_plain(value)) for name, value in verdict.items()}


def _lines(monitor: Any) -> Any:
    """The rows of a file with one JSON object on each line; rows stay what they are."""
    if not isinstance(monitor, (str, os.PathLike)):
        return monitor
    rows = []
    for i, line in enumerate(Path(monitor).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError:
                raise InvalidOption(f"{monitor}: line {i} is not JSON; expected one object on each line") from None
    return rows


def _rows(name: str, rows: Any, needed: tuple[str, ...]) -> tuple[Row, ...]:
    """The rows, checked for what no chart can do without."""
    if rows is None:
        return ()
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Sequence):
        raise InvalidOption(f"{name}: expected a list of rows, got {type(rows).__name__}")
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping) or any(key not in row for key in needed):
            raise InvalidOption(f"{name}: row {i} needs {' and '.join(needed)}, got {row!r:.80}")
    return tuple(dict(row) for row in rows)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)[:80]
