"""The Ray cluster that work is spread over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crystallite.core.errors import InvalidOption

__all__ = ["connected"]


@contextmanager
def connected() -> Iterator[Any]:
    """The `ray` module, connected; what was started here is stopped here.

    Uses the cluster this process is connected to, else the one that `RAY_ADDRESS` names or that runs on this machine,
    else starts one on this machine for the time of the call. Ray listens on every network interface and runs what it
    is sent: keep clusters on a private network, with token authentication.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise InvalidOption("engine=\"ray\" needs Ray: pip install 'crystallite[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        yield ray
    finally:
        ray.shutdown()
