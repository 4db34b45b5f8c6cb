"""Draws byte maps as a figure: the owner and the state of each byte, and the place of a finding.

The figure, the text and the HTML are made from the same record, :class:`~kvviz.show.byte_map.ByteMap`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvviz.audit.findings import FRAME, Finding
from kvviz.show.byte_map import ByteMap, ByteRange
from kvviz.show.colours import GREY, HUES, Entry, ink_on, thin
from kvviz.show.describe import alt_text, counts, entries, hues_of, style_of
from kvviz.show.figures.arrow import overlaps, point
from kvviz.show.figures.canvas import (
    BODY,
    LINE_INCHES,
    SMALL,
    TITLE,
    Box,
    Sheet,
    check_titles,
    check_width,
    draw_boxes,
    draw_legend,
    legend_lines,
    settings,
    text_inches,
    ticks,
    wrapped,
)
from kvviz.show.pointing import POINTED, shows
from kvviz.show.rows import Row, rows
from kvviz.show.states import STATES

ROW_INCHES, MAX_PANEL_INCHES = 0.19, 10.0
"""Height of a row, and largest height of all rows of a panel together. If there are many rows, each row is lower."""

GAP = 0.05
"""White space above and below a row, as a part (0 to 1) of the height of the row. Rows lower than :data:`FLAT_INCHES`
have no white space."""

FLAT_INCHES, NARROW_INCHES = 0.1, 0.08
"""A rectangle that is lower or narrower than this has a thin edge or no edge, because a full edge would cover it."""

TITLE_INCHES, COUNTS_INCHES, TICKS_INCHES, CALLOUT_INCHES = 0.2, 0.2, 0.3, 0.42
MARGIN = 0.12
MAX_LETTERS = 1500
"""If a panel has more byte ranges than this, they get letters only on request, because drawing letters takes long."""


def figure(
    maps: Mapping[str, ByteMap] | ByteMap,
    *,
    row_bytes: int,
    finding: Finding | None = None,
    width_inches: float = 11,
    letters: bool | None = None,
) -> Figure:
    """Draw maps below each other, with one panel per map. All panels have the same scale. They share one legend.

    Args:
        maps: a mapping of titles to maps, or one map. The title of one map names its storage and window.
        row_bytes: bytes per row. If it is the page size of the cache, each row is one page.
        finding: a finding of kind collision, misplaced or permuted. Each map that shows its place marks the place. A
            collision gets a frame with a sentence. The other kinds get an arrow from the place where an element
            belongs to the place where it lies.
        width_inches: width of the figure. A notebook shows 11 inches as 1100 pixels.
        letters: True writes letters such as K, V and s on byte ranges that have room. False writes no letters. None
            writes letters in each panel that has at most :data:`MAX_LETTERS` byte ranges.

    Returns:
        A figure that a notebook shows. Its ``alt_text`` says what the figure shows.

    Raises:
        ValueError: there is no map, a map is empty, a title is not a text, ``row_bytes`` is smaller than 1, the figure
            is too narrow, or the finding cannot be marked.
    """
    named = _named(maps)
    _check_not_empty(named)
    if finding is not None:
        _check_finding(finding, named)
    check_width(width_inches)
    with settings():
        plan = _Plan.of(named, row_bytes, finding, width_inches)
        sheet = Sheet(width_inches, plan.height, alt_text(named, finding))
        top = MARGIN
        for panel in plan.panels:
            ax = _draw_panel(sheet, plan, panel, top, letters)
            top += panel.inches
        ax.set_xlabel("byte within the row", fontsize=BODY)
        draw_legend(sheet, plan.left, top + 0.14, plan.legend)
    return sheet


def _named(maps: Mapping[str, ByteMap] | ByteMap) -> dict[str, ByteMap]:
    if isinstance(maps, ByteMap):
        return {f"{maps.storage.name}, bytes {maps.start} to {maps.stop} of {maps.storage.nbytes}": maps}
    if not maps or not isinstance(maps, Mapping):
        raise ValueError("there is no map to draw: give one ByteMap, or a mapping of titles to ByteMaps")
    check_titles(maps, ByteMap)
    return dict(maps)


def _check_not_empty(named: Mapping[str, ByteMap]) -> None:
    for title, record in named.items():
        if not record.ranges:
            raise ValueError(f"the map {title!r} has no bytes, [{record.start}, {record.stop}): give a larger window")


def _check_finding(finding: Finding, named: Mapping[str, ByteMap]) -> None:
    if finding.kind not in POINTED:
        raise ValueError(
            f"a figure cannot mark a finding of kind {finding.kind!r}, but only of kind {', '.join(POINTED)}: "
            f"call figure without finding=..."
        )
    storages = sorted({record.storage.name for record in named.values()})
    if finding.storage not in storages:
        raise ValueError(
            f"the finding is about storage {finding.storage!r}, but the maps show {', '.join(storages)}: "
            f"give a finding about a storage on the maps"
        )


@dataclass(frozen=True)
class _Panel:
    """A part of the figure with one map. The map is cut into rows. All heights are in inches."""

    title: tuple[str, ...]
    record: ByteMap
    rows: tuple[Row, ...]
    row_inches: float
    finding: Finding | None

    @property
    def callout_inches(self) -> float:
        """Room for a sentence above the first row."""
        return CALLOUT_INCHES if self.finding and self.finding.drawing == FRAME else 0.0

    @property
    def head_inches(self) -> float:
        return TITLE_INCHES * len(self.title) + COUNTS_INCHES

    @property
    def body_inches(self) -> float:
        return self.callout_inches + self.row_inches * len(self.rows)

    @property
    def inches(self) -> float:
        return self.head_inches + self.body_inches + TICKS_INCHES


@dataclass(frozen=True)
class _Plan:
    """The places of all parts of a figure in inches. They are computed before anything is drawn."""

    panels: tuple[_Panel, ...]
    row_bytes: int
    hues: dict[int | str, int]
    legend: list[list[Entry]]
    left: float
    width: float

    @classmethod
    def of(cls, named: dict[str, ByteMap], row_bytes: int, finding: Finding | None, width: float) -> "_Plan":
        cut = {title: rows(record, row_bytes) for title, record in named.items()}
        row_inches = min(ROW_INCHES, MAX_PANEL_INCHES / max(map(len, cut.values())))
        left = MARGIN + 0.08 + max(text_inches(row.label, BODY) for some in cut.values() for row in some)
        inner = width - left - MARGIN - text_inches("0x00000", SMALL)
        panels = tuple(
            _Panel(
                tuple(wrapped(title, TITLE, inner, bold=True)),
                record,
                cut[title],
                row_inches,
                finding if finding and shows(record, finding) else None,
            )
            for title, record in named.items()
        )
        hues = hues_of(named.values())
        return cls(panels, row_bytes, hues, legend_lines(entries(named.values(), hues), width - left), left, inner)

    @property
    def height(self) -> float:
        return MARGIN + sum(p.inches for p in self.panels) + 0.14 + LINE_INCHES * len(self.legend) + MARGIN


def _draw_panel(sheet: Sheet, plan: _Plan, panel: _Panel, top: float, letters: bool | None) -> Axes:
    for number, line in enumerate(panel.title):
        sheet.write(plan.left, top + TITLE_INCHES * (number + 0.5), line, TITLE, weight="bold")
    counts_top = top + panel.head_inches - COUNTS_INCHES / 2 - 0.02
    sheet.write(plan.left, counts_top, counts(panel.record), BODY, color=GREY)
    ax = sheet.panel(plan.left, top + panel.head_inches, plan.width, panel.body_inches)
    ax.set(xlim=(0, plan.row_bytes), ylim=(len(panel.rows), -panel.callout_inches / panel.row_inches))
    _draw_axis(ax, plan, panel)
    per_inch = (plan.row_bytes / plan.width, 1 / panel.row_inches)
    flat = panel.row_inches < FLAT_INCHES
    placed = [
        (stretch, _box(stretch, row, number, flat)) for number, row in enumerate(panel.rows) for stretch in row.ranges
    ]
    styled = ((box, style_of(stretch, plan.hues)) for stretch, box in placed)
    narrow = NARROW_INCHES * per_inch[0]
    draw_boxes(ax, ((box, thin(style) if flat or box[1] - box[0] < narrow else style) for box, style in styled))
    taken = point(ax, panel.record, plan.row_bytes, panel.finding, per_inch) if panel.finding else []
    if letters or letters is None and len(placed) <= MAX_LETTERS:
        _draw_letters(ax, placed, plan, panel, taken)
    return ax


def _box(stretch: ByteRange, row: Row, number: int, flat: bool) -> Box:
    gap = 0.0 if flat else GAP
    return (stretch.start - row.start, stretch.stop - row.start, number + gap, number + 1 - gap)


def _draw_axis(ax: Axes, plan: _Plan, panel: _Panel) -> None:
    """Draw byte numbers below the rows, labels left of the rows, and the first byte of each row right of the rows."""
    edges = {stretch.start - row.start for row in panel.rows for stretch in row.ranges}
    ax.set_xticks(ticks(plan.row_bytes, int(plan.width / 0.6), edges))
    ax.tick_params(labelsize=BODY, length=3, color=GREY, pad=2)
    every = 1  # label every row; if rows are low, label only every second row, or every fourth row, and so on
    while every * panel.row_inches < 0.13:
        every *= 2
    for number in range(0, len(panel.rows), every):
        middle = number + (0.5 if every == 1 else every / 2)
        looks = {"va": "center_baseline", "clip_on": False}
        away = 0.06 * plan.row_bytes / plan.width
        ax.text(-away, middle, panel.rows[number].label, fontsize=BODY, ha="right", **looks)
        offset = f"{panel.rows[number].start:#x}"
        ax.text(plan.row_bytes + away, middle, offset, fontsize=SMALL, ha="left", color=GREY, **looks)


def _draw_letters(ax: Axes, placed: list[tuple[ByteRange, Box]], plan: _Plan, panel: _Panel, taken: list[Box]) -> None:
    size = min(BODY, panel.row_inches * 72 * 0.58)
    if size < 4.5:
        return
    inches = plan.width / plan.row_bytes
    many = max((hue for hue in plan.hues.values()), default=0) >= len(HUES)
    mixed = {row.start for row in panel.rows if row.mixed}
    for stretch, box in placed:
        named = many or stretch.start - int(box[0]) in mixed
        room = (stretch.stop - stretch.start) * inches - 0.04
        text = next((word for word in words(stretch, named) if text_inches(word, size) <= room), "")
        half = text_inches(text, size) / inches / 2
        middle = (box[0] + box[1]) / 2
        if not text or overlaps((middle - half, middle + half, box[2], box[3]), taken):
            continue
        style = style_of(stretch, plan.hues)
        pad = {"boxstyle": "round,pad=0.2", "fc": style.fill, "ec": "none"} if style.hatch else None
        ax.text(
            middle,
            (box[2] + box[3]) / 2,
            text,
            fontsize=size,
            color=ink_on(style.fill),
            ha="center",
            va="center_baseline",
            bbox=pad,
            zorder=4,
        )


def words(stretch: ByteRange, with_layer: bool) -> tuple[str, ...]:
    """Return the texts that may be written on a byte range, the longest first.

    If ``with_layer`` is True, the texts name the layer. This is necessary if the colour and the label of the row do not
    show the layer.
    """
    if stretch.state == "misplaced":
        return _misplaced_words(stretch)
    if stretch.state != "right":
        return tuple(mark.replace("{n}", str(len(stretch.writers))) for mark in STATES[stretch.state].marks)
    part = stretch.owner
    plain = ("scale", "s") if part.role == "scale" else (part.half or part.role, part.role[:1])
    if not with_layer or part.layer is None:
        return plain
    return (*(f"L{part.layer} {word}" for word in plain), f"L{part.layer}", plain[-1])


def _misplaced_words(stretch: ByteRange) -> tuple[str, ...]:
    """Return texts that name the writer, the longest first. The last text is always ``!``."""
    writer, marks = stretch.writers[0], STATES["misplaced"].marks
    if writer.layer is None:
        return (str(writer), writer.view, *marks)
    if stretch.owner and writer.layer == stretch.owner.layer:
        cell = " ".join(f"{axis[0]}{i}" for axis, i in zip(writer.axes, writer.index, strict=True))
        return (str(writer), f"{writer.half} {cell}", *marks)
    return (str(writer), writer.view, f"L{writer.layer}", *marks)
