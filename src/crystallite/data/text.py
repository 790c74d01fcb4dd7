"""Plain text as data: windows of token ids for causal language models, padded batches for other models."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.core.suggest import suggest_keywords

__all__ = ["Texts", "has_tokenizer", "open_tokenizer", "texts"]

_LENGTH = 512
_AT_ONCE = 2**12  # tokens in a batch: bounds the memory that logits take
_PIECE = 2**16  # bytes of text that are tokenised at once
_BYTES_PER_TOKEN = 16  # read for every token that is wanted: more than any text needs, so that windows can be spread
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
_Group = tuple[np.ndarray, ...]  # token ids of the samples that one place of a text gave
_MAXIMA = ("max_position_embeddings", "n_positions", "n_ctx")


@dataclass(frozen=True, eq=False, repr=False)
class Texts:
    """Text as batches for a model; goes wherever data goes. Every batch is a dict of keyword arguments."""

    samples: int
    length: int  # of every window, or of the longest text
    tokens: int  # in all samples, without padding
    left_out: int  # tokens of the text that are in no sample
    source: str
    padded: bool
    batches: tuple[dict[str, Tensor], ...] = field(default=())

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __repr__(self) -> str:
        kind = f"texts of up to {self.length} tokens" if self.padded else f"windows of {self.length} tokens"
        rest = f", {self.left_out:,} left out" if self.left_out else ""
        return f"{self.source}: {self.samples:,} {kind}, {self.tokens:,} tokens{rest}"


@suggest_keywords
def texts(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    *,
    length: int | None = None,
    tokens: int | None = None,
    batch: int = 64,
    least: int = 1,
    padded: bool | None = None,
    halves: bool = False,
) -> Texts:
    """Plain text as batches of token ids, for calibration and validation of language models.

    A causal language model gets windows of a fixed length, cut from the text as it goes on; an incomplete last one is
    left out, and where the tokenizer begins a text with a token of its own, every window does. Other models get a
    sample for every paragraph (or line, where no line is empty), cut at the length, padded, with an `attention_mask`.
    Several sources take turns, so that the first batches are a mixture with as many tokens of each.

    Args:
        source: a text file in UTF-8, or several. Strings that are not meant as paths go into a list as well: whatever
            holds a blank or a line break is text.
        tokenizer: a folder with a model and its tokenizer, a .gguf file, or a tokenizer of transformers.
        length: tokens of a window, at most those that the model takes (default: 512, or that maximum).
        tokens: the most to take, spread evenly over each source (default: all).
        batch: the most samples in a batch; also no more than 4,096 tokens, unless one sample is longer.
        least: samples without which nothing can be done.
        padded: whether the model is no causal language model (default: as the folder says; else it is one).
        halves: make two samples of every paragraph, its first and its second half of words, with the paragraph's number
            as the "labels" of both: what `validate(metric="retrieval")` asks an encoder to find. Paragraphs of one word
            are left out.

    Returns:
        `Texts`: batches, and how many tokens are in them and how many were left out.

    Raises:
        InvalidOption: no tokenizer, too little text, or a length that the model does not take.
        CheckpointError: a file that is no text in UTF-8, or a damaged tokenizer.

    Examples:
        >>> def characters(text, **options):  # stands for a tokenizer
        ...     return {"input_ids": [ord(character) for character in text]}
        >>> data = texts(["the quick brown fox jumps over the lazy dog"], characters, length=10)
        >>> data
        1 text: 4 windows of 10 tokens, 40 tokens, 3 left out
        >>> [batch["input_ids"].shape for batch in data]
        [torch.Size([4, 10])]
    """
    sources = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    if not sources:
        raise InvalidOption("source: expected a text file, got none")
    for name, value in (("batch", batch), ("length", length), ("tokens", tokens)):
        if value is not None and value < (2 if name == "length" else 1):
            raise InvalidOption(f"{name} must be at least {2 if name == 'length' else 1}, got {value}")
    coder, most, causal = open_tokenizer(tokenizer)
    if length is not None and most is not None and length > most:
        raise InvalidOption(f"length: the model takes at most {most} tokens, got {length}")
    size = length or min(_LENGTH, most or _LENGTH)
    asked = None if tokens is None else max(math.ceil(tokens / len(sources)), size)
    paragraphs = not causal if padded is None else padded
    if halves and not paragraphs:
        raise InvalidOption(
            "halves: expected an encoder, which reads paragraphs; a causal language model reads windows"
        )
    cut = partial(_padded_rows, halves=halves) if paragraphs else _windows
    parts = [cut(_pieces(one, asked), coder, size, asked) for one in sources]
    groups = _in_turn([part[0] for part in parts])
    rows = [row for group in groups for row in group]
    total = sum(part[1] for part in parts)
    named = [str(one) for one in sources if _is_path(one)]
    given = len(sources) - len(named)
    name = ", ".join([*named, *([f"{given} text{'s' * (given > 1)}"] if given else [])])
    if not total:
        raise InvalidOption(f"{name}: expected text, but there is none in it")
    if len(rows) < least:
        kind, needed = ("paragraphs", "") if paragraphs else (f"windows of {size}", f" ({least * size:,} tokens)")
        raise InvalidOption(
            f"{name}: {total:,} tokens, which is {len(rows)} {kind}; at least {least}{needed} are needed: give more "
            f"text{'' if paragraphs else ' or a smaller length='}"
        )
    kept = sum(map(len, rows))
    count = max(1, min(batch, _AT_ONCE // size))
    made = [_batch(rows[i : i + count], _padding(coder), paragraphs) for i in range(0, len(rows), count)]
    if halves:
        labels = torch.tensor([number for number, group in enumerate(groups) for _ in group])
        made = [{**one, "labels": some} for one, some in zip(made, labels.split(count), strict=True)]
    longest = max(map(len, rows), default=size)
    return Texts(len(rows), longest, kept, max(total - kept, 0), name, paragraphs, tuple(made))


def _in_turn(sources: Sequence[Sequence[_Group]]) -> list[_Group]:
    """Samples of several sources: always one of that of which fewest tokens have come, while it has any."""
    found, left, tokens = [], [list(reversed(groups)) for groups in sources], [0] * len(sources)
    while any(left):
        place = min((i for i, rest in enumerate(left) if rest), key=lambda i: tokens[i])
        found.append(left[place].pop())
        tokens[place] += sum(map(len, found[-1]))
    return found


def _is_path(source: str | os.PathLike[str]) -> bool:
    """Whether a path is meant: a string with blanks is one only if such a file is there."""
    if not isinstance(source, str):
        return True
    try:
        return not any(c.isspace() for c in source) or Path(source).is_file()
    except OSError:  # longer than a name of a file may be
        return False


def _pieces(source: str | os.PathLike[str], tokens: int | None) -> Iterator[str]:
    """The text in pieces that end at the end of a line; of a long file, as many as the tokens need, evenly spread."""
    if not _is_path(source):
        yield str(source)
        return
    path = Path(source)
    if not path.is_file():
        raise InvalidOption(f"{path}: no such text file")
    size = path.stat().st_size
    count = math.ceil(size / _PIECE)
    wanted = count if tokens is None else min(count, math.ceil(tokens * _BYTES_PER_TOKEN / _PIECE) + 1)
    with path.open("rb") as stream:
        if wanted == count:
            while found := stream.read(_PIECE):
                yield _decoded(found + stream.readline(), path)
            return
        for place in np.linspace(0, size - _PIECE, wanted).astype(int).tolist():
            stream.seek(place)
            if place:
                stream.readline()  # it began somewhere inside
            yield _decoded(stream.read(_PIECE) + stream.readline(), path)


def _decoded(found: bytes, path: Path) -> str:
    try:
        text = found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text, why = "\0", str(error)
    else:
        why = "it has zero bytes"
    if "\0" in text:
        raise CheckpointError(
            f"{path}: expected text in UTF-8, but {why}; arrays of token ids are read from .npz or .safetensors"
        )
    return text


def has_tokenizer(folder: Path) -> bool:
    """Whether the files of a tokenizer lie in a folder."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def open_tokenizer(tokenizer: Any) -> tuple[Any, int | None, bool]:
    """A tokenizer, the most tokens that its model takes, and whether that is a causal language model.

    tokenizer: a folder, a .gguf file, or a tokenizer that is open already.
    """
    if not isinstance(tokenizer, (str, os.PathLike)):
        if not callable(tokenizer):
            raise InvalidOption(f"tokenizer: expected a folder or a tokenizer, got {type(tokenizer).__name__}")
        return tokenizer, _limit(tokenizer, {}), True
    place = Path(tokenizer)
    options: dict[str, Any] = {}
    config: dict[str, Any] = {}
    if place.is_file() and place.suffix == ".gguf":
        place, options = place.parent, {"gguf_file": place.name}
    elif not place.exists() and ":" not in place.name:  # which would be code
        raise InvalidOption(f"{place}: no such folder; text is read with the tokenizer in the model's folder")
    elif not place.is_dir():
        raise InvalidOption(
            f"{place}: text needs a tokenizer, which only a transformers folder or a .gguf file has; give token ids in "
            ".npz or .safetensors instead"
        )
    elif not has_tokenizer(place):
        raise InvalidOption(
            f"{place}: there is no tokenizer in this folder ({', '.join(_TOKENIZERS[:3])}, …); copy the files of the "
            "model's tokenizer into it, or give token ids in .npz or .safetensors"
        )
    if (place / "config.json").is_file() and not options:
        try:
            config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{place / 'config.json'}: expected JSON: {error}") from None
    names = [str(name) for name in config.get("architectures") or []]
    causal = bool(options) or any(name.endswith(("CausalLM", "LMHeadModel")) for name in names)
    coder = _from_folder(place, options)
    return coder, _limit(coder, config), causal


