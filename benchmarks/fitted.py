"""Smaller operators without training: quality against multiply-adds and against measured time, beside baselines.

`python -m benchmarks.fitted [--tasks minilm …] [--seeds 0 1 2] [--mnist DATA.npz] [--wordnet FOLDER] [--kinds KIND …]
[--mixed-with KIND …]`. No method sees
labels or what it is judged by, but for the narrow network, which is trained like the dense one. ONNX Runtime, fp32 and
dynamic int8, is what a CPU user would pick instead. Stores benchmarks/results/fitted.json and draws
docs/figures/fitted.svg from it.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import fitted_tasks
from benchmarks.fitted_tasks import ELSEWHERE, Task
from benchmarks.texts import KINDS
from benchmarks.timing import MNIST, show, store, stored
from crystallite.baselines import METHODS
from crystallite.baselines.compare import makers
from crystallite.baselines.onnx_runtime import InOnnxRuntime
from crystallite.compression.compress import compress
from crystallite.compression.polish import WholeOutputs, polish_
from crystallite.core.errors import CrystalliteError
from crystallite.data.batch import Batch, batches
from crystallite.data.calibration import Calibration
from crystallite.models.layers import find_units
from crystallite.validation.cost import count_macs

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "fitted.svg"
_OURS, _POLISHED, _FOR_INT8 = "fitted", "fitted, polished", "fitted for int8, polished"
_IN_INT8 = " + ONNX Runtime int8"
_TEXTS = 40_000  # of WordNet: the first 32,768 tokens are fitted on, polishing learns from all
_DENSE = ("ONNX Runtime fp32", "ONNX Runtime int8")  # what runs the dense model, whatever the budget


def measured(
    task: Task, seed: int, budgets: list[float], only: str = "", blocks: tuple[int, ...] = (),
    methods: Sequence[str] = tuple(METHODS), polish: int = 0, int8_budgets: Sequence[float] = (),
) -> list[dict]:  # fmt: skip
    """A row for each method and budget.

    only: a regular expression; layers of other names stay as they are. polish: steps of training towards the dense
    model's outputs, without labels, for further rows. int8_budgets: shares of the time that 8-bit layers take.
    """
    names = [
        unit.name
        for unit in find_units(task.model, ["*"], [])
        if re.search(only, unit.name) and not any(part in unit.name for part in task.ignore)
    ]
    timed = list(batches(task.timed))
    groups = [group for group in task.groups if {name.rpartition(".")[0] for name, _ in group.carried} <= set(names)]
    made: dict[tuple[str, float], nn.Module] = {("dense", 1.0): task.model}
    told: dict[tuple[str, float], dict] = {("dense", 1.0): task.judge(task.model)}

    def add(method: str, budget: float, make: Callable[[], nn.Module]) -> None:
        start, used = time.perf_counter(), time.process_time()
        try:
            with one_thread() if "int8" in method or "ONNX" in method else torch.enable_grad():
                made[method, budget] = make().eval()
        except CrystalliteError as error:
            print(f"{task.name}, seed {seed}, budget {budget}: {method} skipped: {error}")
            return
        cost = {
            "made in s": time.perf_counter() - start, "processor s": time.process_time() - used,
            "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }  # fmt: skip
        told[method, budget] = {**task.judge(made[method, budget]), **cost}
        show(task.name, [{"seed": seed, "method": method, "budget": budget, **told[method, budget]}])

    def polished(budget: float) -> nn.Module:
        small = copy.deepcopy(made[_OURS, budget])
        data = Calibration.read(task.calibration, training=True)
        polish_(small, WholeOutputs(small, task.model), names, data, polish, seed)
        return small

    def quantised(budget: float) -> nn.Module:
        return InOnnxRuntime(made[_FOR_INT8, budget], timed[0], int8=True)

    fitted = partial(compress, task.model, calibration=task.calibration, targets=names, seed=seed)
    for method in _DENSE:
        if method in methods:
            add(method, 1.0, partial(InOnnxRuntime, task.model, timed[0], int8="int8" in method))
    for budget in int8_budgets:
        add(_FOR_INT8, budget, partial(fitted, budget=budget, objective="int8", polish_steps=polish))
        add(_FOR_INT8 + _IN_INT8, budget, partial(quantised, budget))
    for budget in budgets:
        add(_OURS, budget, partial(fitted, budget=budget))
        if polish:
            add(_POLISHED, budget, partial(polished, budget))
        if round(1 / budget) in blocks:
            add("fitted blocks", budget, partial(fitted, blocks=round(1 / budget)))
        if (_OURS, budget) not in made:
            continue
        small = made[_OURS, budget]
        if task.retrain is not None:
            share = count_macs(small, timed[0]) / count_macs(task.model, timed[0])
            add("narrow, retrained", budget, partial(task.retrain, share))
        others = makers(task.model, small, task.calibration, timed[0], groups or None, names, (), seed)
        for method in methods:
            if method not in _DENSE:
                add(method, budget, others[method])
    macs = {key: _macs(key, made, timed[0]) for key in made}
    times, single = (best_times(made, some) for some in (timed, [batch.first(1) for batch in timed]))
    dense = ("dense", 1.0)
    return [
        {
            "task": task.name + (", feed-forward only" if only else ""), "seed": seed, "method": key[0],
            "budget": key[1], "multiply-adds": macs[key] / macs[dense],
            "ms": 1000 * times[key], "speed-up": times[dense] / times[key],
            "ms batch 1": 1000 * single[key], "speed-up batch 1": single[dense] / single[key], **told[key],
        }
        for key in made
    ]  # fmt: skip


def _macs(key: tuple[str, float], made: Mapping[tuple[str, float], nn.Module], batch: Batch) -> int:
    """Multiply-adds of the whole model; ONNX Runtime has those of the model that it runs."""
    method, budget = key
    if "ONNX" in method:
        key = ("dense", 1.0) if method in _DENSE else (method.removesuffix(_IN_INT8), budget)
    return count_macs(made[key], batch)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def best_times(models: Mapping[Any, nn.Module], some: Sequence[Batch], repeats: int = 7) -> dict[Any, float]:
    """Seconds that each model takes for all batches: the best of several runs of each batch, in turns.

    One thread, and the time that the processor spent on it: on a quiet machine that is the time that passes, and on a
    busy one it still is nearly the same.
    """
    best = {(key, place): math.inf for key in models for place in range(len(some))}
    with one_thread(), torch.inference_mode():
        for _ in range(repeats):
            for key, place in best:
                start = time.process_time()
                some[place].run(models[key])
                best[key, place] = min(best[key, place], time.process_time() - start)
    return {key: sum(best[key, place] for place in range(len(some))) for key in models}


def summarised(rows: list[dict]) -> list[dict]:
    """Mean and standard deviation over seeds, of the quality as a share of the dense model's too."""
    dense = {(r["task"], r["seed"]): r["quality"] for r in rows if r["method"] == "dense"}
    found = []
    for key in dict.fromkeys((r["task"], r["method"], r["budget"]) for r in rows):
        same = [r for r in rows if (r["task"], r["method"], r["budget"]) == key]
        kept = [100 * r["quality"] / dense[r["task"], r["seed"]] for r in same]
        row = {"task": key[0], "method": key[1], "budget": key[2], "seeds": len(same)}
        for column in ("quality", "MRR", "cosine", "loss", "multiply-adds", "ms", "speed-up", "ms batch 1",
                       "speed-up batch 1"):  # fmt: skip
            values = [r[column] for r in same if column in r]
            if values:
                row |= {column: statistics.mean(values), f"± {column}": statistics.pstdev(values)}
        found.append({**row, "% of dense": statistics.mean(kept), "± % of dense": statistics.pstdev(kept)})
        whole = {r["seed"]: r for r in rows if r["method"] == "dense" and r["task"] == key[0]}
        for column in [name for name in same[0] if name.startswith(ELSEWHERE)]:
            shares = [100 * r[column] / whole[r["seed"]][column] for r in same if column in r]
            found[-1] |= {f"% of dense {column}": statistics.mean(shares), f"± {column}": statistics.pstdev(shares)}
    return found


