"""A few shapes, written as SVG for the page and for papers, or painted as PNG."""

from __future__ import annotations

import base64
import io
import itertools
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from crystallite.core.errors import InvalidOption
from crystallite.core.files import write_file

__all__ = ["PALETTE", "SERIES", "Box", "Dot", "Drawing", "Label", "Line", "Raster", "Shape", "side_by_side"]

# The page has these colours as CSS variables, darker or lighter with the reader's scheme; figures for papers have them
# as they are here.
PALETTE = {
    "ink": "#1d2329",
    "muted": "#59636e",
    "rule": "#d5dae0",
    "paper": "#ffffff",
    "blue": "#20639b",
    "red": "#b3323f",
    "green": "#2f7d4f",
    "amber": "#946200",
    "purple": "#6d4aa3",
    "teal": "#14757a",
}
SERIES = ("blue", "red", "green", "amber", "purple", "teal")
_SCALE = 3  # pixels per unit of a PNG
_HALO = 3  # width of the line around text


@dataclass(frozen=True)
class Line:
    """Straight lines through points; `closed` fills the area they enclose."""

    points: tuple[tuple[float, float], ...]
    colour: str = "ink"
    width: float = 1.5
    dashed: bool = False
    closed: bool = False
    opacity: float = 1.0


@dataclass(frozen=True)
class Box:
    """A rectangle, filled or outlined."""

    x: float
    y: float
    width: float
    height: float
    colour: str = "ink"
    filled: bool = True
    stroke: float = 1.0


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    colour: str = "ink"


@dataclass(frozen=True)
class Label:
    """Text whose baseline starts, is centred or ends at (x, y); `halo` keeps what lies below it at a distance."""

    x: float
    y: float
    text: str
    colour: str = "muted"
    anchor: str = "start"
    size: float = 11.0
    halo: bool = False


@dataclass(frozen=True)
class Raster:
    """A grid of shades in [0, 1] stretched over a rectangle."""

    x: float
    y: float
    width: float
    height: float
    shades: np.ndarray
    colour: str = "blue"

    @property
    def pixels(self) -> np.ndarray:
        """(rows, cols, 3) uint8: from paper to colour."""
        ends = np.array([_rgb("paper"), _rgb(self.colour)], float)
        shades = self.shades[..., None]
        return ((1 - shades) * ends[0] + shades * ends[1]).round().astype(np.uint8)


Shape = Line | Box | Dot | Label | Raster


