"""The monitor as a Lightning callback."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from crystallite.core.errors import CrystalliteError

if TYPE_CHECKING:
    from crystallite.monitoring.monitor import StructureMonitor

__all__ = ["lightning_callback"]


def lightning_callback(monitor: StructureMonitor) -> Any:
    """A `Callback` that calls the monitor after every training batch, on the process that logs."""
    base = _callback_class()

    class StructureCallback(base):  # type: ignore[misc,valid-type]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.is_global_zero:
                monitor.step(trainer.global_step)

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            monitor.close()

    return StructureCallback()


def _callback_class() -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):  # the same library under its new and its old name
        try:
            return importlib.import_module(package).Callback
        except ImportError:
            continue
    raise CrystalliteError("this callback needs Lightning: pip install lightning")
