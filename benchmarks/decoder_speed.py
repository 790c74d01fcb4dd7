"""How quick a smaller decoder is, beside the original in the same run: in transformers, and in llama.cpp if built.

`python -m benchmarks.decoder_speed FOLDER [--shares 0.8 0.5] [--forms dense uniform] [--types f16 q8_0 q5_0 q4_0]
[--tokens 8192] [--judged 4096] [--parts transformers llama.cpp quality] [--table]`. Compressed models are made once and
kept in FOLDER, GGUF files beside them. Prompts are 1 × 512; decoding is one token after the other with past keys and
values. One thread; processor time, the best of some turns that all models take; what the multiply-adds allow stands
beside it. `quality`: perplexity in llama.cpp on text that is in no calibration, and bytes, of every type of the
original and of the results. Everything is stored in benchmarks/results/decoder_speed.json.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import crystallite as cx
from benchmarks.decoder_tasks import WINDOW, default_model, open_decoder, read_texts
from benchmarks.decoders import mixed_calibration, own_windows, whole_share
from benchmarks.timing import show, store, stored

PART = "decoder_speed"
ORIGINAL = "original"
_WRITTEN = 32  # tokens that are decoded
_TURNS = 5


def make(folder: Path, shares: list[float], forms: list[str], tokens: int, path: Path) -> dict[str, nn.Module]:
    """The original and the smaller models; those that the folder has are opened."""
    model, tokenizer = open_decoder(path)
    found: dict[str, nn.Module] = {ORIGINAL: model}
    for form in forms:
        names = {share: f"{form}-{share:g}" for share in shares}
        missing = [share for share, name in names.items() if not (folder / name).exists()]
        if missing:
            windows = read_texts(tokenizer, ["political essays"], [], tokens, WINDOW, 0).calibration
            mixed = mixed_calibration(windows, [partial(own_windows, model, 0)])
            batches = [{"input_ids": some} for some in mixed.split(4)]
            budgets = [whole_share(model, share) for share in missing]
            for share, small in zip(missing, cx.compress(model, batches, budget=budgets, form=form), strict=True):
                cx.save(small, folder / names[share])
        found |= {name: cx.load(folder / name).eval() for name in names.values()}
    return found


def multiply_adds(model: Any, prompt: int) -> int:
    """Of a prompt's matrices and scores; logits are those of its last token."""
    weights = sum(p.numel() for p in model.model.layers.parameters() if p.ndim > 1)
    config = model.config
    scores = config.num_hidden_layers * prompt * prompt * config.num_attention_heads * config.head_dim
    return prompt * weights + int(scores) + int(model.lm_head.weight.numel())


