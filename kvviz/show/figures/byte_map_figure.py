"""Figures of the byte map for notebooks, papers and slides: who owns each byte, who writes it, what went wrong.

A rendering of :class:`~kvviz.show.byte_map.ByteMap`, as text and HTML are; it judges nothing by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvviz.audit.findings import Finding
from kvviz.show.byte_map import ByteMap, ByteRange, Row, rows
from kvviz.show.colours import GREY, HUES, Entry, ink_on, thin
from kvviz.show.describe import alt_text, counts, entries, hues_of, style_of
from kvviz.show.figures.arrow import overlaps, point
from kvviz.show.figures.buffer_figure import buffer_figure
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
    save,
    settings,
    text_inches,
    ticks,
    wrapped,
)
from kvviz.show.figures.cell_figure import cell_figure
from kvviz.show.pointing import POINTED, shows

__all__ = ["buffer_figure", "cell_figure", "figure", "save"]

ROW_INCHES, MAX_PANEL_INCHES = 0.19, 10.0
GAP = 0.05
"""White above and below a row, as a share of it; rows lower than :data:`FLAT_INCHES` have none."""
FLAT_INCHES, NARROW_INCHES = 0.1, 0.08
"""Runs lower or narrower than this get no edges, or thin ones: they would be all edge."""
TITLE_INCHES, COUNTS_INCHES, TICKS_INCHES, STRIP_INCHES = 0.2, 0.2, 0.3, 0.42
MARGIN = 0.12
MAX_LETTERS = 1500
"""Most words that are written into runs when nobody asked for them."""


def figure(
    maps: Mapping[str, ByteMap] | ByteMap,
    *,
    row_bytes: int,
    finding: Finding | None = None,
    width_inches: float = 11,
    letters: bool | None = None,
) -> Figure:
    """One panel a map, stacked on one byte scale, one row per ``row_bytes`` bytes, one legend beneath.

    Args:
        maps: titles (sentences) and their maps; or one map, titled by its storage and window.
        row_bytes: bytes a row; the page size gives a row a page.
        finding: a collision, misplaced or permuted finding, whose example is pointed at wherever a map shows
            it: where an element is meant to be and where it lands, or how many claim the same bytes.
        width_inches: 11 shows as 1100 pixels.
        letters: whether runs are marked K, V, s and so on where there is room; None: unless they are too many.

    Returns:
        A figure that displays in a notebook; its ``alt_text`` says what it shows, with the counts.

    Raises:
        ValueError: no map, an empty one, a title that is no text, a row without bytes, a figure too narrow, or a
            finding that cannot be pointed at.
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
        raise ValueError("there is no map to draw: give one ByteMap, or a mapping of titles to maps")
    check_titles(maps, ByteMap)
    return dict(maps)


def _check_not_empty(named: Mapping[str, ByteMap]) -> None:
    for title, record in named.items():
        if not record.ranges:
            raise ValueError(f"{title!r} is a map without bytes, [{record.start}, {record.stop}): widen its window")


def _check_finding(finding: Finding, named: Mapping[str, ByteMap]) -> None:
    if finding.kind not in POINTED:
        raise ValueError(
            f"a figure points at findings of kind {', '.join(POINTED)}, not at {finding.kind!r}: leave finding out"
        )
    storages = sorted({record.storage.name for record in named.values()})
    if finding.storage not in storages:
        raise ValueError(
            f"the finding is about storage {finding.storage!r} and the maps show {', '.join(storages)}: "
            f"take a finding of a storage that is shown"
        )


@dataclass(frozen=True)
class _Panel:
    """One map, cut into rows, and how high its parts are, in inches."""

    title: tuple[str, ...]
    record: ByteMap
    rows: tuple[Row, ...]
    row_inches: float
    finding: Finding | None

    @property
    def strip_inches(self) -> float:
        """Room above the first row for a callout."""
        return STRIP_INCHES if self.finding and self.finding.kind == "collision" else 0.0

    @property
    def head_inches(self) -> float:
        return TITLE_INCHES * len(self.title) + COUNTS_INCHES

    @property
    def body_inches(self) -> float:
        return self.strip_inches + self.row_inches * len(self.rows)

    @property
    def inches(self) -> float:
        return self.head_inches + self.body_inches + TICKS_INCHES


