"""The monitor as a callback of the Hugging Face `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crystallite.core.errors import CrystalliteError

if TYPE_CHECKING:
    from crystallite.monitoring.monitor import StructureMonitor

__all__ = ["trainer_callback"]


def trainer_callback(monitor: StructureMonitor) -> Any:
    """A `TrainerCallback` that calls the monitor after every optimizer step, on the process that logs."""
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise CrystalliteError("this callback needs transformers: pip install 'crystallite[hf]'") from None

    class StructureCallback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                monitor.step(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            monitor.close()

    return StructureCallback()
