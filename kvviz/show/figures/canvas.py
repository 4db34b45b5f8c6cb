"""Every figure is drawn on a :class:`Sheet`. This module draws boxes and legends, measures texts, and saves figures.

A sheet does not use matplotlib's pyplot. So a notebook shows a sheet only once: as the value of the notebook cell.
"""

import io
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path as FilePath

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from kvviz.show.colours import INK, Entry, Style

BODY, TITLE, SMALL = 8.0, 10.5, 7.0
"""Sizes of text in points. A notebook shows a figure of 11 inches with a width of 1100 pixels."""

MIN_WIDTH = 4.0
"""Smallest width of a figure in inches. A narrower figure has no room for the bytes beside the labels."""

SCREEN_DPI, PNG_DPI = 100, 150
RC = {
    "font.family": ["DejaVu Sans"],
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "kvviz",
    "svg.fonttype": "path",
    "path.simplify": False,
    "text.usetex": False,
    "text.parse_math": False,
    "text.color": INK,
}
FORMATS = ("png", "svg")
MOST_COLOURS = 256
"""Colours of a PNG. Figures have few colours, and letters have shades of grey."""


def check_width(width_inches: float) -> None:
    """Raise ValueError if the figure would be narrower than :data:`MIN_WIDTH`."""
    if not width_inches >= MIN_WIDTH:
        raise ValueError(f"width_inches {width_inches} leaves no room for the bytes: give at least {MIN_WIDTH}")


def check_titles(named: Mapping[str, object], kind: type) -> None:
    """Raise ValueError if a title is not a text, or if a value is not an object of class ``kind``."""
    for title, shown in named.items():
        if not isinstance(title, str):
            raise ValueError(f"a title must be a text (str), but {title!r} is {type(title).__name__}")
        if not isinstance(shown, kind):
            raise ValueError(f"{title!r} must be the title of a {kind.__name__}, not of a {type(shown).__name__}")


@lru_cache(maxsize=4096)
def text_inches(text: str, size: float, bold: bool = False) -> float:
    """Return the width in inches of one line of text of ``size`` points."""
    font = FontProperties(family=RC["font.family"], size=size, weight="bold" if bold else "normal")
    return TextToPath().get_text_width_height_descent(text, font, False)[0] / 72


def wrapped(text: str, size: float, inches: float, bold: bool = False) -> list[str]:
    """Break ``text`` at spaces into lines of at most ``inches``. A single word that is wider stays whole."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_inches(longer, size, bold) <= inches:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def ticks(size: int, most: int, edges: Container[int] = ()) -> list[int]:
    """Return at most ``most + 1`` evenly spaced ticks over ``[0, size]``.

    If possible, all ticks lie on ``edges``. Otherwise, if possible, the distance of two ticks is a round number that
    divides ``size``. Otherwise, the distance is any round number.
    """
    round_ones = {digit * 10**power for power in range(10) for digit in (1, 2, 4, 5, 8)} | {2**n for n in range(4, 31)}
    fitting = sorted(step for step in round_ones if most / 4 <= size / step <= most) or [max(1, -(-size // most))]
    even = [size // count for count in range(most, 2, -1) if size % count == 0]
    on_edges = [step for step in even if all(tick in edges for tick in range(0, size, step))]
    ending = [step for step in fitting if size % step == 0]
    return list(range(0, size + 1, (on_edges or ending or fitting)[0]))


class Sheet(Figure):
    """A matplotlib figure without pyplot.

    Attributes:
        alt_text: a text for readers who do not see the figure. It says what the figure shows.
    """

    def __init__(self, width_inches: float, height_inches: float, alt_text: str) -> None:
        super().__init__(figsize=(width_inches, height_inches), dpi=SCREEN_DPI, facecolor="white")
        FigureCanvasAgg(self)
        self.alt_text = alt_text

    def panel(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add axes without ticks and frame. Lengths are in inches. ``top`` is the distance from the upper edge."""
        sheet_width, sheet_height = self.get_size_inches()
        box = (left / sheet_width, 1 - (top + height) / sheet_height, width / sheet_width, height / sheet_height)
        ax = self.add_axes(box)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        ax.patch.set_visible(False)
        return ax

    def write(self, left: float, top: float, text: str, size: float = BODY, **looks) -> None:
        """Write a line of text. The middle of the line is ``top`` inches below the sheet's upper edge."""
        width, height = self.get_size_inches()
        self.text(left / width, 1 - top / height, text, fontsize=size, va="center_baseline", **looks)

    def _repr_png_(self) -> bytes:
        return render(self, "png")

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        width = round(self.get_size_inches()[0] * SCREEN_DPI)
        data = {"image/png": self._repr_png_(), "text/plain": self.alt_text}
        return data, {"image/png": {"width": width, "alt": self.alt_text}}


