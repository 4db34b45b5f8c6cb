"""Colours and hatches of every rendering, with no drawing library behind them.

Warm colours are kept for what is wrong, cool ones for layers; whatever is wrong is hatched as well, so that
a greyscale print says the same.
"""

from dataclasses import dataclass, replace

HUES = ("#4477AA", "#228833", "#AA3377", "#CCBB44", "#66CCEE")
"""One a layer, after Paul Tol's colour-blind-safe "bright" set; its red and orange are left to what is wrong."""

INK, GREY, PALE = "#1A1A1A", "#5A5A5A", "#E4E4E4"
RED, ORANGE = "#CC3311", "#EE7733"
DATA_TINT = {"K": 0.55, "V": 0.30}
"""How much of the layer's hue the data of each half keep; scales keep all of it."""


@dataclass(frozen=True)
class Style:
    """How a rectangle looks: its fill, edge, hatch and the edge's width in points."""

    fill: str
    edge: str = "#FFFFFF"
    hatch: str = ""
    line: float = 0.6


CONTESTED = Style(RED, INK, "/////", 0.8)
MISPLACED = Style(ORANGE, INK, "xxx", 0.8)
UNREACHED = Style("#FFFFFF", INK, "", 0.8)
UNOWNED = Style(PALE, "#9A9A9A", "..", 0.0)
OUTLINE = Style("none", INK, "", 2.0)
FIXED = {"contested": CONTESTED, "misplaced": MISPLACED, "unreached": UNREACHED, "unowned": UNOWNED}
"""The style of each state but ``right``, whose bytes are drawn in their owner's."""


def rgb(colour: str) -> tuple[int, int, int]:
    """``#4477AA`` as three numbers of 0 to 255."""
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def tint(colour: str, share: float) -> str:
    """``colour`` thinned with white: ``share`` of it is left."""
    mixed = (1 - share * (1 - part / 255) for part in rgb(colour))
    return "#" + "".join(f"{round(255 * part):02X}" for part in mixed)


def luminance(colour: str) -> float:
    """Relative luminance, 0 (black) to 1 (white): what is left of a colour in greyscale."""
    parts = (part / 255 for part in rgb(colour))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def owned(hue: int, role: str, half: str) -> Style:
    """The style of bytes that their owner writes: a scale in the full hue, K data lighter, V data lighter still."""
    colour = HUES[hue % len(HUES)]
    if role == "scale":
        return Style(colour, tint(colour, 1.0), "", 0.0)
    return Style(tint(colour, DATA_TINT.get(half, DATA_TINT["K"])))


def ink_on(fill: str) -> str:
    """Black or white, whichever reads better on ``fill``."""
    return "#FFFFFF" if fill != "none" and luminance(fill) < 0.25 else INK


def thin(style: Style) -> Style:
    """The same style for rectangles so flat that an edge would hide them."""
    return replace(style, line=0.0) if style.edge != INK else replace(style, line=0.3)


@dataclass(frozen=True)
class Entry:
    """One entry of a legend: swatches side by side, and what they mean."""

    styles: tuple[Style, ...]
    text: str