def in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of processor time, the best of some turns that all calls take."""
    best = dict.fromkeys(calls, math.inf)
    for _ in range(_TURNS + 1):  # the first warms up
        for name, call in calls.items():
            started = time.process_time()
            call()
            best[name] = min(best[name], 1000 * (time.process_time() - started))
    return best


def in_transformers(models: dict[str, nn.Module], ids: Tensor) -> Iterator[dict[str, Any]]:
    """A row for each model: a prompt, and a token with past keys and values."""

    @torch.inference_mode()
    def prompt(model: Any) -> Any:
        return model(input_ids=ids, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decode(model: Any) -> None:
        past = model(input_ids=ids[:, :8], use_cache=True, logits_to_keep=1).past_key_values
        for token in ids[0, 8 : 8 + _WRITTEN]:
            model(input_ids=token.view(1, 1), past_key_values=past, use_cache=True)

    yield from _rows(
        "transformers, float32",
        models,
        in_turns({name: lambda m=model: prompt(m) for name, model in models.items()}),
        in_turns({name: lambda m=model: decode(m) for name, model in models.items()}),
    )


def in_llama_cpp(models: dict[str, nn.Module], files: dict[str, Path], kind: str, ids: list[int]) -> Iterator[Any]:
    """The same in llama.cpp, of one type of file."""
    runtimes = {name: _runtime(file, logits_all=False) for name, file in files.items()}

    def prompt(runtime: Any) -> None:
        runtime.reset()
        runtime.eval(ids)

    def decode(runtime: Any) -> None:
        runtime.reset()
        runtime.eval(ids[:8])
        for token in ids[8 : 8 + _WRITTEN]:
            runtime.eval([token])

    try:
        yield from _rows(
            f"llama.cpp, {kind}",
            {name: models[name] for name in files},
            in_turns({name: lambda r=runtime: prompt(r) for name, runtime in runtimes.items()}),
            in_turns({name: lambda r=runtime: decode(r) for name, runtime in runtimes.items()}),
        )
    finally:
        for runtime in runtimes.values():
            runtime.close()


def _rows(
    where: str, models: dict[str, nn.Module], prompt: dict[str, float], decode: dict[str, float]
) -> Iterator[Any]:
    first = next(iter(models))
    whole = multiply_adds(models[first], WINDOW)
    for name, model in models.items():
        allowed = whole / multiply_adds(model, WINDOW)
        quicker = prompt[first] / prompt[name]
        yield {
            "where": where, "model": name, "prompt ms": round(prompt[name], 1),
            "token ms": round(decode[name] / _WRITTEN, 2), "prompt ×": round(quicker, 3),
            "multiply-adds allow ×": round(allowed, 3), "of what they allow": round(quicker / allowed, 3),
            "token ×": round(decode[first] / decode[name], 3),
        }  # fmt: skip


def _runtime(file: Path, logits_all: bool) -> Any:
    import llama_cpp

    return llama_cpp.Llama(
        str(file), n_ctx=WINDOW, n_batch=WINDOW, n_ubatch=WINDOW, n_threads=1, n_threads_batch=1,
        logits_all=logits_all, verbose=False,
    )  # fmt: skip


def exported(folder: Path, models: dict[str, nn.Module], kind: str, tokenizer: Path) -> dict[str, Path]:
    """GGUF files of all models; those that the folder has are kept."""
    files = {name: folder / f"{name}.{kind}.gguf" for name in models}
    for name, file in files.items():
        if not file.exists():
            cx.export(models[name], file, type=kind, tokenizer=tokenizer)
    return files


def quality(files: dict[str, Path], kind: str, judged: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """Bytes, and perplexity by kind of text, in llama.cpp."""
    for name, file in files.items():
        runtime = _runtime(file, logits_all=True)
        row: dict[str, Any] = {"where": f"quality, {kind}", "model": name, "MB": round(file.stat().st_size / 1e6, 1)}
        for what, windows in judged.items():
            lost = [_lost(runtime, window) for window in windows]
            row[what] = round(math.exp(float(np.mean(lost))), 3)
        runtime.close()
        yield row


def _lost(runtime: Any, window: Tensor) -> float:
    """Mean negative logarithm of the tokens of a window but the first."""
    runtime.reset()
    runtime.eval(window.tolist())
    logits = torch.from_numpy(np.array(runtime.scores[: len(window) - 1]))
    return float(nn.functional.cross_entropy(logits, window[1:]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for compressed models and GGUF files")
    parser.add_argument("--model", type=Path, help="GGUF file with the original and its vocabulary")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.5])
    parser.add_argument("--forms", nargs="+", choices=("dense", "uniform"), default=["dense", "uniform"])
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0", "q5_0", "q4_0"])
    parser.add_argument("--tokens", type=int, default=2**14, help="of the calibration")
    parser.add_argument("--judged", type=int, default=8 * WINDOW, help="tokens of each kind to judge by")
    parser.add_argument("--parts", nargs="+", default=["transformers", "llama.cpp", "quality"])
    parser.add_argument("--table", action="store_true", help="only print what is stored")
    options = parser.parse_args(arguments)
    rows = stored(PART)
    if not options.table:
        torch.set_num_threads(1)
        path = options.model or default_model()
        models = make(options.folder, options.shares, options.forms, options.tokens, path)
        judged = read_texts(
            open_decoder(path)[1], ["political essays"], ["technical handbook"], WINDOW, options.judged, 0
        ).judged
        ids = judged["technical handbook"][:1]
        for new in _measured(options, models, ids, judged, path):
            rows = [row for row in rows if (row["where"], row["model"]) != (new["where"], new["model"])] + [new]
            store(PART, rows)
    for where in dict.fromkeys(row["where"] for row in rows):
        show(where, [row for row in rows if row["where"] == where])


def _measured(
    options: argparse.Namespace, models: dict[str, nn.Module], ids: Tensor, judged: dict[str, Tensor], path: Path
) -> Iterator[dict[str, Any]]:
    if "transformers" in options.parts:
        yield from in_transformers(models, ids)
    for kind in options.types:
        files = exported(options.folder, models, kind, path)
        if "llama.cpp" in options.parts:
            yield from in_llama_cpp(models, files, kind, ids[0].tolist())
        if "quality" in options.parts:
            yield from quality(files, kind, judged)


if __name__ == "__main__":
    main()