def settings() -> AbstractContextManager:
    """Return a context manager with matplotlib's settings for sheets. It hides the settings of the user."""
    return matplotlib.rc_context(RC)


def render(sheet: Figure, kind: str) -> bytes:
    """Return the bytes of a figure's file. ``kind`` is ``png`` or ``svg``. The same figure gives the same bytes."""
    if kind not in FORMATS:
        raise ValueError(
            f"a figure cannot be saved as {kind!r}, but only as {' or '.join(FORMATS)}: "
            f"give a path that ends with .png or .svg"
        )
    words = {"Description": getattr(sheet, "alt_text", "")}
    metadata = {**words, "Software": None} if kind == "png" else {**words, "Date": None}
    out = io.BytesIO()
    with settings():
        sheet.savefig(out, format=kind, dpi=PNG_DPI, metadata=metadata, facecolor="white")
    return _with_palette(out.getvalue()) if kind == "png" else out.getvalue()


def _with_palette(png: bytes) -> bytes:
    """Return a picture with at most :data:`MOST_COLOURS` colours. This takes about a third of the bytes."""
    drawn, packed, info = Image.open(io.BytesIO(png)), io.BytesIO(), PngInfo()
    for name, text in drawn.text.items():
        info.add_text(name, text)
    palette = drawn.convert("RGB").quantize(MOST_COLOURS, dither=Image.Dither.NONE)
    palette.save(packed, "PNG", optimize=True, dpi=drawn.info["dpi"], pnginfo=info)
    return packed.getvalue()


def save(figure: Figure, path: str | FilePath) -> FilePath:
    """Write a figure to a file and return the path. The same figure gives the same bytes.

    Raises:
        ValueError: the path does not end with ``.png`` or ``.svg``.
    """
    path = FilePath(path)
    path.write_bytes(render(figure, path.suffix.lstrip(".").lower()))
    return path


Box = tuple[float, float, float, float]
"""``(left, right, top, bottom)`` in the units of the axes."""


def draw_boxes(ax: Axes, boxes: Iterable[tuple[Box, Style]]) -> None:
    """Draw rectangles. Rectangles with a dark edge are on top.

    All rectangles of one style are one object of matplotlib, because this is fast.
    """
    groups: dict[Style, list[Box]] = {}
    for box, style in boxes:
        groups.setdefault(style, []).append(box)
    for style, members in groups.items():
        corners = [((a, t), (b, t), (b, u), (a, u)) for a, b, t, u in members]
        looks = {"facecolors": style.fill, "edgecolors": style.edge, "linewidths": style.line}
        looks["hatch"] = style.hatch and style.hatch.symbol
        above = 3 if style.edge == INK else 2
        ax.add_collection(
            PolyCollection(corners, zorder=above, clip_on=False, label=str(style), **looks),
            autolim=False,
        )


SWATCH, LINE_INCHES, ENTRY_GAP = 0.24, 0.23, 0.28


def legend_lines(entries: Sequence[Entry], inches: float) -> list[list[Entry]]:
    """Divide the entries of a legend into lines of at most ``inches``. The order of the entries stays."""
    lines, room = [], 0.0
    for entry in entries:
        need = _entry_inches(entry)
        if not lines or need > room:
            lines.append([])
            room = inches
        lines[-1].append(entry)
        room -= need
    return lines


def _entry_inches(entry: Entry) -> float:
    return SWATCH * len(entry.styles) + 0.07 + text_inches(entry.text, BODY) + ENTRY_GAP


def draw_legend(sheet: Sheet, left: float, top: float, lines: list[list[Entry]]) -> None:
    """Draw the lines of :func:`legend_lines`. Each line is ``LINE_INCHES`` high."""
    width = sheet.get_size_inches()[0] - left
    height = LINE_INCHES * max(len(lines), 1)
    ax = sheet.panel(left, top, width, height)
    ax.set(xlim=(0, width), ylim=(height, 0))
    for number, line in enumerate(lines):
        x, y = 0.0, (number + 0.5) * LINE_INCHES
        for entry in line:
            ends = [x + SWATCH * i for i in range(len(entry.styles) + 1)]
            pairs = zip(ends[:-1], ends[1:], entry.styles, strict=True)
            draw_boxes(ax, [((a, b, y - 0.07, y + 0.07), style) for a, b, style in pairs])
            ax.text(ends[-1] + 0.07, y, entry.text, fontsize=BODY, va="center_baseline")
            x += _entry_inches(entry)
