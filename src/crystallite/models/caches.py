"""Caches of generation in transformers models: switched off where a model is taken as a function of its inputs."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["turn_caches_off_"]


def turn_caches_off_(model: nn.Module) -> None:
    """No part of the model returns a cache any more: a cache is no result of the function.

    The configurations of all parts are changed, and those inside others, as encoder–decoders have them.

    >>> turn_caches_off_(nn.Linear(2, 2))  # has no configuration
    """
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [value for value in getattr(config, "__dict__", {}).values() if hasattr(value, "to_dict")]
    for config in found.values():
        if hasattr(config, "use_cache"):
            config.use_cache = False
