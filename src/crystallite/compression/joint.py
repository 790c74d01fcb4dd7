"""One partition through consecutive layers, so that a network becomes several that share nothing."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor

from crystallite.compression.operator_specs import FittedOperator, OperatorSpec
from crystallite.compression.sequential import fit_layers_, fitted_operator
from crystallite.compression.session import Session
from crystallite.core.errors import InvalidOption
from crystallite.data.positions import real_rows
from crystallite.graph.chains import find_chains
from crystallite.partitioning.partition import Partition, decorrelated_partition, random_partition
from crystallite.statistics.layer_io import read_rows
from crystallite.statistics.output_error import mean_output_error
from crystallite.statistics.regression import Regression
from crystallite.statistics.watching import watching

__all__ = ["fit_jointly"]

_DRAWS = 2  # partitions of each kind that are tried


def fit_jointly(session: Session, blocks: int, example: Any, progress: bool) -> dict[str, FittedOperator]:
    """The operators of all layers, blocks where they are joined; of a few partitions that with least output error."""
    chains = [
        chain
        for chain in find_chains(session.dense, list(session.units), (), example, ("evaluation",))
        if len(chain.layers) > 1 and min(chain.sizes.values()) >= blocks
    ]
    if not chains:
        raise InvalidOption(f"joint=True: no consecutive layers have the {blocks} neurons that {blocks} blocks need")
    samples = _first_inputs(session, [chain.layers[0] for chain in chains])
    best: tuple[float, dict[str, FittedOperator]] | None = None
    for draw in range(session.seed, session.seed + _DRAWS):
        for partition in (
            random_partition(chains, blocks, draw),
            decorrelated_partition(chains, blocks, samples, draw),
        ):
            student = copy.deepcopy(session.dense)
            operators = fit_layers_(session, student, _Chooser(session, partition), progress)
            error = mean_output_error(student, session.dense, session.data.held_out)
            if best is None or error < best[0]:
                best = error, operators
    assert best is not None
    return best[1]


class _Chooser:
    """Gives each layer of a partition its blocks, and fits the others again."""

    def __init__(self, session: Session, partition: Partition) -> None:
        self.session, self.partition = session, partition

    def __call__(self, name: str, regression: Regression, samples: int) -> FittedOperator:
        if name not in self.partition.layers:
            return fitted_operator(regression, OperatorSpec())
        cells = tuple(self.partition.members(name))
        self.session.check_samples(name, max(len(c) for _, c in cells), samples)
        return fitted_operator(regression, OperatorSpec(0, cells))


def _first_inputs(session: Session, names: list[str]) -> dict[str, Tensor]:
    """What some layers read on the first batch."""
    batch = session.data.all[0]
    rows = partial(real_rows, batch, most=batch.size, seed=session.seed)
    with watching(session.dense, names) as calls:
        batch.run(session.dense)
    return {name: read_rows(session.dense.get_submodule(name), own[0].inputs[0], rows) for name, own in calls.items()}