def draw(rows: list[dict], path: Path) -> None:
    """Quality over multiply-adds and over measured time, a row of pictures for each task."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fitted"  # the same rows give the same file
    from matplotlib import pyplot

    found = summarised([row for row in rows if "calibrated with" not in row["task"]])
    tasks, methods = (list(dict.fromkeys(row[name] for row in found)) for name in ("task", "method"))
    ours = [method for method in methods if method.startswith("fitted")]
    others = [method for method in methods if method not in ours]
    styles: dict[str, dict[str, Any]] = {
        method: {"color": pyplot.get_cmap("tab10")(i), "linewidth": 1, "linestyle": "--", "marker": "o"}
        for i, method in enumerate(others)
    }
    for method, marker in zip(ours, "os^DvP*X", strict=False):
        styles[method] = {"color": "black", "linewidth": 2 if method == _OURS else 1, "marker": marker}
    figure, axes = pyplot.subplots(len(tasks), 2, figsize=(11, 3 * len(tasks) + 1), squeeze=False)
    shown: dict[str, Any] = {}
    for task, pair in zip(tasks, axes, strict=True):
        for axis, (column, power) in zip(pair, (("multiply-adds", 1), ("speed-up", -1)), strict=True):
            for method in methods:
                points = sorted(
                    (row[column] ** power, row["quality"], row["± quality"])
                    for row in found if row["task"] == task and row["method"] == method
                )  # fmt: skip
                if points:
                    x, y, error = zip(*points, strict=True)
                    shown[method] = axis.errorbar(x, y, error, markersize=5, capsize=3, **styles[method])
            axis.set_xlabel(("multiply-adds" if power > 0 else "time on one thread") + ", share of dense")
            axis.set_ylabel("quality")
            axis.set_title(task, fontsize=9)
            axis.grid(alpha=0.3)
    figure.tight_layout(rect=(0, 1.1 / figure.get_figheight(), 1, 1))
    figure.legend([shown[m] for m in [*ours, *others]], [*ours, *others], loc="lower center", ncol=4, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def minilm(options: argparse.Namespace, seed: int) -> list[dict]:
    task = fitted_tasks.retrieval(
        options.wordnet, seed, options.texts, kinds=options.kinds, mixed_with=options.mixed_with,
        paragraph_pools=options.pools,
    )  # fmt: skip
    budgets = [0.5, 0.25] if options.budgets is None else options.budgets
    return measured(
        task, seed, budgets, methods=options.methods, polish=options.polish, int8_budgets=options.int8_budgets
    )


def feed_forward(options: argparse.Namespace, seed: int) -> list[dict]:
    """MiniLM, but only the feed-forward pairs are made smaller."""
    task = fitted_tasks.retrieval(options.wordnet, seed, options.texts)
    return measured(
        task, seed, options.budgets or [0.5], r"layer\.\d+\.(intermediate|output)\.dense", methods=options.methods
    )


def mnist(options: argparse.Namespace, seed: int) -> list[dict]:
    task = fitted_tasks.mnist(options.mnist, seed)
    return measured(task, seed, options.budgets or [0.5, 0.25, 0.125], blocks=(2, 4, 8))


def characters(options: argparse.Namespace, seed: int) -> list[dict]:
    return measured(fitted_tasks.characters(seed), seed, options.budgets or [0.75, 0.5, 0.25])


def cnn(options: argparse.Namespace, seed: int) -> list[dict]:
    from benchmarks.fitted_units import digits_cnn

    return measured(digits_cnn(seed), seed, options.budgets or [0.5, 0.25])


def g2p(options: argparse.Namespace, seed: int) -> list[dict]:
    """Judged by speaking phoneme after phoneme, which is no part of what an ONNX file holds."""
    from benchmarks.fitted_units import g2p as task

    methods = [method for method in METHODS if "ONNX" not in method]
    return measured(task(seed, wordnet=options.wordnet), seed, options.budgets or [0.75, 0.5], methods=methods)


TASKS = {
    "minilm": minilm, "feed-forward": feed_forward, "mnist": mnist, "characters": characters, "cnn": cnn, "g2p": g2p,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=None, help="all for which there is data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budgets", type=float, nargs="*", default=None)
    parser.add_argument("--int8-budgets", type=float, nargs="*", default=[0.45, 0.28], help="for MiniLM")
    parser.add_argument(
        "--methods", nargs="*", choices=METHODS, default=list(METHODS), help="for MiniLM (default: all)"
    )
    parser.add_argument("--polish", type=int, default=600, metavar="STEPS", help="for MiniLM, of label-free training")
    parser.add_argument("--texts", type=int, default=_TEXTS, help="of WordNet to calibrate MiniLM with")
    parser.add_argument(
        "--kinds", nargs="*", choices=KINDS, default=[], help="of other text that MiniLM is judged by too"
    )
    parser.add_argument(
        "--mixed-with", nargs="*", choices=KINDS, default=[], help="other text that MiniLM is calibrated with too"
    )
    parser.add_argument(
        "--pools", type=int, default=1, help="of 500 paragraphs of each of those kinds that it is not calibrated with"
    )
    parser.add_argument("--mnist", type=Path, default=MNIST, help="mnist.npz: Xtr, ytr, Xte, yte")
    parser.add_argument("--wordnet", default=fitted_tasks.WORDNET, help="folder of data.noun … (Debian: wordnet-base)")
    options = parser.parse_args(arguments)
    for name in options.tasks or [name for name in TASKS if name != "mnist" or options.mnist.exists()]:
        new: list[dict] = []
        for seed in options.seeds:
            new += TASKS[name](options, seed)
            before = {_key(row): row for row in stored("fitted")}
            kept = [row for key, row in before.items() if key not in {_key(row) for row in new}]
            store("fitted", kept + [{**before.get(_key(row), {}), **row} for row in new])  # kinds that others judged
        show("mean over seeds", summarised(new))
    draw(stored("fitted"), FIGURE)


def _key(row: dict) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("task", "seed", "method", "budget"))


if __name__ == "__main__":
    main()
