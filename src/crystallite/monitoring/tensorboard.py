"""The monitor's records as TensorBoard scalars and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crystallite.core.errors import CrystalliteError
from crystallite.monitoring.measures import FunctionalMap, Row

__all__ = ["TensorBoard"]

_SCALARS = ("kept_share", "largest_share", "blocks", "preference", "suppression", "gap", "modules")


class TensorBoard:
    """Writes to a folder, or through a `SummaryWriter` that the training already has (and keeps open)."""

    def __init__(self, target: Any) -> None:
        self._owned = isinstance(target, (str, Path))
        self._writer = _summary_writer(target) if self._owned else target

    def write(self, step: int, rows: list[Row], found: FunctionalMap | None) -> None:
        for row in rows:
            for name in _SCALARS:
                if row.get(name) is not None:
                    self._writer.add_scalar(f"structure/{name}/{row['layer']}", row[name], step)
            for i, sigma in enumerate(row.get("sigma", [])[1:], 2):
                self._writer.add_scalar(f"structure/sigma/{i}", sigma, step)
        if found is not None:
            self._writer.add_image("structure/functional map", found.picture[None], step)  # (1, outputs, inputs)

    def close(self) -> None:
        if self._owned:
            self._writer.close()


def _summary_writer(folder: Any) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise CrystalliteError("writing to TensorBoard needs its package: pip install tensorboard") from None
    return SummaryWriter(folder)
