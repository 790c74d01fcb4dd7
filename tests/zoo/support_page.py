"""docs/support.md: what works on which architecture, from the outcomes of a run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.zoo.entry import Entry
from tests.zoo.tables import Table

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
COLUMNS = {
    "analyze": "analyze", "open_folder": "open", "exact": "reorganize", "compress": "compress",
    "blocks": "compress (blocks)", "upgrade": "upgrade", "validate": "validate", "save": "save, load",
    "pretrained": "reopen", "generate": "generate", "onnx": "export (ONNX)", "service": "serve", "report": "report",
}  # fmt: skip
KINDS = {
    "decoder": "Decoders", "encoder": "Encoders", "seq2seq": "Encoder–decoders", "vision": "Vision", "audio": "Audio",
    "plain": "Plain PyTorch, and models as other tools leave them",
}  # fmt: skip
HEAD = """# What works on which architecture

Every verb on a tiny random model of each architecture: 2 layers, 64 numbers wide, weights with planted structure.

- ✓ works: answers were compared with those of the dense model, before and after saving.
- A number: refused, for the reason below the table. ✗ fails. · says nothing about this model. ? not run lately.
- *open*: a folder of the dense model is opened as the class that it was, with its head.
- *reopen*: saved and opened again in a fresh process, `from_pretrained` for models of transformers.
- *generate*: the same tokens with the cache, without it, and after reopening.

`python -m tests.zoo --write-docs` runs everything and writes this page; `make test-all` runs every cell, and fails
where one crashes, is wrong, does nothing, or comes out otherwise than here.
"""


def page(table: Table, zoo: dict[str, Entry]) -> str:
    """The page, as Markdown. It holds no measured numbers, so that it is the same on every machine."""
    notes: dict[str, int] = {}  # reason → number
    parts = [HEAD]
    for kind, title in KINDS.items():
        rows = [name for name, entry in zoo.items() if entry.kind == kind and name in table]
        if rows:
            parts += [f"## {title}\n", _line(["model", *COLUMNS.values()]), _line(["---"] + [":-:"] * len(COLUMNS))]
            parts += [_line([zoo[name].title, *_marks(table[name], notes)]) for name in rows]
            parts.append("")
    if notes:
        parts += ["## Refused because\n", *(f"{number}. {reason}" for reason, number in notes.items()), ""]
    return "\n".join(parts)


def _marks(cells: dict, notes: dict[str, int]) -> list[str]:
    marks = []
    for verb in COLUMNS:
        status = cells[verb]["status"] if verb in cells else ""
        if status == "refused":
            marks.append(str(notes.setdefault(_reason(cells[verb]["text"]), len(notes) + 1)))
        else:
            marks.append({"works": "✓", "n/a": "·", "": "?"}.get(status, "✗"))
    return marks


def _reason(text: str) -> str:
    """What is the same in refusals of different models: without names of layers, classes and numbers."""
    text = re.sub(r"^no layer that can be fitted matches .*?\]: ", "", text)  # the first layer's reason follows
    text = re.sub(r"^[\w.…/-]+( → [\w.…/-]+)*: ", "", text)
    text = re.sub(r"of shape \(.*?\)", "of this shape", text)
    text = re.sub(r", got .*| \(.*|; .*|: .*", "", text)
    return re.sub(r"\b[A-Z]\w*(For|LM|Model)\w*", "the model", text)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
