"""Functional modules: which outputs of a model listen to which inputs, whatever its single weights look like."""

from crystallite.discovery.discover import discover
from crystallite.discovery.modules import Modules

__all__ = ["Modules", "discover"]
