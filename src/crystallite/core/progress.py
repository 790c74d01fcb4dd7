"""What long work says while it has nothing to count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["phase"]


@contextmanager
def phase(name: str, shown: bool) -> Iterator[None]:
    """A line on standard error that names what is being done, and afterwards how long it took.

    >>> with phase("tracing", shown=False):
    ...     pass
    """
    with tqdm(total=1, desc=name, bar_format="{desc} [{elapsed}]", disable=not shown) as bar:
        yield
        bar.update()
