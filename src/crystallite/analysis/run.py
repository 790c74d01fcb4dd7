"""`analyze`: every matrix of a model or checkpoint, one after the other, without model code and without data."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from crystallite.analysis.degrees import ChainAnalysis, chain_cells, chain_modularity, percentile
from crystallite.analysis.matrix import LayerAnalysis, MatrixAnalysis, Options, analyze_layer, null_of
from crystallite.analysis.verdict import model_verdict
from crystallite.annealing.fitting import Fit
from crystallite.annealing.neyman import CORRECTIONS, resolve_level
from crystallite.annealing.random_walk import DELTA0, METHODS, TAU, check_band
from crystallite.core.drawing import Drawing
from crystallite.core.errors import InvalidOption
from crystallite.core.files import writing
from crystallite.core.run_charts import bar_chart
from crystallite.core.suggest import check_choice, matching, suggest_keywords
from crystallite.core.tables import by_expert, html_table, span, terminal_width, text_table
from crystallite.weights.chains import LayerChain, known_chains
from crystallite.weights.checkpoint import Checkpoint, open_checkpoint
from crystallite.weights.layers import Layer, recognise

__all__ = ["Analysis", "analyze", "analyze_with"]

_ENTRY = '{"fingerprint": '  # how every line of a `resume` file begins


@dataclass(frozen=True, eq=False)
class Analysis:
    """One row per matrix and per chain of layers, what was left out, and the verdict."""

    source: str
    rows: list[MatrixAnalysis]
    skipped: dict[str, str]  # tensor → why it is no matrix of weights
    options: Options
    notes: tuple[str, ...] = ()  # on how the weights were read: wrappers taken off, adapters that are not in them
    chains: tuple[ChainAnalysis, ...] = ()  # layers whose names show that they share neurons, in degrees

    @property
    def verdict(self) -> str:
        """What the matrices say together."""
        return model_verdict(self.rows)

    def __getitem__(self, key: str | int) -> MatrixAnalysis:
        """The row of a matrix, by its name or its place."""
        if isinstance(key, int):
            return self.rows[key]
        for row in self.rows:
            if row.name == key:
                return row
        raise KeyError(key)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[MatrixAnalysis]:
        return iter(self.rows)

    def to_pandas(self) -> Any:
        """One row per matrix; profiles, hubs and the like, which are no single values, are in `to_json` only."""
        import pandas

        rows = [{k: v for k, v in row.to_json().items() if not isinstance(v, (dict, list))} for row in self.rows]
        return pandas.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "source": self.source,
            "options": asdict(self.options),
            "verdict": self.verdict,
            "matrices": [row.to_json() for row in self.rows],
            "chains": [chain.to_json() for chain in self.chains],
            "skipped": self.skipped,
            "notes": list(self.notes),
        }

    def table(self, width: int | None = None) -> str:
        """The rows as text, lines no longer than `width` if there is one; experts of a stack share a line."""
        cells = self._cells()
        lines = text_table(cells, width)
        if width is not None and max(map(len, lines)) > width:  # a narrow terminal: do without the null
            lines = text_table([[*row[:2], *row[4:]] for row in cells], width)
        return "\n".join(lines)

    def plot(self) -> Drawing:
        """A picture of how much of each matrix its largest block takes; shorter bars are better."""
        bars = [(row.name, row.largest_share, f"{_percent(row.largest_share)}, {row.finding}") for row in self.rows]
        return bar_chart(bars, "neurons in the largest block")

    def _cells(self) -> list[list[str]]:
        header = ["matrix", "shape", "null", "KS", "kept", "blocks", "largest", "dormant", "modular", "finding"]
        single = list[list[str]]()
        for row in self.rows:
            shape = f"{row.rows}×{row.cols}" + (f"·{row.matrices}" if row.matrices > 1 else "")
            dormant = f"{row.dormant_rows}+{row.dormant_cols}"
            kept, largest = _percent(row.kept_share), _percent(row.largest_share)
            null = _short(row.null)
            modular = percentile(row.modularity)
            fit = f"{row.null_fit:.2f}"
            single.append([row.name, shape, null, fit, kept, str(row.n_blocks), largest, dormant, modular, row.finding])
        cells = [header]
        for name, places in by_expert([row.name for row in self.rows]):
            columns = zip(*(single[place][1:] for place in places), strict=True)
            cells.append([name, *map(span, columns)])
        return cells

    def chain_table(self, width: int | None = None) -> str:
        """The chains as text; "" where no layers are known to follow each other. Narrow tables do without layers."""
        if not self.chains:
            return ""
        lines = text_table(chain_cells(self.chains))
        if width is not None and max(map(len, lines)) > width:
            lines = text_table(chain_cells(self.chains, with_layers=False), width)
        return "\n".join(lines)

    def __repr__(self) -> str:
        width = terminal_width()
        tables = [table for table in (self.table(width), self.chain_table(width)) if table]
        return "\n\n".join([*tables, "\n".join([f"{self.source}: {self.verdict}", *self.notes])])

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{escape(text)}</p>" for text in (self.verdict, *self.notes))
        chains = html_table(chain_cells(self.chains)) if self.chains else ""
        return said + html_table(self._cells(), left=(0, 2, 9)) + chains


@suggest_keywords
def analyze(
    source: torch.nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    *,
    null: str = "auto",
    level: float | str = 0.01,
    correction: str | None = None,
    random_walk: str = "calibrated",
    rule: str = "both",
    alpha: float | None = None,
    delta0: float = DELTA0,
    tau: float = TAU,
    fast: bool = False,
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
    resume: str | os.PathLike[str] | None = None,
    engine: str = "local",
    progress: bool = False,
) -> Analysis:
    """Anneal and decompose every matrix of a module, state dict, checkpoint file or Hugging Face folder.

    Needs no data and no model code. For each matrix: which initialisation it may have had and how well that fits, what
    the two tests keep, the blocks this leaves, the blocks at every other level, the hubs, and what the same numbers in
    random places would give; where it does not fall into exact blocks, how modular it is (see `modularity`), and how
    modular chains of layers are whose names show their order; then a verdict in words, which may be that there is no
    block structure.

    Tensors are read one at a time where the format allows it, so memory stays near the largest of them.

    Args:
        source: a module, a state dict, a checkpoint file or a Hugging Face folder.
        null: "auto" believes an initialisation only if it explains the bulk of a matrix, else it measures the bulk;
            "init" always takes what PyTorch, or the model's config, draws for such a layer; "empirical" always
            measures.
        level, correction, random_walk, rule, alpha, delta0, tau: as for `anneal`.
        fast: only the tests and the blocks at the one level, without modularity.
        targets, ignore: a pattern of layer names, or several (`*.intermediate.*`).
        resume: a file that keeps each finished matrix; after an interruption the same call goes on from there.
        engine: "local", or "ray" to spread the layers of a checkpoint on disk over a Ray cluster. Same results.
        progress: a bar on standard error.

    Returns:
        An `Analysis`: one row per matrix, what was left out, and the verdict.

    Raises:
        InvalidOption: an option outside the values it may take, or a pattern that matches no layer; it names the
            nearest.
        CheckpointError: a file that cannot be read as weights.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> analyze(torch.nn.Linear(64, 32)).verdict
        'No exact block structure: 1 of 1 not distinguishable from the initialisation.'
    """
    options = Options(null, level, correction, random_walk, rule, alpha, delta0, tau, fast)
    return analyze_with(source, options, targets, ignore, resume=resume, engine=engine, progress=progress)


def analyze_with(
    source: torch.nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    options: Options,
    targets: str | Sequence[str],
    ignore: str | Sequence[str],
    *,
    show: Callable[[LayerAnalysis, int], None] | None = None,
    resume: str | os.PathLike[str] | None = None,
    engine: str = "local",
    progress: bool = False,
) -> Analysis:
    """What `analyze` returns; show(layer, number of layers) is called with each layer while its weights are there."""
    _check(options, engine)
    with open_checkpoint(source) as checkpoint:
        layers = recognise(checkpoint)
        skipped = {layer.name: layer.reason for layer in layers if layer.kind == "skipped"}
        usable = {layer.name: layer for layer in layers if layer.kind != "skipped"}
        wanted = [usable[name] for name in matching(usable, targets, ignore)]
        store = _Store(resume, checkpoint, wanted, options)
        missing = [layer for layer in wanted if layer.name not in store.rows]
        bar = tqdm(total=len(wanted), initial=len(wanted) - len(missing), unit="matrix", disable=not progress)
        with bar:
            for row in _rows(source, checkpoint, missing, options, engine, show):
                store.add(row)
                bar.set_postfix_str(row.name[-30:], refresh=False)
                bar.update()
        rows = [store.rows[layer.name] for layer in wanted]
        chains = () if options.fast else _chains(checkpoint, known_chains(wanted), store.rows, options)
        return Analysis(checkpoint.source, rows, skipped, options, checkpoint.notes, chains)


def _chains(
    checkpoint: Checkpoint, chains: Sequence[LayerChain], rows: Mapping[str, MatrixAnalysis], options: Options
) -> tuple[ChainAnalysis, ...]:
    """Chains whose layers do not all fall into exact blocks, in degrees."""
    found = []
    for chain in chains:
        if all(rows[layer.name].finding == "separate" for layer in chain.layers):
            continue
        parts = {layer.name: layer.matrices(checkpoint) for layer in chain.layers}
        nulls = {}
        for layer in chain.layers:
            fits = [null_of(checkpoint, layer, layer.name, matrix, options) for _, matrix in parts[layer.name]]
            nulls[layer.name] = [fit.null if isinstance(fit, Fit) else fit for fit in fits]
        found.append(chain_modularity(chain, {n: [m for _, m in own] for n, own in parts.items()}, nulls))
    return tuple(chain for chain in found if chain is not None)


def _check(options: Options, engine: str) -> None:
    """Refuse bad options before anything is read."""
    resolve_level(options.level, 1, 1)
    check_band(options.random_walk, options.alpha, options.delta0, options.tau)
    accepted: list[tuple[str, Any, tuple]] = [
        ("null", options.null, ("auto", "init", "empirical")),
        ("correction", options.correction, CORRECTIONS),
        ("random_walk", options.random_walk, METHODS),
        ("rule", options.rule, ("both", "neyman")),
        ("engine", engine, ("local", "ray")),
    ]
    for name, value, values in accepted:
        check_choice(name, value, values)


def _rows(
    source: Any, checkpoint: Checkpoint, layers: list[Layer], options: Options, engine: str,
    show: Callable[[LayerAnalysis, int], None] | None,
) -> Iterator[MatrixAnalysis]:  # fmt: skip
    if engine == "local":
        for layer in layers:
            found = analyze_layer(checkpoint, layer, options)
            if show is not None:
                show(found, len(layers))
            yield found.row
        return
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidOption('engine="ray" needs a checkpoint on disk that every node can read, not a model in memory')
    from crystallite.analysis.ray_engine import analyze_layers

    yield from analyze_layers(os.fspath(source), [layer.name for layer in layers], options)


class _Store:
    """Finished rows; with a path also on disk, one JSON line each, written as they come."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        checkpoint: Checkpoint,
        layers: list[Layer],
        options: Options,
    ):
        self.rows: dict[str, MatrixAnalysis] = {}
        self._path = None if path is None else Path(path)
        self._fingerprint = {layer.name: checkpoint.tensors[layer.tensors[0]].fingerprint for layer in layers}
        self._options = asdict(options)
        if self._path is not None and not all(self._fingerprint.values()):
            raise InvalidOption("resume needs a checkpoint on disk: nothing says whether a model in memory has changed")
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        text = path.read_bytes().decode(errors="replace")
        start = text.partition("\n")[0][: len(_ENTRY)]
        if not _ENTRY.startswith(start):  # a kill may have cut even the first line short
            raise InvalidOption(f"{path}: expected a file that `resume` wrote before, or none; it is left as it was")
        if text and not text.endswith("\n"):
            with writing(path), path.open("a") as file:
                file.write("\n")
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                row, known = MatrixAnalysis(**entry["row"]), (entry["fingerprint"], entry["options"])
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # the line a kill cut short
            if known == (self._fingerprint.get(row.name), self._options):
                self.rows[row.name] = row

    def add(self, row: MatrixAnalysis) -> None:
        self.rows[row.name] = row
        if self._path is None:
            return
        entry = {"fingerprint": self._fingerprint[row.name], "options": self._options, "row": row.to_json()}
        with writing(self._path), self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _percent(share: float) -> str:
    return f"{share:.2%}" if 0 < share < 0.1 else f"{share:.0%}"


def _short(null: str) -> str:
    """Family and scale of a null: "Empirical(0.08897, mean …)" → "empirical .089"."""
    family, _, numbers = null.partition("(")
    scale = re.search(r"[\d.]+(e-?\d+)?", numbers)
    return f"{family.lower()} {float(scale[0]):.2g}".replace(" 0.", " .") if scale else family.lower()