@dataclass(frozen=True)
class _Plan:
    """Where everything goes, before anything is drawn; inches."""

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
    told = counts(panel.record)
    sheet.write(plan.left, top + panel.head_inches - COUNTS_INCHES / 2 - 0.02, told, BODY, color=GREY)
    ax = sheet.panel(plan.left, top + panel.head_inches, plan.width, panel.body_inches)
    ax.set(xlim=(0, plan.row_bytes), ylim=(len(panel.rows), -panel.strip_inches / panel.row_inches))
    _draw_axis(ax, plan, panel)
    per_inch = (plan.row_bytes / plan.width, 1 / panel.row_inches)
    flat = panel.row_inches < FLAT_INCHES
    placed = [(run, _box(run, row, number, flat)) for number, row in enumerate(panel.rows) for run in row.ranges]
    styled = ((box, style_of(run, plan.hues)) for run, box in placed)
    narrow = NARROW_INCHES * per_inch[0]
    draw_boxes(ax, ((box, thin(style) if flat or box[1] - box[0] < narrow else style) for box, style in styled))
    taken = point(ax, panel.record, plan.row_bytes, panel.finding, per_inch) if panel.finding else []
    if letters or letters is None and len(placed) <= MAX_LETTERS:
        _draw_letters(ax, placed, plan, panel, taken)
    return ax


def _box(run: ByteRange, row: Row, number: int, flat: bool) -> Box:
    gap = 0.0 if flat else GAP
    return (run.start - row.start, run.stop - row.start, number + gap, number + 1 - gap)


def _draw_axis(ax: Axes, plan: _Plan, panel: _Panel) -> None:
    """Byte ticks beneath; at the left whose row it is, at the right the offset of the row's first byte."""
    edges = {run.start - row.start for row in panel.rows for run in row.ranges}
    ax.set_xticks(ticks(plan.row_bytes, int(plan.width / 0.6), edges))
    ax.tick_params(labelsize=BODY, length=3, color=GREY, pad=2)
    every = 1
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
    for run, box in placed:
        named = many or run.start - int(box[0]) in mixed
        room = (run.stop - run.start) * inches - 0.04
        text = next((word for word in words(run, named) if text_inches(word, size) <= room), "")
        half = text_inches(text, size) / inches / 2
        middle = (box[0] + box[1]) / 2
        if not text or overlaps((middle - half, middle + half, box[2], box[3]), taken):
            continue
        style = style_of(run, plan.hues)
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


def words(run: ByteRange, with_layer: bool) -> tuple[str, ...]:
    """What may be written into a run, the longest first; ``with_layer`` says whose it is wherever it fits."""
    if run.state == "contested":
        return (f"{len(run.writers)} writers", str(len(run.writers)))
    if run.state == "misplaced":
        return _misplaced_words(run)
    if run.state != "right":
        return ("nobody writes here",) if run.state == "unreached" else ("padding",)
    part = run.owner
    plain = ("scale", "s") if part.role == "scale" else (part.half or part.role, part.role[:1])
    if not with_layer or part.layer is None:
        return plain
    return (*(f"L{part.layer} {word}" for word in plain), f"L{part.layer}", plain[-1])


def _misplaced_words(run: ByteRange) -> tuple[str, ...]:
    """Who writes here: the layer, or within the owner's own layer the token and head, or else a mere ``!``."""
    writer = run.writers[0]
    if writer.layer is None:
        return (str(writer), writer.view, "!")
    if run.owner and writer.layer == run.owner.layer:
        cell = " ".join(f"{axis[0]}{i}" for axis, i in zip(writer.axes, writer.index, strict=True))
        return (str(writer), f"{writer.half} {cell}", "!")
    return (str(writer), writer.view, f"L{writer.layer}", "!")
