"""A map as a small PNG of plain pixels: what is seen where no script runs, and on paper."""

import io
from collections.abc import Mapping

import numpy as np
from PIL import Image

from kvviz.show.byte_map import ByteMap
from kvviz.show.colours import UNREACHED, Style, rgb
from kvviz.show.describe import style_of

WIDTH_PIXELS, ROW_PIXELS, MAX_PIXELS = 1024, 12, 1400
CLEAR = 0
"""Palette index of the gaps between rows; transparent."""


def picture(record: ByteMap, row_bytes: int, hues: Mapping[int | str, int]) -> tuple[bytes, int]:
    """The map's rows from its first byte on as a palette PNG, and how many rows of it fit the picture.

    A byte is as many pixels wide as fit; where several bytes share a pixel, the worst state is what it shows.
    The same record gives the same bytes.
    """
    every = max(1, -(-row_bytes // WIDTH_PIXELS))
    scale = max(1, WIDTH_PIXELS // row_bytes)
    rows = -(-(record.stop - record.start) // row_bytes)
    height = min(ROW_PIXELS, max(3, MAX_PIXELS // rows))
    shown = min(rows, MAX_PIXELS // height)
    codes, styles = _codes(record, hues)
    grid = np.zeros((rows, -(-row_bytes // every) * every), np.uint8)
    flat = np.zeros(rows * row_bytes, np.uint8)
    flat[: len(codes)] = codes
    grid[:, :row_bytes] = flat.reshape(rows, row_bytes)
    grid = grid[:shown].reshape(shown, -1, every).max(axis=2)
    pixels = np.repeat(np.repeat(grid, scale, axis=1), height, axis=0)
    image = Image.fromarray(_hatched(pixels, styles, height), "P")
    image.putpalette(_palette(styles))
    out = io.BytesIO()
    image.save(out, "png", optimize=True, transparency=CLEAR)
    return out.getvalue(), shown


def _codes(record: ByteMap, hues: Mapping[int | str, int]) -> tuple[np.ndarray, list[Style]]:
    """Each byte's number of a style, from 1 on; what is wrong has the highest numbers."""
    severity = {"right": 1, "unowned": 0, "unreached": 2, "misplaced": 3, "contested": 4}
    of_run = [style_of(run, hues) for run in record.ranges]
    worst = {style: severity[run.state] for run, style in zip(record.ranges, of_run, strict=True)}
    styles = sorted(worst, key=lambda style: worst[style])
    number = {style: n + 1 for n, style in enumerate(styles)}
    lengths = [run.stop - run.start for run in record.ranges]
    return np.repeat(np.asarray([number[style] for style in of_run], np.uint8), lengths), styles


def _hatched(pixels: np.ndarray, styles: list[Style], height: int) -> np.ndarray:
    """Gaps between rows, and strokes over what is wrong; the ink of strokes is one palette entry behind the styles."""
    y, x = np.indices(pixels.shape, sparse=True)
    strokes = {
        "/////": (x + y) % 6 == 0,
        "xxx": ((x + y) % 6 == 0) | ((x - y) % 6 == 0),
        "..": (x % 4 == 0) & (y % 4 == 0),
    }
    for number, style in enumerate(styles, 1):
        if style.hatch:
            pixels = np.where((pixels == number) & strokes[style.hatch], len(styles) + 1, pixels)
    if height >= 5:
        pixels[height - 1 :: height] = CLEAR
        if UNREACHED in styles:  # white on paper: lines above and below
            white, ink = styles.index(UNREACHED) + 1, len(styles) + 1
            for line in (0, height - 2):
                pixels[line::height] = np.where(pixels[line::height] == white, ink, pixels[line::height])
    return pixels.astype(np.uint8)


def _palette(styles: list[Style]) -> list[int]:
    colours = ["#FFFFFF", *(style.fill for style in styles), "#3A3A3A"]
    return [part for colour in colours for part in rgb(colour)]
