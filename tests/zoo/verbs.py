"""The cells of the table: each verb of the package on one model, with what came of it."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import crystallite as cx
from crystallite.compression.pruning import find_prunable_with_experts
from crystallite.data.batch import Batch, batches
from crystallite.models.composites import expanded
from crystallite.models.experts import units_and_experts
from crystallite.models.opening import open_model
from crystallite.models.preparing import prepared
from tests.zoo.cases import (
    Case,
    NotApplicable,
    Nothing,
    Outcome,
    Wrong,
    answers,
    deviation,
    main,
    plain_text,
    same,
    tolerance,
    unwrapped,
    valid,
    where,
)
from tests.zoo.counting import count
from tests.zoo.entry import Pairs

__all__ = ["VERBS", "generated", "run", "run_all"]

BUDGET, WITHIN = 0.5, 0.01
NEW_TOKENS = 6


def analyze(case: Case) -> dict[str, Any]:
    rows = [row.name for row in cx.analyze(case.model).rows]
    if not rows:
        raise Nothing("no layer was listed")
    missing = [name for name in _matrices(case.model) if not any(_names(row, name) for row in rows)]
    if missing:
        raise Wrong(f"{len(missing)} of {len(_matrices(case.model))} weights are not listed, as {missing[0]}")
    return {"layers": len(rows)}


def open_folder(case: Case) -> dict[str, Any]:
    """A folder of the dense model comes back as the class that it was, head and all."""
    if not case.is_transformers:
        raise NotApplicable("no model of transformers")
    folder = case.folder / "dense"
    case.model.save_pretrained(folder)
    again = open_model(str(folder), None).eval()
    if type(again) is not type(case.model):
        raise Wrong(f"opened as {type(again).__name__}, was {type(case.model).__name__}")
    return {"deviation": same(case, answers(again, case.fresh), answers(case.model, case.fresh), "the opened folder")}


def _names(row: str, parameter: str) -> bool:
    """Whether a row of the table is about a parameter, or a part of it."""
    name = unwrapped(parameter).removesuffix("_orig")  # a mask of torch.nn.utils.prune lies beside it
    return unwrapped(re.sub(r"\[.*?\]", "", row)).removesuffix("_orig") in (name, re.sub(r"[._]weight$", "", name))


def _matrices(model: nn.Module) -> list[str]:
    """Weights that multiply what a layer reads: of linear layers, convolutions, attention, gates, experts.

    Not those that are tied to a table, under whose name they are found.
    """
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    known = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention)
    found = []
    for name, module in model.named_modules():
        for own, p in module.named_parameters(name, recurse=False):
            stacked = p.ndim == 3 and own.endswith("_proj")
            if (
                p.ndim > 1
                and id(p) not in tables
                and (stacked or isinstance(module, known) or type(module).__name__ == "Conv1D")
            ):
                found.append(own)
    return found


def exact(case: Case) -> dict[str, Any]:
    masked, names = case.planted
    small = cx.reorganize(masked, level=None, only_if_faster=False, example=case.fresh.first(2).arguments)
    if not names:
        raise Nothing("no layer has a weight that could be masked, and nothing was said about it")
    parts = {unwrapped(change.name): change.blocks for change in cx.summary(small).changes}
    apart = [name for name in names if parts.get(unwrapped(name), 0) > 1]
    if not apart:
        raise Nothing(f"none of {len(names)} planted layers became blocks")
    own = same(case, answers(small, case.fresh), answers(masked, case.fresh), "blocks against the masked model")
    case.made["exact"] = small
    again = cx.restore(small)
    before, after = _weights(masked), _weights(again)
    if before.keys() != after.keys() or any(not torch.equal(before[name], after[name]) for name in before):
        wrong = next((n for n in [*before, *after] if n not in before or n not in after), "") or "others"
        raise Wrong(f"restore does not give the weights back: {wrong}")
    same(case, answers(again, case.fresh), answers(masked, case.fresh), "the restored model")
    missed = sorted(set(names) - set(apart))
    return {"layers": len(names), "apart": len(apart), "deviation": own, "left": missed[:3]}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights by name, as layers use them: what a parametrization or a mask computes, not what it is made of."""
    state = {unwrapped(name): value for name, value in model.state_dict().items()}
    stored = re.compile(r"\.parametrizations\.|_(orig|mask)$")
    kept = {name: value for name, value in state.items() if not stored.search(name)}
    for name, module in model.named_modules():
        if any(stored.search(f".{own}") for own, _ in module.named_parameters()) and hasattr(module, "weight"):
            kept[unwrapped(f"{name}.weight")] = module.weight.detach()
    return kept


