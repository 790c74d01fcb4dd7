"""Coverage-guided fuzzing (atheris) of every reader, and of loading artifacts.

`python -m benchmarks.attacks.fuzzing KIND --runs 20000 --corpus FOLDER` begins with sound files, or with what FOLDER
holds, keeps there what reached new code, and ends with an error at the first input that ends in anything but a
`CrystalliteError`; that input is left as `FOLDER/crash-…`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = ("safetensors", "torch", "torch legacy", "npz", "npz deflated", "npy", "gguf", "onnx", "artifact", "journal")
_COMPILED = (
    "structure.decompose", "structure.hubs", "structure.levels", "annealing.anneal",
    "operators.chain", "operators.conv", "operators.feed_forward", "operators.low_rank_recurrent",
    "operators.recurrent",
)  # fmt: skip
_SUFFIXES = {"torch": ".pt", "torch legacy": ".pt", "npz deflated": ".npz"}


def target(kind: str, folder: Path) -> Callable[[bytes], None]:
    """What is done with an input: opened, looked at and read; refused with a `CrystalliteError`, or it is a fault."""
    from crystallite.core.errors import CrystalliteError

    attempt = {"artifact": _artifacts, "journal": _journal}.get(kind, _weights)(kind, folder)

    def run(data: bytes) -> None:
        try:
            attempt(data)
        except CrystalliteError:
            return

    return run


def _weights(kind: str, folder: Path) -> Callable[[bytes], None]:
    from crystallite.weights import open_checkpoint, recognise

    path = folder / f"input{_SUFFIXES.get(kind, f'.{kind}')}"

    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        with open_checkpoint(path) as checkpoint:
            for layer in recognise(checkpoint):
                layer.matrices(checkpoint)
            for name in checkpoint.tensors:
                checkpoint.read(name)

    return attempt


def _artifacts(_kind: str, folder: Path) -> Callable[[bytes], None]:
    """The first byte says which artifact, the rest is its manifest, which is signed if it is JSON."""
    import crystallite as cx
    from benchmarks.attacks import seeds
    from crystallite.models.manifest import MANIFEST, write_manifest

    given = {name: seeds.artifact(name, folder / name) for name in seeds.MODELS}

    def attempt(data: bytes) -> None:
        import torch

        name = [*given][data[0] % len(given)] if data else "BlockLinear"
        try:
            write_manifest(folder / name, dict(json.loads(data[1:])))
        except (ValueError, TypeError, RecursionError, cx.CrystalliteError):
            (folder / name / MANIFEST).write_bytes(data[1:])
        model = cx.load(folder / name)
        try:
            with torch.no_grad():
                model.eval()(*given[name])
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):  # of PyTorch, at the call
            return

    return attempt


def _journal(_kind: str, folder: Path) -> Callable[[bytes], None]:
    """A file that `analyze(resume=…)` goes on from."""
    import torch
    from safetensors.torch import save_file

    import crystallite as cx

    save_file({"w": torch.eye(4)}, folder / "w.safetensors")

    def attempt(data: bytes) -> None:
        (folder / "journal").write_bytes(data)
        cx.analyze(folder / "w.safetensors", resume=folder / "journal", fast=True)

    return attempt


def sound(kind: str) -> list[bytes]:
    """Inputs to begin with."""
    from benchmarks.attacks import seeds

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if kind == "artifact":
            for name in seeds.MODELS:
                seeds.artifact(name, folder / name)
            texts = [(folder / name / "manifest.json").read_bytes() for name in seeds.MODELS]
            return [bytes([i]) + text for i, text in enumerate(texts)]
        if kind == "journal":
            _journal(kind, folder)(b"")
            return [(folder / "journal").read_bytes()]
        path = folder / f"sound{_SUFFIXES.get(kind, f'.{kind}')}"
        seeds.FILES[kind](path)
        return [path.read_bytes()]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seconds", type=int, default=600, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, required=True)
    given = parser.parse_args(arguments)
    given.corpus.mkdir(parents=True, exist_ok=True)
    import atheris

    for compiled in _COMPILED:  # numba cannot compile what atheris has put its counters into
        importlib.import_module(f"crystallite.{compiled}")
    with atheris.instrument_imports(include=["crystallite"]):
        for watched in ("weights", "models.artifact", "analysis.run"):
            importlib.import_module(f"crystallite.{watched}")
    warnings.simplefilter("ignore")
    for i, data in enumerate(sound(given.kind)):
        (given.corpus / f"sound-{i}").write_bytes(data)
    with tempfile.TemporaryDirectory() as folder:
        options: list[Any] = [f"-runs={given.runs}", f"-max_total_time={given.seconds}", f"-seed={given.seed}"]
        options += ["-max_len=20000", "-timeout=120", "-rss_limit_mb=4000", f"-artifact_prefix={given.corpus}/"]
        atheris.Setup([sys.argv[0], *options, str(given.corpus)], target(given.kind, Path(folder)))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