@dataclass(frozen=True, eq=False, repr=False)
class Drawing:
    """Shapes on a rectangle and the sentence that says what they show to those who cannot see them.

    >>> Drawing(20, 10, "a <dot>", (Dot(5, 5, 2, "blue"),)).svg()
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 10" width="20" height="10" role="img"
    aria-label="a &lt;dot&gt;" font-family="system-ui, sans-serif"><circle cx="5" cy="5" r="2" fill="#20639b"/></svg>'
    """

    width: int
    height: int
    description: str
    shapes: tuple[Shape, ...]

    def svg(self, page: bool = False) -> str:
        """The drawing as an SVG element; `page` names colours for the page's style sheet instead of spelling them."""
        body = "".join(_svg(shape, page) for shape in self.shapes)
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        alternative = f'role="img" aria-label="{escape(self.description)}"'
        font = 'font-family="system-ui, sans-serif"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {alternative} {font}>{body}</svg>'

    def png(self) -> bytes:
        """The drawing as a PNG file on white, three pixels per unit; needs Pillow."""
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError:
            raise InvalidOption('figures as PNG need Pillow: pip install pillow, or ask for format="svg"') from None
        image = Image.new("RGB", (self.width * _SCALE, self.height * _SCALE), "white")
        brush = ImageDraw.Draw(image)
        for shape in self.shapes:
            if isinstance(shape, Raster):
                size = round(shape.width * _SCALE), round(shape.height * _SCALE)
                grid = Image.fromarray(shape.pixels).resize(size, Image.Resampling.NEAREST)
                image.paste(grid, (round(shape.x * _SCALE), round(shape.y * _SCALE)))
            else:
                _paint(brush, shape, ImageFont)
        target = io.BytesIO()
        image.save(target, "png", description=self.description)
        return target.getvalue()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the drawing as SVG or PNG, as the name ends; returns the path."""
        target = Path(path)
        if target.suffix not in (".svg", ".png"):
            raise InvalidOption(f"{target}: expected a name that ends in .svg or .png")
        return write_file(target, self.png() if target.suffix == ".png" else self.svg().encode())

    def _repr_html_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return f"Drawing({self.width}×{self.height}: {self.description})"


def side_by_side(drawings: Sequence[Drawing], across: int = 3) -> Drawing:
    """One drawing of several, so many in a line.

    >>> side_by_side([Drawing(20, 10, "a", (Dot(5, 5, 2),)), Drawing(20, 10, "b", ())])
    Drawing(40×10: a b)
    """
    shapes: list[Shape] = []
    width = top = 0
    for start in range(0, len(drawings), across):
        line, left = drawings[start : start + across], 0
        for drawing in line:
            shapes += [_moved(shape, left, top) for shape in drawing.shapes]
            left += drawing.width
        width, top = max(width, left), top + max(drawing.height for drawing in line)
    return Drawing(width, top, " ".join(drawing.description for drawing in drawings), tuple(shapes))


def _moved(shape: Shape, right: float, down: float) -> Shape:
    if isinstance(shape, Line):
        return replace(shape, points=tuple((x + right, y + down) for x, y in shape.points))
    return replace(shape, x=shape.x + right, y=shape.y + down)


def _svg(shape: Shape, page: bool) -> str:
    if isinstance(shape, Raster):
        data = base64.b64encode(_png(shape.pixels)).decode()
        place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" width="{_n(shape.width)}" height="{_n(shape.height)}"'
        how = 'preserveAspectRatio="none" image-rendering="pixelated"'
        return f'<image {place} {how} href="data:image/png;base64,{data}"/>'
    colour = f"var(--{shape.colour})" if page else PALETTE[shape.colour]
    if isinstance(shape, Dot):
        return f'<circle cx="{_n(shape.x)}" cy="{_n(shape.y)}" r="{_n(shape.radius)}" fill="{colour}"/>'
    if isinstance(shape, Box):
        paint = f'fill="{colour}"' if shape.filled else f'fill="none" stroke="{colour}" stroke-width="{shape.stroke}"'
        place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" width="{_n(shape.width)}" height="{_n(shape.height)}"'
        return f"<rect {place} {paint}/>"
    if isinstance(shape, Label):
        where = f'x="{_n(shape.x)}" y="{_n(shape.y)}" font-size="{_n(shape.size)}" text-anchor="{shape.anchor}"'
        paper = "var(--paper)" if page else PALETTE["paper"]
        halo = f' stroke="{paper}" stroke-width="{_HALO}" paint-order="stroke"' if shape.halo else ""
        return f'<text {where} fill="{colour}"{halo}>{escape(shape.text)}</text>'
    path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in shape.points)
    faint = f' opacity="{shape.opacity}"' if shape.opacity < 1 else ""
    if shape.closed:
        return f'<path d="{path}Z" fill="{colour}"{faint}/>'
    dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
    stroke = f'stroke="{colour}" stroke-width="{shape.width}" stroke-linejoin="round"'
    return f'<path d="{path}" fill="none" {stroke}{dashes}{faint}/>'


def _paint(brush: Any, shape: Line | Box | Dot | Label, fonts: Any) -> None:
    opacity = shape.opacity if isinstance(shape, Line) else 1.0
    mixed = opacity * np.array(_rgb(shape.colour)) + (1 - opacity) * 255  # what lies below is paper, or nearly so
    colour = tuple(mixed.round().astype(int).tolist())
    if isinstance(shape, Dot):
        x, y, r = shape.x * _SCALE, shape.y * _SCALE, shape.radius * _SCALE
        brush.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif isinstance(shape, Box):
        corners = [shape.x, shape.y, shape.x + shape.width, shape.y + shape.height]
        paint = {"fill": colour} if shape.filled else {"outline": colour, "width": round(shape.stroke * _SCALE)}
        brush.rectangle([c * _SCALE for c in corners], **paint)
    elif isinstance(shape, Label):
        font = _font(fonts, round(shape.size * _SCALE))
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
        halo = {"stroke_width": _HALO * _SCALE // 2, "stroke_fill": _rgb("paper")} if shape.halo else {}
        brush.text((shape.x * _SCALE, shape.y * _SCALE), shape.text, fill=colour, font=font, anchor=anchor, **halo)
    elif shape.closed:
        brush.polygon([(x * _SCALE, y * _SCALE) for x, y in shape.points], fill=colour)
    else:
        points = _dashes(shape.points) if shape.dashed else [shape.points]
        for part in points:
            brush.line([(x * _SCALE, y * _SCALE) for x, y in part], fill=colour, width=round(shape.width * _SCALE))


def _font(fonts: Any, size: int) -> Any:
    """A font that knows × and σ where the machine has one; Pillow's own does not."""
    try:
        return fonts.truetype("DejaVuSans.ttf", size)
    except OSError:
        return fonts.load_default(size)


def _dashes(points: tuple[tuple[float, float], ...]) -> list[tuple[tuple[float, float], ...]]:
    """Four units of line, three of gap, along each straight part."""
    parts: list[tuple[tuple[float, float], ...]] = []
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = max(float(np.hypot(x1 - x0, y1 - y0)), 1e-9)
        for start in np.arange(0, length, 7):
            a, b = start / length, min(start + 4, length) / length
            parts.append(((x0 + a * (x1 - x0), y0 + a * (y1 - y0)), (x0 + b * (x1 - x0), y0 + b * (y1 - y0))))
    return parts


def _png(pixels: np.ndarray) -> bytes:
    """An RGB image as a PNG file."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)  # filter 0 on each line

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _rgb(colour: str) -> tuple[int, int, int]:
    spelled = PALETTE[colour]
    return int(spelled[1:3], 16), int(spelled[3:5], 16), int(spelled[5:7], 16)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