def compress(case: Case) -> dict[str, Any]:
    small = cx.compress(case.model, case.calibration, budget=BUDGET)
    case.made["compress"] = small
    numbers = _cost_and_error(case, small)
    numbers["reported_error"] = round(cx.record(small).options.held_out_error, 4)
    numbers["reported_share"] = _reported_share(small)
    share = numbers["share"]
    if share > 0.99:
        raise Nothing(f"keeps {share:.0%} of the multiply-adds, error {numbers['error']:.3f}", numbers)
    if share > BUDGET + WITHIN:
        raise Wrong(f"keeps {share:.0%} of the whole model's multiply-adds, error {numbers['error']:.3f}", numbers)
    return numbers


def _reported_share(small: nn.Module) -> float:
    before, after = cx.summary(small).macs
    return round(after / max(before, 1), 4)


def _cost_and_error(case: Case, small: nn.Module) -> dict[str, Any]:
    """Counted shares of the whole model's multiply-adds, and the error on samples that nothing was fitted on."""
    before, after = count(case.model, case.fresh), count(small, case.fresh)
    expected, found = (torch.cat([answers(m, b) for b in case.judging]) for m in (case.model, small))
    if found.shape != expected.shape or not found.isfinite().all():
        raise Wrong(f"outputs of shape {list(found.shape)} or not finite, expected {list(expected.shape)}")
    features = expected.movedim(1, -1) if expected.ndim == 4 else expected  # images: channels stand before places
    spread = features - features.flatten(0, -2).mean(0)
    return {
        "share": round(after.share_of(before), 4),
        "share_with_attention": round((after.weights + after.others) / (before.weights + before.others), 4),
        "rebuilt": round(after.rebuilt / before.total, 4),  # weights multiplied out in every call
        "error": round(float(((found - expected).norm() / spread.norm()) ** 2), 4),
    }


def blocks(case: Case) -> dict[str, Any]:
    small = cx.compress(case.model, case.calibration, blocks=2)
    case.made["blocks"] = small
    numbers = _cost_and_error(case, small)
    apart = sum(change.blocks > 1 for change in cx.summary(small).changes)
    if not apart:
        raise Nothing("no layer became blocks")
    return numbers | {"layers": apart}


