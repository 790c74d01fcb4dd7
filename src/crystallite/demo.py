"""`crystallite demo`: two small networks trained on the spot, one that does not separate and one that does."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from crystallite.analysis import analyze
from crystallite.annealing import nulls
from crystallite.annealing.anneal import anneal
from crystallite.artifact import save
from crystallite.errors import CrystalliteError
from crystallite.reorganization.rewrite import reorganize
from crystallite.reorganization.summary import summary
from crystallite.structure.decompose import decompose
from crystallite.structure.levels import level_profile

__all__ = ["run"]


def run(out: Path) -> None:
    """Train, analyse, decompose, rebuild; write the analysis and a picture to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    images, digits = _digits()
    torch.manual_seed(0)

    print("1. A network trained on handwritten digits, 64-128-128-10\n")
    dense = _mlp(64, 128, 10)
    train, test = slice(0, 1400), slice(1400, None)
    _fit(dense, images[train], digits[train][:, None])
    save_file(dense.state_dict(), out / "digits.safetensors")
    analysis = analyze(out / "digits.safetensors", null="init")
    (out / "analysis.json").write_text(json.dumps(analysis.to_json(), indent=1) + "\n")
    print(analysis.table())
    print(f"\n   {analysis.verdict}")
    before = _accuracy(dense, images[test], digits[test][:, None])
    annealed = _annealed(dense)
    after = _accuracy(annealed, images[test], digits[test][:, None])
    print(f"   Test accuracy {before:.1%}; with only the weights that pass both tests {after:.1%}.\n")

    print("2. Two digits side by side, read by two networks that were never joined, all neurons scrambled\n")
    pairs, labels = _pairs(images, digits)
    joint = _scrambled_halves(pairs[:1400], labels[:1400])
    weights = [layer.weight.detach() for layer in joint if isinstance(layer, nn.Linear)]
    for i, w in enumerate(weights):
        print(f"   layer {i}: {decompose(w)}")
    chain = level_profile(weights).at(float(min(w[w != 0].abs().min() for w in weights)))
    print(f"   inputs to outputs: {chain.n_blocks} blocks, the largest with {chain.largest_share:.0%} of the neurons")
    small = reorganize(joint, level=None, only_if_faster=False)
    with torch.no_grad():
        expected = joint(pairs[1400:])
        difference = float((small(pairs[1400:]) - expected).abs().max())
    print(f"   reorganized: {next(small.children())}")
    print(f"   its outputs differ by at most {difference:.1e} (largest output {float(expected.abs().max()):.1f})\n")
    artifact = out / "two-digits"
    shutil.rmtree(artifact, ignore_errors=True)
    save(small, artifact)
    picture = out / "blocks.svg"
    picture.write_text(_picture(weights[1].numpy()))

    print("3. Speed: the blocks of a 4096×4096 matrix\n")
    read, ours = _timings(torch.randn(4096, 4096))
    print(f"   one read pass {read * 1e3:.1f} ms, decompose {ours * 1e3:.1f} ms, ratio {ours / read:.1f}\n")

    dense_macs, block_macs = summary(small).macs
    print("                              before        after")
    print(f"   digits, test accuracy      {before:<13.1%} {after:.1%} (annealed, no repair)")
    print(f"   two digits, blocks         1             {chain.n_blocks}")
    print(f"   two digits, multiply-adds  {dense_macs:<13,} {block_macs:,}")
    print(f"\nWritten: {out / 'analysis.json'}, {out / 'digits.safetensors'}, {artifact}, {picture}")


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise CrystalliteError("the demo needs scikit-learn: pip install 'crystallite[demo]'") from None
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return torch.tensor(data.data[order] / 16, dtype=torch.float32), torch.tensor(data.target[order])


def _pairs(images: torch.Tensor, digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each image next to another one, and the two digits to read."""
    other = torch.randperm(len(images))
    return torch.cat([images, images[other]], 1), torch.stack([digits, digits[other]], 1)


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def _fit(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int = 30) -> None:
    """Cross-entropy over as many ten-way heads as y has columns."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(128):
            logits = model(x[batch]).view(len(batch), y.shape[1], 10)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y[batch].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x).view(len(x), y.shape[1], 10).argmax(2) == y).float().mean())


def _annealed(model: nn.Sequential) -> nn.Sequential:
    copy = _mlp(64, 128, 10)
    copy.load_state_dict(model.state_dict())
    for name, annealing in anneal(copy, null=nulls.for_module(copy)).items():
        copy.get_parameter(name).data *= annealing.mask
    return copy


def _scrambled_halves(x: torch.Tensor, y: torch.Tensor) -> nn.Sequential:
    """Two networks of half the width trained apart, put into one matrix per layer, every hidden neuron shuffled."""
    halves = [_mlp(64, 64, 10), _mlp(64, 64, 10)]
    for i, half in enumerate(halves):
        _fit(half, x[:, 64 * i : 64 * (i + 1)], y[:, i : i + 1])
    joint = _mlp(128, 128, 20)
    orders = [torch.arange(128), torch.randperm(128), torch.randperm(128), torch.arange(20)]
    with torch.no_grad():
        for depth, position in enumerate((0, 2, 4)):
            first, second, target = (_linear(m, position) for m in (*halves, joint))
            rows, cols = orders[depth + 1], orders[depth]
            target.weight.copy_(torch.block_diag(first.weight, second.weight)[rows][:, cols])
            target.bias.copy_(torch.cat([first.bias, second.bias])[rows])
    return joint


def _linear(model: nn.Sequential, position: int) -> nn.Linear:
    layer = model[position]
    assert isinstance(layer, nn.Linear)
    return layer


def _timings(w: torch.Tensor) -> tuple[float, float]:
    best: dict[str, float] = {}
    decompose(w, threshold=2.5758)
    for _ in range(7):
        for name, call in (("read", lambda: torch.sum(w)), ("ours", lambda: decompose(w, threshold=2.5758))):
            start = time.perf_counter()
            call()
            best[name] = min(best.get(name, np.inf), time.perf_counter() - start)
    return best["read"], best["ours"]


def _picture(w: np.ndarray) -> str:
    """The matrix as it came and as PWQᵀ, side by side, with the blocks outlined."""
    s = decompose(w)
    parts = []
    for left, matrix in ((0, w), (w.shape[1] + 12, s.apply(w))):
        shade = np.ceil(4 * np.abs(matrix) / np.abs(matrix).max()).astype(int)  # 0 is no edge, 1 to 4 are drawn
        for level in range(1, 5):
            cells = "".join(f"M{left + j} {i}.5h1" for i, j in np.argwhere(shade == level))
            parts.append(f'<path stroke-opacity="{level / 4}" d="{cells}"/>')
        parts.append(f'<rect class="frame" x="{left}" y="0" width="{w.shape[1]}" height="{w.shape[0]}"/>')
    row, col = 0, w.shape[1] + 12
    for rows, cols in s.block_shapes:
        parts.append(f'<rect class="block" x="{col}" y="{row}" width="{cols}" height="{rows}"/>')
        row, col = row + rows, col + cols
    size = f"{2 * w.shape[1] + 14} {w.shape[0] + 2}"
    style = "path{stroke:#3b6ea5}rect{fill:none;stroke:#888;stroke-width:.6}.block{stroke:#d1495b;stroke-width:1}"
    height = round(720 * (w.shape[0] + 2) / (2 * w.shape[1] + 14))
    title = "A weight matrix before and after its row and column permutations"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {size}" width="720" height="{height}" role="img">'
        f"<title>{title}</title><style>{style}</style>{''.join(parts)}</svg>\n"
    )
