"""Texts in the place of token numbers: the folder's tokenizer before a model, and what its answer means behind it."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from crystallite.core.errors import CheckpointError
from crystallite.data.text import has_tokenizer, open_tokenizer
from crystallite.serving.refusal import Refusal
from crystallite.serving.signature import Answer, Signature, Tensors, TensorSpec

__all__ = ["TextReader", "TextRules", "text_rules"]

TEXT, EMBEDDING, PROBABILITIES, LABEL = "text", "embedding", "probabilities", "label"
_POOLING = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "root", "pooling_mode_lasttoken": "last",
}  # fmt: skip
_MODES = {"mean": "mean", "cls": "first", "max": "max", "mean_sqrt_len_tokens": "root", "lasttoken": "last"}
_KINDS = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers, that are read


@dataclass(frozen=True)
class TextRules:
    """What becomes of texts and of the answer to them."""

    folder: Path
    takes: tuple[str, ...]  # of what a tokenizer gives, the inputs that the model has
    length: int | None  # tokens, at which texts are cut
    pooling: str = "mean"  # of tokens into an embedding
    normalized: bool = False
    activation: str = ""  # of logits into probabilities: "softmax", "sigmoid" or "none"; "": there are no logits
    labels: tuple[str, ...] = ()  # of classes that exclude each other, where they have names

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(TEXT, None, ())

    def outputs(self, signature: Signature) -> tuple[TensorSpec, ...]:
        """What texts are answered with."""
        (source,) = (spec for spec in signature.outputs if spec.name == self.source)
        kind = PROBABILITIES if self.activation else EMBEDDING
        found = TensorSpec(kind, torch.float32, source.shape[-1:], labels=source.labels)
        return (found, TensorSpec(LABEL, None, ())) if self.labels else (found,)

    @property
    def source(self) -> str:
        """The output of the model that the answer is made of."""
        return "logits" if self.activation else "last_hidden_state"


def text_rules(folder: Path, signature: Signature, config: Any) -> TextRules | None:
    """How a model answers texts, where its folder has a tokenizer and it gives embeddings or classes; else None.

    Embeddings are pooled as the files of sentence-transformers in the folder say; without them, as the mean over all
    tokens. Classes become probabilities as in the text classification of transformers.
    """
    inputs = {spec.name: spec for spec in signature.inputs}
    if "input_ids" not in inputs or not has_tokenizer(folder):
        return None
    if any(not spec.optional for name, spec in inputs.items() if name not in ("input_ids", "attention_mask")):
        return None
    outputs = {spec.name: spec.shape for spec in signature.outputs}
    takes = tuple(name for name in ("input_ids", "attention_mask", "token_type_ids") if name in inputs)
    most = signature.longest.get(str(inputs["input_ids"].shape[0]))
    if len(outputs.get("logits", ())) == 1:
        activation = _activation(config)
        (labels,) = (spec.labels for spec in signature.outputs if spec.name == "logits")
        return TextRules(folder, takes, most, activation=activation, labels=labels if activation == "softmax" else ())
    if len(outputs.get("last_hidden_state", ())) != 2:
        return None
    found = _of_sentence_transformers(folder)
    if found is None:
        return None
    pooling, normalized, own = found
    return TextRules(folder, takes, min((n for n in (most, own) if n), default=None), pooling, normalized)


def _activation(config: Any) -> str:
    kind = getattr(config, "problem_type", None)
    if kind == "regression":
        return "none"
    return "sigmoid" if kind == "multi_label_classification" or config.num_labels == 1 else "softmax"


def _of_sentence_transformers(folder: Path) -> tuple[str, bool, int | None] | None:
    """Pooling, whether embeddings have length 1, and the most tokens; None if something else is done to embeddings."""
    if not (folder / "modules.json").is_file():
        return "mean", False, None
    modules = _json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{folder / 'modules.json'}: expected a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if not set(kinds) <= set(_KINDS) or kinds.count("Pooling") > 1:
        return None
    pooling = "mean"
    for module in modules:
        if str(module.get("type")).endswith("Pooling"):
            name = str(module.get("path"))
            if Path(name).name != name:
                raise CheckpointError(f"{folder / 'modules.json'}: expected a folder beside it, got {name!r:.80}")
            said = _json(folder / name / "config.json")
            modes = [mode for key, mode in _POOLING.items() if said.get(key)]
            modes = modes or [_MODES[m] for m in [said.get("pooling_mode")] if m in _MODES]
            if len(modes) != 1:
                return None
            pooling = modes[0]
    own = folder / "sentence_bert_config.json"
    most = _json(own).get("max_seq_length") if own.is_file() else None
    return pooling, "Normalize" in kinds, most if isinstance(most, int) and most > 0 else None


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: expected JSON: {error}") from None


class TextReader:
    """Texts as the model's inputs, and its outputs as what was asked for."""

    def __init__(self, rules: TextRules) -> None:
        self.rules = rules
        self._tokenizer, limit, _ = open_tokenizer(rules.folder)
        self._length = min((n for n in (rules.length, limit) if n), default=None)
        self._lock = threading.Lock()  # a tokenizer keeps how it cuts and pads

    def tokens(self, texts: list[str]) -> Tensors:
        """The inputs, texts cut where the model ends, and filled up to one length with a mask."""
        if not texts:
            raise Refusal(400, f"{TEXT}: expected at least one string, got none")
        with self._lock:
            rows = self._tokenizer(
                texts, truncation=self._length is not None, max_length=self._length, verbose=False,
                return_attention_mask=True,
            )  # fmt: skip
        if not all(rows["input_ids"]):
            raise Refusal(400, f"{TEXT}: expected texts with at least one token each")
        longest = max(map(len, rows["input_ids"]))
        padding = {"input_ids": getattr(self._tokenizer, "pad_token_id", None) or 0}
        return {
            name: torch.tensor([row + [padding.get(name, 0)] * (longest - len(row)) for row in rows[name]])
            for name in self.rules.takes
            if name in rows
        }

    def answer(self, answer: Tensors, given: Tensors) -> Answer:
        """The embeddings or probabilities in an answer, and the names of the most likely classes."""
        found = answer[self.rules.source].float()
        if self.rules.activation:
            probabilities = {PROBABILITIES: _activated(found, self.rules.activation)}
            if not self.rules.labels:
                return probabilities
            return {**probabilities, LABEL: [self.rules.labels[place] for place in found.argmax(-1).tolist()]}
        mask = given.get("attention_mask")
        counted = torch.ones(found.shape[:2]) if mask is None else mask.float()
        pooled = _pooled(found, counted, self.rules.pooling)
        return {EMBEDDING: F.normalize(pooled, dim=-1) if self.rules.normalized else pooled}


def _activated(logits: Tensor, kind: str) -> Tensor:
    if kind == "none":
        return logits
    return logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)


def _pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """One vector for each text, of its tokens (samples, tokens, features) that are no padding."""
    if pooling == "first":
        return states[:, 0]
    if pooling == "last":
        places = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
        return states[torch.arange(len(states)), places]
    weights = mask[:, :, None]
    if pooling == "max":
        return states.masked_fill(weights == 0, -torch.inf).amax(1)
    count = weights.sum(1)
    return (states * weights).sum(1) / (count if pooling == "mean" else count.sqrt())
