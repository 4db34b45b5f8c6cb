"""The colours, shades and hatches of every rendering. They are defined only here.

Figures, pictures and HTML use these records in Python. The script of the interactive map gets the same records as data.
Layers have cool colours, and errors have warm colours. Errors also have a hatch, so a greyscale print shows them too.
"""

from dataclasses import asdict, dataclass, replace

HUES = ("#4477AA", "#228833", "#AA3377", "#CCBB44", "#66CCEE")
"""One colour per layer, from Paul Tol's colour-blind-safe "bright" set. Red and orange are not here: they mean errors.
"""

INK, GREY, WHITE = "#1A1A1A", "#5A5A5A", "#FFFFFF"
RED, ORANGE = "#CC3311", "#EE7733"

WHITE_TEXT_BELOW = 0.2
"""Text on a fill is white if the relative luminance of the fill (0 to 1) is below this number. Otherwise the text has
the colour :data:`INK`."""


@dataclass(frozen=True)
class Shade:
    """The colour of one kind of bytes, mixed with the background. ``share`` (0 to 1) is the part of the colour.

    If ``colour`` is "", the colour is the hue of the layer.
    """

    share: float
    colour: str = ""


SHADES = {
    "K data": Shade(0.55),
    "V data": Shade(0.30),
    "K scale": Shade(1.0),
    "V scale": Shade(1.0),
    "data": Shade(0.55),
    "scale": Shade(1.0),
}
"""The shade of bytes that only their owner writes. The last two shades are for names of views without K and V."""


@dataclass(frozen=True)
class Hatch:
    """A pattern over a fill.

    Attributes:
        kind: ``stripes``, ``crosses`` or ``dots``.
        symbol: the hatch in matplotlib's notation.
        picture_step: distance of neighbouring lines or dots in a picture, in pixels.
        canvas_step: distance of neighbouring lines or dots on the interactive map, in CSS pixels.
        swatch_angle: direction of the lines in a swatch of the legend, in degrees. None: the swatch has no lines.
        ink: colour and opacity of the lines on the interactive map, in CSS notation.
    """

    kind: str
    symbol: str
    picture_step: int
    canvas_step: int = 7
    swatch_angle: int | None = None
    ink: str = "rgba(20,20,20,.62)"


STRIPES = Hatch("stripes", "/////", 6, swatch_angle=135)
CROSSES = Hatch("crosses", "xxx", 6, swatch_angle=45)
DOTS = Hatch("dots", "..", 4, ink="rgba(128,128,128,.55)")
HATCH_INK = "#3A3A3A"
"""The colour of the lines in pictures and in the swatches of a legend."""

SWATCH_STEP = 4
"""Distance of neighbouring lines in a swatch of the legend, in CSS pixels. Each line is one pixel wide."""


@dataclass(frozen=True)
class Style:
    """How a rectangle looks.

    Attributes:
        colour, share: the fill is ``colour`` mixed with the background. ``share`` (0 to 1) is the part of ``colour``.
        edge: colour of the edge.
        hatch: pattern over the fill, or None.
        line: width of the edge in points.
    """

    colour: str
    share: float = 1.0
    edge: str = WHITE
    hatch: Hatch | None = None
    line: float = 0.6

    @property
    def fill(self) -> str:
        """The colour of the fill on a white background, or ``none``."""
        return self.colour if self.share == 1 else tint(self.colour, self.share)


CONTESTED = Style(RED, edge=INK, hatch=STRIPES, line=0.8)
MISPLACED = Style(ORANGE, edge=INK, hatch=CROSSES, line=0.8)
UNREACHED = Style(WHITE, 0.0, edge=INK, line=0.8)
UNOWNED = Style("#9F9F9F", 0.28, edge="#9A9A9A", hatch=DOTS, line=0.0)
OUTLINE = Style("none", edge=INK, line=2.0)


def rgb(colour: str) -> tuple[int, int, int]:
    """Return the three numbers, 0 to 255, of a colour such as ``#4477AA``."""
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def tint(colour: str, share: float) -> str:
    """Return a mix of ``colour`` and white. ``share`` (0 to 1) is the part of ``colour``."""
    mixed = (1 - share * (1 - part / 255) for part in rgb(colour))
    return "#" + "".join(f"{round(255 * part):02X}" for part in mixed)


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, from 0 (black) to 1 (white). A greyscale print shows this grey."""
    parts = (part / 255 for part in rgb(colour))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def owned(hue: int, role: str, half: str) -> Style:
    """Return the style of bytes that only their owner writes.

    Args:
        hue: the number of the layer's hue.
        role: role of the view. ``scale`` is drawn as a scale, and every other role is drawn as data.
        half: ``K``, ``V`` or "".
    """
    kind = "scale" if role == "scale" else "data"
    shade = SHADES.get(f"{half} {kind}", SHADES[kind])
    colour = shade.colour or HUES[hue % len(HUES)]
    if kind == "scale":  # scales are a few pixels wide: an edge would cover them
        return Style(colour, shade.share, edge=colour, line=0.0)
    return Style(colour, shade.share)


def ink_on(fill: str) -> str:
    """Return the colour of text on ``fill``: white or nearly black, whichever can be read better."""
    return WHITE if fill != "none" and luminance(fill) < WHITE_TEXT_BELOW else INK


def thin(style: Style) -> Style:
    """Return the style with a thin edge or no edge, for rectangles that a full edge would cover."""
    return replace(style, line=0.0) if style.edge != INK else replace(style, line=0.3)


@dataclass(frozen=True)
class Entry:
    """One entry of a legend: swatches side by side, and the text that explains them.

    ``key`` says what the interactive map highlights after a click: ``hue 2``, for example, or the name of a state.
    """

    styles: tuple[Style, ...]
    text: str
    key: str = ""


def for_javascript() -> dict:
    """Return the colours that the script of the interactive map needs, as plain data."""
    return {
        "hues": HUES,
        "shades": {kind: asdict(shade) for kind, shade in SHADES.items()},
        "ink": INK,
        "white": WHITE,
        "white_text_below": WHITE_TEXT_BELOW,
    }
