"""Small integer tables that print like the paper's and compare like arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from crystallite.core.errors import InvalidOption

__all__ = ["Table"]


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of integers, counted from 1 as the paper counts.

    >>> t = Table(("new", "old"), np.array([[1, 3], [2, 1]]))
    >>> print(t)
    new  old
      1    3
      2    1
    >>> t["old"].tolist(), np.asarray(t).shape
    ([3, 1], (2, 2))
    """

    columns: tuple[str, ...]
    values: np.ndarray  # (rows, columns)

    def __getitem__(self, column: str) -> np.ndarray:
        if column not in self.columns:
            raise InvalidOption(f"no column {column!r}; the table has {', '.join(self.columns)}")
        return self.values[:, self.columns.index(column)]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (tuple(row) for row in self.values.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return self.columns == other.columns and np.array_equal(self.values, other.values)

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame(self.values, columns=list(self.columns))

    def __str__(self) -> str:
        cells = [list(self.columns), *([str(v) for v in row] for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in cells)

    __repr__ = __str__
