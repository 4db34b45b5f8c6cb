"""Draws a byte map as a small PNG, for paper and for places where the script of the interactive map does not run."""

import io
from collections.abc import Mapping

import numpy as np
from PIL import Image

from kvviz.show.byte_map import ByteMap
from kvviz.show.colours import HATCH_INK, UNREACHED, WHITE, Hatch, Style, rgb
from kvviz.show.describe import style_of
from kvviz.show.states import STATES

WIDTH_PIXELS, ROW_PIXELS, MAX_PIXELS = 1024, 12, 1400
"""Largest width of a picture, and largest heights of a row and of the whole picture, in pixels."""

MIN_ROW_PIXELS, MIN_GAP_PIXELS = 3, 5
"""Smallest height of a row, and smallest height of a row with a gap below it, in pixels."""

CLEAR = 0
"""Palette index of the gaps between rows. This entry is transparent."""


def picture(record: ByteMap, row_bytes: int, hues: Mapping[int | str, int]) -> tuple[bytes, int]:
    """Draw the first rows of a map. Return the PNG, and the number of rows that fit into the picture.

    All bytes have the same width in pixels. If several bytes share a pixel, the pixel shows the most severe state. The
    same record gives the same PNG.
    """
    every = max(1, -(-row_bytes // WIDTH_PIXELS))
    scale = max(1, WIDTH_PIXELS // row_bytes)
    rows = -(-(record.stop - record.start) // row_bytes)
    height = min(ROW_PIXELS, max(MIN_ROW_PIXELS, MAX_PIXELS // rows))
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
    """Return the number of the style of each byte, and the styles. Numbers start at 1.

    The numbers are a uint8 array of shape (bytes,). A style of a more severe state has a higher number.
    """
    of_range = [style_of(stretch, hues) for stretch in record.ranges]
    severity = {style: STATES[stretch.state].severity for stretch, style in zip(record.ranges, of_range, strict=True)}
    styles = sorted(severity, key=lambda style: severity[style])
    number = {style: n + 1 for n, style in enumerate(styles)}
    lengths = [stretch.stop - stretch.start for stretch in record.ranges]
    return np.repeat(np.asarray([number[style] for style in of_range], np.uint8), lengths), styles


def _lines(hatch: Hatch, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return True for each pixel that a line or dot of the hatch covers."""
    rising, falling = (x + y) % hatch.picture_step == 0, (x - y) % hatch.picture_step == 0
    if hatch.kind == "dots":
        return (x % hatch.picture_step == 0) & (y % hatch.picture_step == 0)
    return rising if hatch.kind == "stripes" else rising | falling


def _hatched(pixels: np.ndarray, styles: list[Style], height: int) -> np.ndarray:
    """Draw the hatches and the gaps between rows. The ink of the hatches is the palette entry after the last style."""
    y, x = np.indices(pixels.shape, sparse=True)
    for number, style in enumerate(styles, 1):
        if style.hatch:
            pixels = np.where((pixels == number) & _lines(style.hatch, x, y), len(styles) + 1, pixels)
    if height >= MIN_GAP_PIXELS:
        pixels[height - 1 :: height] = CLEAR
        if UNREACHED in styles:  # white bytes are invisible on white paper: draw a line above and below them
            white, ink = styles.index(UNREACHED) + 1, len(styles) + 1
            for line in (0, height - 2):
                pixels[line::height] = np.where(pixels[line::height] == white, ink, pixels[line::height])
    return pixels.astype(np.uint8)


def _palette(styles: list[Style]) -> list[int]:
    colours = [WHITE, *(style.fill for style in styles), HATCH_INK]
    return [part for colour in colours for part in rgb(colour)]