def _from_folder(folder: Path, options: dict[str, Any]) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InvalidOption(f"{folder}: a tokenizer of transformers; install transformers to open it") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # it meets damaged files in its own ways
        raise CheckpointError(f"{folder}: transformers cannot open the tokenizer: {error}") from None


def _limit(tokenizer: Any, config: dict[str, Any]) -> int | None:
    """The most tokens that a model takes; tokenizers say 10³⁰ where they do not know."""
    said = [config.get(name) for name in _MAXIMA] + [getattr(tokenizer, "model_max_length", None)]
    known = [n for n in said if isinstance(n, int) and 0 < n < 2**31]
    return min(known, default=None)


def _windows(pieces: Iterator[str], tokenizer: Any, length: int, tokens: int | None) -> tuple[list[_Group], int]:
    """Windows of a fixed length from the text as it goes on, each alone, and how many tokens it has."""
    beginning = _beginning(tokenizer)
    own = length - len(beginning)
    found = np.fromiter(chain.from_iterable(_ids(piece, tokenizer) for piece in pieces), np.int64)
    count = len(found) // own
    wanted = count if tokens is None else min(count, math.ceil(tokens / length))
    starts = np.linspace(0, len(found) - own, wanted).astype(int) if wanted < count else own * np.arange(count)
    return [(np.concatenate([beginning, found[i : i + own]]),) for i in starts.tolist()], len(found)


