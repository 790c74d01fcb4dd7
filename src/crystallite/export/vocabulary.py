"""The vocabulary of a model as llama.cpp stores it: tokens, merges, and the name of how texts are split before."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.weights.checkpoint import open_checkpoint

__all__ = ["EXPECTED", "add_vocabulary_"]

EXPECTED = "pass tokenizer= a folder with tokenizer.json, a tokenizer of transformers, or a GGUF file of the same model"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "▁"
# llama.cpp's names for ways to split (None: GPT-2's; "": the same after digits were split off), and whether a word that
# is a token is taken whole (`ignore_merges`)
_SPLITS: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (None, False),
    "smollm": ("", False),
    "llama-bpe": (rf"{_CONTRACTED}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", True),
    "smaug-bpe": (rf"{_CONTRACTED}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", False),
    "qwen2": (rf"{_CONTRACTED}|{_WORDS}|\p{{N}}|{_REST}", False),
    "tekken": (_TEKKEN, True),
}
# where the ways differ: numbers, contractions, capitals, letters with marks, spaces and line ends of all kinds
_SAMPLE = (
    "It's 1234567 o'clock, WE'LL meet at 12:30\t \t\n\n  at  http://example.org/~a_b?c=d\r\n\r\n   Straße ÉCOLE "
    "naïve x²+y³ Camel CaseWords don't 'Tis #1! (3.14)  你好，世界123 नमस्ते 🙂🙂 \n \n// end...   "
)


def add_vocabulary_(writer: Any, source: Any, size: int) -> None:
    """Add the vocabulary of a folder, a tokenizer, or another GGUF file to what a writer of the gguf package writes.

    size: tokens that the model has; where the tokenizer has fewer, the rest is unused.
    """
    if hasattr(source, "save_pretrained"):
        with tempfile.TemporaryDirectory() as folder:
            source.save_pretrained(folder)
            _add_folder_(writer, Path(folder), size)
        return
    place = Path(source)
    if place.is_dir():
        _add_folder_(writer, place, size)
    elif place.is_file():
        _add_gguf_(writer, place, size)
    else:
        raise InvalidOption(f"tokenizer: no file or folder {place}; {EXPECTED}")


def _add_gguf_(writer: Any, file: Path, size: int) -> None:
    """The vocabulary of another file as it is."""
    import gguf

    with open_checkpoint(file) as checked:  # the package's own reader trusts every count
        if checked.format != "gguf":
            raise InvalidOption(f"tokenizer: expected a GGUF file, {file} is {checked.format}; {EXPECTED}")
    fields = {key: field for key, field in gguf.GGUFReader(file).fields.items() if key.startswith("tokenizer.")}
    tokens = fields.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens.data) != size:
        came = "none" if tokens is None else f"{len(tokens.data)}"
        raise InvalidOption(f"tokenizer: expected the {size} tokens of the model in {file}, got {came}")
    for key, field in fields.items():
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)


def _add_folder_(writer: Any, folder: Path, size: int) -> None:
    import gguf
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InvalidOption(f"tokenizer: {folder} has no tokenizer.json; {EXPECTED}")
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(file))
        kind = contents["model"]["type"]
    except Exception as error:  # tokenizers raises Exception itself
        raise CheckpointError(f"{file}: expected a tokenizer, got {error!s:.300}") from None
    largest = max(tokenizer.get_vocab().values())
    if largest >= size:
        raise InvalidOption(f"tokenizer: expected at most the {size} tokens of the model in {file}, got {largest + 1}")
    if kind != "BPE":
        raise InvalidOption(f"tokenizer: expected byte pairs (BPE) in {file}, got {kind!r:.80}")
    pieces = bool(contents["model"].get("byte_fallback"))  # those of SentencePiece
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else _way_to_split(file, contents, tokenizer))
    tokens, types = zip(*_tokens(tokenizer, contents, size, pieces), strict=True)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pieces:
        writer.add_token_scores(_scores(tokens, contents["model"]["merges"]))
        first = tokenizer.encode("a", add_special_tokens=False).tokens[0]
        writer.add_add_space_prefix(first.startswith(_SPACE))
    special = gguf.SpecialVocab(folder, load_merges=not pieces, n_vocab=size)
    known = special.special_token_ids
    if "eos" not in known:
        raise InvalidOption(
            f"tokenizer: no token in {folder} ends a text; name one as eos_token in tokenizer_config.json"
        )
    ids = tokenizer.encode("a").ids
    for place, name in ((0, "bos"), (-1, "eos")):  # llama.cpp would take what is usual for the way to split
        special.add_special_token.setdefault(name, ids[place] == known.get(name))
    special.add_to_gguf(writer, quiet=True)


def _tokens(tokenizer: Any, contents: dict[str, Any], size: int, pieces: bool) -> Iterator[tuple[str, int]]:
    """Every token of the model, and its type."""
    from gguf import TokenType

    names = {number: token for token, number in tokenizer.get_vocab().items()}
    added = {each["id"]: each for each in contents.get("added_tokens") or ()}
    unknown = contents["model"].get("unk_token")
    for number in range(size):
        token = names.get(number)
        if token is None:
            yield f"[PAD{number}]", TokenType.UNUSED
        elif pieces and token == unknown:
            yield token, TokenType.UNKNOWN
        elif number in added:
            yield token, TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
        elif pieces and _BYTE.fullmatch(token):
            yield token, TokenType.BYTE
        else:
            yield token, TokenType.NORMAL


def _scores(tokens: Sequence[str], merges: Sequence[Any]) -> list[float]:
    """SentencePiece joins what makes the token with the highest score: the earlier it was merged, the higher.

    >>> _scores(["a", "b", "aa", "ab"], [["a", "b"], "a a"])
    [-1000.0, -1000.0, -1.0, 0.0]
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), rank)
    return [float(-ranks[token]) if token in ranks else -1000.0 for token in tokens]


def _way_to_split(file: Path, contents: dict[str, Any], tokenizer: Any) -> str:
    """llama.cpp's name for how this tokenizer splits texts into words: that of what splits a sample in the same way."""
    from tokenizers import Regex, pre_tokenizers

    if (contents.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        raise InvalidOption(f"tokenizer: llama.cpp takes texts as they are, {file} has a normalizer; {EXPECTED}")
    found = tokenizer.pre_tokenizer.pre_tokenize_str(_SAMPLE) if tokenizer.pre_tokenizer else None
    whole = bool(contents["model"].get("ignore_merges"))
    for name, (way, takes_whole) in _SPLITS.items():
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not way)]
        if way is not None:
            split = pre_tokenizers.Split(Regex(way), "isolated")
            steps.insert(0, split if way else pre_tokenizers.Digits(individual_digits=True))
        known = pre_tokenizers.Sequence(steps)
        if takes_whole == whole and known.pre_tokenize_str(_SAMPLE) == found:
            return name
    raise InvalidOption(
        f"tokenizer: {file} splits texts in a way that llama.cpp has no name for here; known are those of "
        f"{', '.join(_SPLITS)}; {EXPECTED}"
    )
