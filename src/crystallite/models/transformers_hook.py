"""Make `from_pretrained` understand models that crystallite wrote, without importing transformers or torch for it.

transformers has no entry points for quantizers: whoever wants to be known must call `register_quantizer` after it has
been imported. So the one module that keeps the list is watched for, and ours is added when it has been loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["register_reader"]

_READERS = "transformers.quantizers.auto"  # keeps the list of who swaps modules


def register_reader() -> None:
    """Make `from_pretrained` understand what `write_config` wrote, in whatever order packages are imported.

    >>> register_reader()  # a second time: nothing
    """
    if _READERS in sys.modules:
        _register(sys.modules[_READERS])
    elif not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenLoaded())


def _register(readers: ModuleType) -> None:
    from crystallite.models.transformers_folder import register_with  # needs torch, which transformers has by now

    register_with(readers)


class _WhenLoaded(MetaPathFinder, Loader):
    """Finds the module with the list of readers where the others find it, and adds ours when it has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _READERS:
            return None
        found = (other.find_spec(fullname, path, target) for other in sys.meta_path if other is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module)
