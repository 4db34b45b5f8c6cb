"""Marks a finding on a figure. An arrow leads from the place where an element belongs to the place where it lies.

If several views share bytes, a frame marks the bytes instead, and a sentence says who writes them.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from kvviz.audit.findings import FRAME, Finding
from kvviz.show.byte_map import ByteMap
from kvviz.show.colours import INK, OUTLINE
from kvviz.show.figures.canvas import BODY, Box, draw_boxes, text_inches
from kvviz.show.pointing import claim_of, inside

BELONGS, LIES = "belongs here", "lies here"
"""The words at the start of an arrow, and at its end."""

HALO = [withStroke(linewidth=4, foreground="white")]
SWING_INCHES = 0.34
"""How far an arrow between two places of the same column bends to the side, in inches."""


def point(ax: Axes, record: ByteMap, row_bytes: int, finding: Finding, per_inch: tuple[float, float]) -> list[Box]:
    """Draw the mark of a finding. Return the boxes that other texts must not cover.

    ``per_inch`` has two numbers: bytes per inch (horizontally), and rows per inch (vertically).
    """
    if finding.drawing == FRAME:
        stretch = record.at(finding.example[0].start_bytes)
        box = box_of(record, row_bytes, stretch.start, stretch.stop)
        draw_boxes(ax, [(box, OUTLINE)])
        return _callout(ax, box, claim_of(finding, stretch.stop - stretch.start), row_bytes, per_inch)
    actual, rightful = (
        box_of(record, row_bytes, place.start_bytes, place.stop_bytes) if inside(record, place) else None
        for place in finding.example[:2]
    )
    draw_boxes(ax, [(box, OUTLINE) for box in (actual, rightful) if box])
    taken = _arrow(ax, rightful, actual, row_bytes, per_inch) if actual and rightful else []
    limits = (row_bytes, -(-(record.stop - record.start) // row_bytes))
    for box, other, word in ((rightful, actual, BELONGS), (actual, rightful, LIES)):
        if box:
            taken.append(_label(ax, box, word, [*taken, *([other] if other else [])], limits, per_inch))
    return taken


def box_of(record: ByteMap, row_bytes: int, start: int, stop: int) -> Box:
    """Return the box of bytes ``[start, stop)``. The box ends with the row in which the bytes start."""
    row, left = divmod(start - record.start, row_bytes)
    return (left, min(left + stop - start, row_bytes), row, row + 1)


def overlaps(box: Box, others: Sequence[Box]) -> bool:
    """Return True if a box overlaps one of the others."""
    return any(box[0] < o[1] and o[0] < box[1] and box[2] < o[3] and o[2] < box[3] for o in others)


def _arrow(ax: Axes, rightful: Box, actual: Box, row_bytes: int, per_inch: tuple[float, float]) -> list[Box]:
    corners = bend(rightful, actual, row_bytes, SWING_INCHES * per_inch[0])
    path = Path(corners, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    arrow = FancyArrowPatch(
        path=path, arrowstyle="-|>", mutation_scale=11, lw=1.6, color=INK, zorder=6, shrinkA=0, shrinkB=0
    )
    arrow.set(path_effects=HALO, clip_on=False)
    ax.add_patch(arrow)
    clear_x, clear_y = 0.05 * per_inch[0], 0.05 * per_inch[1]
    steps = [along / 40 for along in range(41)]
    return [(x - clear_x, x + clear_x, y - clear_y, y + clear_y) for x, y in (_on_curve(corners, t) for t in steps)]


def bend(rightful: Box, actual: Box, row_bytes: int, swing: float) -> list[tuple[float, float]]:
    """Return the four Bézier points of the arrow from ``rightful`` to ``actual``.

    The arrow joins the two sides of the boxes that face each other. If one box is above the other, the arrow joins two
    right sides or two left sides.
    """
    y_from, y_to = (rightful[2] + rightful[3]) / 2, (actual[2] + actual[3]) / 2
    if rightful[1] <= actual[0]:
        ends, outward = (rightful[1], actual[0]), (swing, -swing)
    elif actual[1] <= rightful[0]:
        ends, outward = (rightful[0], actual[1]), (-swing, swing)
    elif max(rightful[1], actual[1]) + swing <= row_bytes:
        ends, outward = (rightful[1], actual[1]), (swing, swing)
    else:
        ends, outward = (rightful[0], actual[0]), (-swing, -swing)
    if y_from == y_to:
        outward = ((ends[1] - ends[0]) / 3, (ends[0] - ends[1]) / 3)
    return [(ends[0], y_from), (ends[0] + outward[0], y_from), (ends[1] + outward[1], y_to), (ends[1], y_to)]


def _on_curve(corners: list[tuple[float, float]], t: float) -> tuple[float, float]:
    weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
    return tuple(sum(w * corner[axis] for w, corner in zip(weights, corners, strict=True)) for axis in (0, 1))


def _label(
    ax: Axes, box: Box, word: str, taken: Sequence[Box], limits: tuple[int, int], per_inch: tuple[float, float]
) -> Box:
    """Write a word next to ``box`` and return the box of the word.

    The word lies within ``limits`` (bytes per row, number of rows) and covers no box of ``taken``, if this is possible.
    """
    need, away = (text_inches(word, BODY, bold=True) + 0.06) * per_inch[0], 0.06 * per_inch[0]
    tall = max(0.9, 0.16 * per_inch[1])
    spots = _spots(box, need, tall, away, SWING_INCHES * per_inch[0])
    free = [s for s in spots if s[0] >= 0 and s[1] <= limits[0] and s[2] >= 0 and s[3] <= limits[1]]
    spot = next((s for s in free if not overlaps(s, taken)), spots[0])
    _boxed(ax, (spot[0] + spot[1]) / 2, (spot[2] + spot[3]) / 2, word, "center")
    return spot


def _spots(box: Box, need: float, tall: float, away: float, far: float) -> list[Box]:
    """Return possible places for a word beside, below and above ``box``, the best place first.

    The word is ``need`` bytes wide and ``tall`` rows high.
    """
    middle, centre = (box[2] + box[3]) / 2, (box[0] + box[1]) / 2
    lefts = [box[0] - away - need, box[1] + away, box[1] + away + far, box[0] - away - need - far]
    sideways = [(left, left + need, middle - tall / 2, middle + tall / 2) for left in lefts]
    ends = [(box[3] + 0.05, box[3] + 0.05 + tall), (box[2] - 0.05 - tall, box[2] - 0.05)]
    stacked = [(left, left + need, *end) for end in ends for left in (centre - need / 2, box[0], box[1] - need)]
    return sideways + stacked


def _callout(ax: Axes, box: Box, text: str, row_bytes: int, per_inch: tuple[float, float]) -> list[Box]:
    """Write a sentence above the first row, and draw an arrow from the sentence down to ``box``."""
    middle = (box[0] + box[1]) / 2
    width = text_inches(text, BODY, bold=True) * per_inch[0]
    left = min(max(0.0, middle - 0.3 * per_inch[0]), max(0.0, row_bytes - width))
    height = -0.27 * per_inch[1]
    line = Path([(middle, height + 0.1 * per_inch[1]), (middle, box[2])])
    arrow = FancyArrowPatch(
        path=line, arrowstyle="-|>", mutation_scale=9, lw=1.4, color=INK, zorder=6, shrinkA=0, shrinkB=0
    )
    arrow.set(path_effects=HALO, clip_on=False)
    ax.add_patch(arrow)
    _boxed(ax, left, height, text, "left")
    return [(middle - 0.05 * per_inch[0], middle + 0.05 * per_inch[0], height, box[2])]


def _boxed(ax: Axes, x: float, y: float, text: str, side: str) -> None:
    pad = {"boxstyle": "square,pad=0.15", "fc": "white", "ec": "none"}
    looks = {"fontsize": BODY, "weight": "bold", "va": "center_baseline", "bbox": pad, "zorder": 7}
    ax.text(x, y, text, ha=side, clip_on=False, **looks)
