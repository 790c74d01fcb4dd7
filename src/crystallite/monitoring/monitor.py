"""`StructureMonitor`: watch structure form while a model trains."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from crystallite.annealing.anneal import AnnealingOptions
from crystallite.core.drawing import Drawing, side_by_side
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.core.run_charts import monitor_charts
from crystallite.core.suggest import suggest_keywords
from crystallite.monitoring.journal import Journal
from crystallite.monitoring.measures import (
    MODEL,
    FunctionalMap,
    Row,
    annealings,
    feedback_rows,
    functional_map,
    initial_nulls,
    layer_row,
    problem_row,
)
from crystallite.monitoring.tensorboard import TensorBoard

__all__ = ["StructureMonitor"]

_SHARE = 0.03  # of the training's time, which every="auto" stays below


class StructureMonitor:
    """Records the structure of a model while it trains: a row for each weight matrix, and one for the whole.

    Call `step` after every optimizer step; it looks at the model when it is time to, and returns the rows or None.

    The model, its gradients and the random state stay as they are: training goes on bit for bit as without. What cannot
    be measured, such as weights that are no longer finite, is a row with a "problem" and never ends the training.

    Args:
        model: the model that trains.
        batch: samples for the functional map, as `discover` takes them (256 are used); its singular values rise when
            modules form, long before single weights show it. None: weights only.
        every: a number of steps, or "auto": at the first step, and then whenever all looks so far and the next one
            together take less than 3 % of the time that the training took.
        path: a JSONL file, one line per row: step, layer, kept_share, blocks, largest_share (of what the rule keeps),
            preference, noise, suppression (the random-walk classes), profile (blocks and largest share at eight
            thresholds); feedback matrices of recurrent layers have a row "… (feedback)" of all their gates together
            with sccs, largest_scc_share, layers, components and isolated units; the row of the layer "(model)" has
            sigma, gap, modules and the seconds that the look took. A file of an interrupted run is continued.
        tensorboard: a folder or an open `SummaryWriter`.
        level: of the Neyman test. Its null is fixed at the start: the initialisation if the weights still look like it,
            else their bulk as it is then.
        rule: "neyman", or "both": what the random-walk test prefers as well.

    Raises:
        InvalidOption: there is nothing to watch, or the batch does not fit the model.

    Examples:
        >>> import torch
        >>> model = nn.Linear(4, 2)
        >>> with StructureMonitor(model, batch=torch.randn(32, 4), every=10) as monitor:
        ...     for step in range(20):
        ...         _ = monitor.step(step)  # after the optimizer's
        >>> [(row["step"], row["layer"]) for row in monitor.rows]
        [(0, 'weight'), (0, '(model)'), (10, 'weight'), (10, '(model)')]
    """

    @suggest_keywords
    def __init__(
        self,
        model: nn.Module,
        *,
        batch: Any = None,
        every: int | str = "auto",
        path: str | Path | None = None,
        tensorboard: Any = None,
        level: float | str = 0.01,
        rule: str = "neyman",
    ) -> None:
        if every != "auto" and not (isinstance(every, int) and every >= 1):
            raise InvalidOption(f'every must be a number of steps ≥ 1 or "auto", got {every!r}')
        self.model, self.batch, self.every = model, batch, every
        self.options = AnnealingOptions(level, rule=rule)
        self.rows: list[Row] = []
        self._nulls = initial_nulls(model)
        if not self._nulls and batch is None:
            raise InvalidOption(f"{type(model).__name__} has no weight matrix to watch, and no batch was given")
        self._journal = None if path is None else Journal(Path(path))
        self._tensorboard = None if tensorboard is None else TensorBoard(tensorboard)
        if batch is not None:
            functional_map(model, batch)  # what does not fit the model is refused here, not in the middle of a training
        self._weights()  # compiles, so that the first look costs what others do
        self._started: float | None = None
        self._spent = 0.0  # seconds, in all looks
        self._cost = 0.0  # of the last one

    @property
    def overhead(self) -> float:
        """Seconds in all looks, as a share of the time between the first call of `step` and now without them."""
        if self._started is None:
            return 0.0
        return self._spent / max(time.perf_counter() - self._started - self._spent, 1e-9)

    def step(self, step: int) -> list[Row] | None:
        """Look at the model if it is time to; the rows that were recorded."""
        if not self._due(step):
            return None
        start = time.perf_counter()
        rows, found = self._look()
        self._cost = time.perf_counter() - start
        rows = [{"step": step, **row} for row in rows]
        rows[-1]["seconds"] = self._cost
        self.rows += rows
        if self._journal:
            self._journal.write(step, rows)
        if self._tensorboard:
            self._tensorboard.write(step, rows, found)
        self._cost = time.perf_counter() - start
        self._spent += self._cost
        return rows

    def _due(self, step: int) -> bool:
        if isinstance(self.every, int):
            self._started = self._started or time.perf_counter()
            return step % self.every == 0
        if self._started is None:
            self._started = time.perf_counter()
            return True
        training = time.perf_counter() - self._started - self._spent
        return self._spent + self._cost <= _SHARE * training

    def _look(self) -> tuple[list[Row], FunctionalMap | None]:
        rows = self._weights()
        found = None
        whole: Row = {"layer": MODEL}
        if self.batch is not None:
            try:
                found = functional_map(self.model, self.batch)
                whole = found.row()
            except CrystalliteError as error:
                whole = problem_row(MODEL, error)
        return [*rows, whole], found

    def _weights(self) -> list[Row]:
        found = annealings(self.model, self._nulls, self.options)
        return list(map(layer_row, found)) + feedback_rows(found)

    def to_pandas(self) -> Any:
        """One line per row."""
        import pandas

        return pandas.DataFrame(self.rows)

    def plot(self) -> Drawing:
        """A picture of the structure over the steps of training, one chart for each measure."""
        return side_by_side(list(monitor_charts(self.rows).values()))

    def __repr__(self) -> str:
        steps = [row["step"] for row in self.rows if "step" in row]
        seen = f"steps {min(steps)} to {max(steps)}, {len(self.rows)} rows" if steps else "nothing seen yet"
        return f"StructureMonitor({type(self.model).__name__}: {seen})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>" + (self.plot().svg() if self.rows else "")

    def trainer_callback(self) -> Any:
        """This monitor as a callback of the Hugging Face `Trainer`."""
        from crystallite.monitoring.huggingface import trainer_callback

        return trainer_callback(self)

    def lightning_callback(self) -> Any:
        """This monitor as a Lightning callback."""
        from crystallite.monitoring.lightning import lightning_callback

        return lightning_callback(self)

    def close(self) -> None:
        """Close what the monitor opened. Rows are on disk already."""
        if self._tensorboard:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
