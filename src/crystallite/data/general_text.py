"""English prose that comes with Python, for calibration data of one kind only."""

from __future__ import annotations

import ast
import importlib.util
import os
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from crystallite.core.errors import InvalidOption

__all__ = ["general_text"]

_LEAST, _MOST = 25, 250  # words of a paragraph
_LETTERS = 0.9  # of its characters, blanks among them: else it is code or a table
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip"}


@cache
def general_text() -> str:
    """About 100,000 words of English prose that comes with Python, as paragraphs, to calibrate encoders with.

    The reference of the language and the docstrings of the standard library, in an order by chance that is always the
    same. A model that is fitted to texts of one kind only, short ones for instance, loses more on others; with this as
    a second source it loses less there (docs/compression.md has the figures, and what it costs on the first kind). The
    text is technical: a mixture of what the model will read is better. It differs a little between versions of Python.

    Raises:
        InvalidOption: a Python without the sources of its standard library.

    Examples:
        >>> text = general_text()
        >>> len(text.split("\\n\\n")) > 500 and len(text.split()) > 20_000
        True
    """
    found = [paragraph for paragraph in dict.fromkeys(_paragraphs()) if _is_prose(paragraph)]
    if not found:
        raise InvalidOption("general_text: this Python comes without the sources of its standard library")
    random.Random(0).shuffle(found)
    return "\n\n".join(found)


def _paragraphs() -> Iterator[str]:
    for text in _topics():
        yield from (" ".join(part.split()) for part in text.split("\n\n"))
    library = Path(os.__file__).parent
    for file in sorted(library.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(file.relative_to(library).parts):
            for text in _docstrings(file):
                yield from (" ".join(part.split()) for part in text.split("\n\n"))


def _topics() -> list[str]:
    """What `help("topics")` shows; some distributions leave it out."""
    if importlib.util.find_spec("pydoc_data") is None:
        return []
    from pydoc_data.topics import topics

    return list(topics.values())


def _docstrings(file: Path) -> list[str]:
    """Of a module, its classes and its functions; none of what cannot be read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def _is_prose(text: str) -> bool:
    words, letters = len(text.split()), sum(c.isalpha() or c == " " for c in text)
    return _LEAST <= words <= _MOST and letters > _LETTERS * len(text) and text.endswith((".", "?", "!"))