def upgrade(case: Case) -> dict[str, Any]:
    half = case.calibration[: len(case.calibration) // 2]
    small = cx.upgrade(case.model, blocks=2, data=half, epochs=2, learning_rate=1e-3)
    case.made["upgrade"] = small
    changes = [change for change in cx.summary(small).changes if change.blocks > 1]
    if not changes:
        raise Nothing("no layer became blocks")
    attention = _all_pairs(case.entry.value_output) | _all_pairs(case.entry.query_key)
    cut = [change.name for change in changes if any(re.fullmatch(rf"(.*\.)?({end})", change.name) for end in attention)]
    if cut:
        raise Wrong(f"attention was cut without being asked for: {cut[0]}")
    return {"layers": len(changes), **_cost_and_error(case, small)}


def _all_pairs(pairs: tuple[Pairs, ...]) -> set[str]:
    return {end for pair in pairs for end in (pair.writer, pair.reader)}


def validate(case: Case) -> dict[str, Any]:
    small = case.small()
    verdict = cx.validate(case.source(_origin(case)), small, [_as_data(case.fresh.first(16))])
    share = verdict.macs[1] / max(verdict.macs[0], 1)
    batch = case.fresh.first(16)
    before, after = count(case.source(_origin(case)), batch), count(small, batch)
    counted = after.share_of(before)
    if abs(share - counted) > 0.02:
        raise Wrong(f"counts {share:.1%} of the multiply-adds, executed are {counted:.1%}")
    return {"passed": verdict.passed, "share": round(share, 4)}


def _origin(case: Case) -> str:
    return next(verb for verb in ("compress", "blocks", "upgrade", "exact") if verb in case.made)


def _as_data(batch: Batch) -> Any:
    return dict(batch.named) if batch.named else (batch.positional,)


def save(case: Case) -> dict[str, Any]:
    """Each smaller model, saved and loaded in the same process."""
    case.small()
    for verb, small in case.made.items():
        folder = cx.save(small, case.folder / f"saved-{verb}", source=case.source(verb))
        into = case.entry.model() if case.entry.own_code else None
        again = cx.load(folder, into=into)
        same(case, answers(again, case.fresh), answers(small, case.fresh), f"{verb}, saved and loaded")
    return {"saved": sorted(case.made)}


def pretrained(case: Case) -> dict[str, Any]:
    """Folders that another process opens: see `reopening.py`, which has the last word."""
    case.small()
    for verb, small in case.made.items():
        folder = case.folder / f"fresh-{verb}"
        if case.is_transformers:
            small.save_pretrained(folder)
        else:
            cx.save(small, folder)
        expected = {"batch": case.fresh, "answers": answers(small, case.fresh)}
        expected |= {"model": case.entry.name, "transformers": case.is_transformers}
        torch.save(expected, case.folder / f"fresh-{verb}.pt")
    return {"saved": sorted(case.made)}


def generate(case: Case) -> dict[str, Any]:
    if not case.entry.generates:
        raise NotApplicable("writes no text")
    dense = [generated(case.model, case.fresh, cache) for cache in (True, False)]
    if not torch.equal(*dense):
        raise NotApplicable("the original writes something else without its cache")
    small = case.small()
    with_cache, without = (generated(small, case.fresh, cache) for cache in (True, False))
    if not torch.equal(with_cache, without):
        raise Wrong("other tokens with the cache than without")
    torch.save({"tokens": with_cache, "verb": _origin(case)}, case.folder / "tokens.pt")
    return {"tokens": int(with_cache.numel())}


def generated(model: nn.Module, batch: Batch, cache: bool) -> Tensor:
    """Tokens that a model writes after the first four samples, unpadded."""
    start = {name: value[:4] for name, value in batch.named.items() if not name.startswith("decoder_")}
    if "attention_mask" in start:
        start = {"input_ids": start["input_ids"][:, :8]}  # the shortest text
    sizes = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    return model.generate(**start, **sizes, do_sample=False, num_beams=1, use_cache=cache)


def onnx(case: Case) -> dict[str, Any]:
    small, path = case.small(), case.folder / "model.onnx"
    data = [_as_data(case.fresh.first(8)), _as_data(case.fresh.slice(8, 11))]
    found = cx.export(small, path, data)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    batch = case.fresh.slice(11, 16)
    given = dict(batch.named) if batch.named else dict(enumerate(batch.positional))
    names = [value.name for value in session.get_inputs()]
    feed = {
        name: given[name if name in given else i].numpy() for i, name in enumerate(names) if name in given or i in given
    }
    expected = answers(small, batch)
    outputs = [torch.from_numpy(np.asarray(o)).float() for o in session.run(None, feed)]
    tried = [valid(o, batch) for o in outputs if valid(o, batch).shape == expected.shape]
    if not tried:
        raise Wrong(f"no output of shape {list(expected.shape)}: {[list(o.shape) for o in outputs]}")
    own = min(deviation(each, expected) for each in tried)
    if not own <= max(1e-3, tolerance(case.model)):  # half precision is written in single precision
        raise Wrong(f"in ONNX Runtime outputs deviate by {own:.2g}")
    return {"deviation": own, "bytes": found.bytes}


def service(case: Case) -> dict[str, Any]:
    small = case.small()
    folder = case.folder / f"saved-{_origin(case)}"
    if not folder.exists():
        folder = cx.save(small, case.folder / "served")
    batch = case.fresh.first(3)
    into = case.entry.model() if case.entry.own_code else None
    with cx.Service.load(folder, into=into, unvalidated=True) as opened:
        found = opened.infer(batch.arguments)
    expected = batch.run(small)
    if isinstance(found, dict) and isinstance(expected, Mapping):
        for name in found:
            same(case, valid(found[name], batch), valid(expected[name], batch), f"{name} of the service")
    else:
        same(case, valid(main(found), batch), valid(main(expected), batch), "answers of the service")
    return {"samples": batch.size}


def report(case: Case) -> dict[str, Any]:
    small, path = case.small(), case.folder / "report.html"
    page = cx.report(case.source(_origin(case)), path, reorganized=small)
    html = path.read_text()
    missing = [row.name for row in page.analysis.rows if escape(row.name) not in html]
    if missing:
        raise Wrong(f"{missing[0]} is not on the page")
    return {"bytes": path.stat().st_size}


def units(case: Case) -> dict[str, Any]:
    """Which pairs the fitted path would take as units, of those that the architecture has."""
    model = expanded(prepared(case.entry.model())[0])
    names = {unit.name for unit in units_and_experts(model, ["*"], []) if not unit.reason}
    prunable, why = find_prunable_with_experts(model, names, names, next(batches(case.calibration)))
    kinds = {"feed_forward": [], "value_output": [], "query_key": []}
    for group in prunable.groups:
        kind = "query_key" if not group.readers else "value_output" if group.inside_heads else "feed_forward"
        kinds[kind].append(group.layers)
    reasons = sorted({*prunable.reasons.values(), *filter(None, [why])})
    numbers: dict[str, Any] = {"groups": len(prunable.groups), "reasons": reasons}
    missed = []
    for what in ("feed_forward", "value_output", "query_key"):
        for pair in getattr(case.entry, what):
            expected = pair.expected(case.model)
            found = sum(pair.is_in(tuple(layers)) for layers in kinds[what])
            numbers.setdefault(what, []).append([found, expected, pair.reason])
            if not expected:
                raise Wrong(f"the registry names {pair.reader}, which the model does not have")
            missed += [f"{what} {found} of {expected}"] if found < expected and not pair.reason else []
    if missed:
        raise Nothing(", ".join(missed), numbers)
    return numbers


VERBS: dict[str, Callable[[Case], dict[str, Any]]] = {
    verb.__name__: verb
    for verb in (
        analyze, open_folder, units, exact, compress, blocks, upgrade, validate, save, pretrained, generate, onnx,
        service, report,
    )
}  # fmt: skip


def run(case: Case, verb: str) -> Outcome:
    """One cell."""
    began = time.perf_counter()

    def outcome(status: str, text: str = "", numbers: Any = None, frames: tuple[str, ...] = ()) -> Outcome:
        return Outcome(status, text, numbers or {}, frames, round(time.perf_counter() - began, 2))

    if verb in case.entry.not_applicable:
        return outcome("n/a", case.entry.not_applicable[verb])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return outcome("works", numbers=VERBS[verb](case))
    except NotApplicable as reason:
        return outcome("n/a", str(reason))
    except Wrong as what:
        return outcome("wrong", str(what), what.numbers)
    except Nothing as what:
        return outcome("nothing", str(what), what.numbers)
    except cx.CrystalliteError as error:
        return outcome("refused", plain_text(error), frames=where(error))
    except Exception as error:
        return outcome("crash", f"{type(error).__name__}: {plain_text(error)}", frames=where(error))


def run_all(case: Case, verbs: list[str]) -> Iterator[tuple[str, Outcome]]:
    """The cells of a model, in an order in which later ones find what earlier ones made."""
    for verb in VERBS:
        if verb in verbs:
            yield verb, run(case, verb)
