"""A folder of images as data for a model, prepared by the processor in the model's folder, or resized."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.core.suggest import suggest_keywords

__all__ = ["Images", "has_processor", "images"]

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Images as batches for a model; goes wherever data goes. Files are read when their batch is asked for."""

    files: tuple[Path, ...]
    left_out: int  # images of the folder that are in no batch
    source: str
    batch: int
    prepare: Callable[[list[Any]], Any]  # images as the arguments of a model

    @property
    def samples(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.files), self.batch):
            yield self.prepare([_opened(path) for path in self.files[start : start + self.batch]])

    def __len__(self) -> int:
        return -(-len(self.files) // self.batch)

    def __repr__(self) -> str:
        rest = f", {self.left_out:,} left out" if self.left_out else ""
        return f"{self.source}: {len(self.files):,} images{rest}"


@suggest_keywords
def images(
    source: str | os.PathLike[str],
    processor: Any = None,
    *,
    size: int | tuple[int, int] | None = None,
    samples: int | None = 1024,
    batch: int = 64,
    least: int = 1,
) -> Images:
    """A folder of images as batches of pixels, for calibration and validation of vision models.

    Subfolders take turns, so that the first batches, which layers are fitted to, and the last ones, which judge, hold
    images of all of them. Every image is read as RGB.

    Args:
        source: the folder; folders in it are looked into.
        processor: a folder with a model and its image processor (`preprocessor_config.json`), whose batches are dicts
            of keyword arguments; or a function from an image of Pillow to a tensor, as torchvision's transforms are.
            Default: pixels from 0 to 1 as (samples, 3, height, width).
        size: without a processor, height and width that images are resized to, or one number for both.
        samples: the most to take, spread evenly over the folder; None: all.
        batch: the most images in a batch.
        least: images without which nothing can be done.

    Returns:
        `Images`: batches, and how many images are in them and how many were left out.

    Raises:
        InvalidOption: no folder, too few images in it, or images of several sizes and no `size`.
        CheckpointError: a file that is no image, or a damaged processor.

    Examples:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> for i in range(3):
        ...     Image.new("RGB", (8, 6), (i, 0, 0)).save(folder / f"{i}.png")
        >>> data = images(folder, size=4)
        >>> [x.shape for x in data]
        [torch.Size([3, 3, 4, 4])]
    """
    folder = Path(source)
    if not folder.is_dir():
        raise InvalidOption(f"{folder}: no such folder of images")
    for name, value in (("batch", batch), ("samples", samples), ("least", least)):
        if value is not None and value < 1:
            raise InvalidOption(f"{name} must be at least 1, got {value}")
    if size is not None and processor is not None:
        raise InvalidOption("size= is for images without a processor=, which has its own; pass one of them")
    shape = (size, size) if isinstance(size, int) else size
    if shape is not None and min(shape) < 1:
        raise InvalidOption(f"size: expected a height and a width of at least 1, got {size}")
    found = _in_turns(folder)
    if len(found) < least:
        raise InvalidOption(
            f"{folder}: expected at least {least} images ({', '.join(_SUFFIXES)}) in it, found {len(found)}"
        )
    chosen = found
    if samples is not None and len(found) > samples:
        chosen = [found[i] for i in np.linspace(0, len(found) - 1, samples).astype(int).tolist()]
    prepare: Callable[[list[Any]], Any]
    if isinstance(processor, (str, os.PathLike)):
        prepare = _from_folder(Path(processor))
    elif processor is not None:
        prepare = _one_by_one(processor)
    else:
        if shape is None:
            _check_one_size(chosen, folder)
        prepare = _one_by_one(lambda image: _pixels(image, shape))
    return Images(tuple(chosen), len(found) - len(chosen), str(folder), batch, prepare)


def has_processor(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an image processor of transformers."""
    return (Path(folder) / _PROCESSOR).is_file()


def _in_turns(folder: Path) -> list[Path]:
    """All images below a folder, one of each folder after the other."""
    by_folder: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _SUFFIXES and path.is_file():
            by_folder.setdefault(path.parent, []).append(path)
    return [path for turn in zip_longest(*by_folder.values()) for path in turn if path is not None]


def _opened(path: Path, only_look: bool = False) -> Any:
    """An image of Pillow in RGB; only_look: as it is, pixels unread."""
    try:
        from PIL import Image
    except ImportError:
        raise InvalidOption(f"{path}: install pillow to read images") from None
    try:
        with Image.open(path) as image:
            return image if only_look else image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CheckpointError(f"{path}: expected an image that Pillow reads: {error}") from None


def _check_one_size(files: list[Path], folder: Path) -> None:
    first: tuple[int, int] = _opened(files[0], only_look=True).size
    for path in files:
        if (other := _opened(path, only_look=True).size) != first:
            raise InvalidOption(
                f"{folder}: images have several sizes, {first[1]}×{first[0]} and {other[1]}×{other[0]} ({path.name}); "
                f"resize them (size= in Python), or use a model folder with {_PROCESSOR}"
            )


def _pixels(image: Any, size: tuple[int, int] | None) -> Tensor:
    """(3, height, width), from 0 to 1."""
    if size is not None:
        image = image.resize((size[1], size[0]))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def _one_by_one(prepare: Callable[[Any], Any]) -> Callable[[list[Any]], Tensor]:
    def stacked(found: list[Any]) -> Tensor:
        made = [prepare(image) for image in found]
        if not all(isinstance(x, Tensor) and x.shape == made[0].shape for x in made):
            came = ", ".join(sorted({str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in made}))
            raise InvalidOption(f"processor: expected tensors of one shape for all images, got {came}")
        return torch.stack(made)

    return stacked


def _from_folder(folder: Path) -> Callable[[list[Any]], dict[str, Tensor]]:
    if not has_processor(folder):
        raise InvalidOption(f"{folder}: there is no image processor in this folder ({_PROCESSOR})")
    try:
        from transformers import AutoImageProcessor
    except ImportError:
        raise InvalidOption(f"{folder}: an image processor of transformers; install transformers to open it") from None
    try:
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # it meets damaged files in its own ways
        raise CheckpointError(f"{folder}: transformers cannot open the image processor: {error}") from None
    return lambda found: dict(processor(images=found, return_tensors="pt"))
