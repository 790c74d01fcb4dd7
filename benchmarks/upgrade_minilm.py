"""The feed-forward pairs of MiniLM brought to exact blocks without labels.

`python -m benchmarks.upgrade_minilm MODEL_FOLDER [--blocks 4] [--epochs 2] [--sentences 2000]`. Sentences are those of
the docstrings of Python's standard library. Only the feed-forward pairs are trained. Prints how alike the sentence
embeddings of both models are on sentences that were not trained on, and the blocks found by the paper's tests.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import random
import re
import sys
import time
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crystallite as cx
from benchmarks.timing import show, store
from crystallite.structure.levels import chain_labels
from crystallite.upgrading import find_chains, upgrade

_LENGTH, _BATCH, _HELD_OUT = 48, 32, 256


def sentences(count: int) -> list[str]:
    """Sentences of the standard library's docstrings, in an order that is always the same."""
    found: dict[str, None] = {}
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in ("antigravity", "this", "idlelib", "turtledemo"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except Exception:  # not on this platform
            continue
        documents = [module.__doc__, *(inspect.getdoc(value) for _, value in sorted(vars(module).items()))]
        for document in documents:
            for sentence in re.split(r"(?<=[.!?])\s+", " ".join((document or "").split())):
                if 30 < len(sentence) < 200:
                    found[sentence] = None
    chosen = list(found)
    random.Random(0).shuffle(chosen)
    return chosen[:count]


@torch.no_grad()
def embeddings(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Mean over tokens, normalised."""
    rows = []
    for batch in batches:
        states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        rows.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(rows)


def main(arguments: list[str] | None = None) -> None:
    from transformers import AutoModel, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a transformers folder")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--sentences", type=int, default=2000)
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    model = AutoModel.from_pretrained(options.model, local_files_only=True).eval()
    text = sentences(options.sentences + _HELD_OUT)
    batches = []
    for start in range(0, len(text), _BATCH):
        made = tokenizer(
            text[start : start + _BATCH], padding="max_length", truncation=True, max_length=_LENGTH, return_tensors="pt"
        )
        batches.append({name: made[name] for name in ("input_ids", "attention_mask")})
    held_out, training = batches[: _HELD_OUT // _BATCH], batches[_HELD_OUT // _BATCH :]

    layers = {name for chain in find_chains(model) for name in chain.layers}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[0] in layers)
    expected = embeddings(model, held_out)

    def likeness(other: nn.Module) -> float:
        return float((embeddings(other, held_out) * expected).sum(1).mean())

    began = time.perf_counter()
    small = upgrade(
        model, blocks=options.blocks, data=training, epochs=options.epochs, learning_rate=options.rate, metric=likeness
    )
    record = small.upgrading
    state = cx.restore(small).state_dict()
    rows = []
    for chain in record.partition.chains:
        masks = [
            cx.anneal(state[f"{n}.weight"], record.nulls[f"{n}.weight"], record.level, rule="neyman").mask
            for n in chain.layers
        ]
        fixed = all(torch.equal(m, state[f"{n}.weight"] != 0) for m, n in zip(masks, chain.layers, strict=True))
        rows.append({
            "pair": chain.layers[0], "blocks": int(max(side.max() for side in chain_labels(masks))) + 1,
            "fixed point": fixed, "kept": float(torch.cat([m.flatten() for m in masks]).float().mean()),
        })  # fmt: skip
    show("MiniLM, feed-forward pairs", rows)
    history = [{"epoch": e.epoch, "loss": e.loss, "cosine, held out": e.metric, "acting": e.acting}
               for e in record.history]  # fmt: skip
    show(f"{time.perf_counter() - began:.0f} s", history)
    store("upgrade_minilm", [*rows, *history])


if __name__ == "__main__":
    main()