def _ids(text: str, tokenizer: Any) -> Sequence[int]:
    found: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def _beginning(tokenizer: Any) -> np.ndarray:
    """The token that the tokenizer begins every text with, if it has one."""
    found = list(tokenizer("", verbose=False)["input_ids"])
    known = getattr(tokenizer, "bos_token_id", None)
    return np.array([i for i in found[:1] if i == known], np.int64)


def _padded_rows(
    pieces: Iterator[str], tokenizer: Any, length: int, tokens: int | None, halves: bool
) -> tuple[list[_Group], int]:
    """The tokens of each paragraph, or of its halves, cut at the length, and how many tokens there are."""
    whole = "".join(pieces)
    parts = whole.split("\n\n") if "\n\n" in whole.strip() else whole.splitlines()
    groups: list[_Group] = []
    for words in filter(None, map(str.split, parts)):
        samples = [words[: len(words) // 2], words[len(words) // 2 :]] if halves else [words]
        if all(samples):
            found = (tokenizer(" ".join(s), truncation=True, max_length=length, verbose=False) for s in samples)
            groups.append(tuple(np.asarray(one["input_ids"], np.int64) for one in found))
    total = sum(len(row) for group in groups for row in group)
    if tokens is not None and total > tokens:
        chosen = np.linspace(0, len(groups) - 1, max(1, round(len(groups) * tokens / total))).astype(int)
        groups = [groups[i] for i in chosen.tolist()]
    return groups, total


def _padding(tokenizer: Any) -> int:
    return getattr(tokenizer, "pad_token_id", None) or 0


def _batch(rows: list[np.ndarray], padding: int, padded: bool) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], True, padding)
    if not padded:
        return {"input_ids": ids}
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
