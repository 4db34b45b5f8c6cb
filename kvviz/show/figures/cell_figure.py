"""Draws one cell byte by byte, and a page of such cells. The figure needs only a CacheSpec, and no cache."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvviz.audit.arguments import one_of
from kvviz.cache.modes import Mode, get_mode
from kvviz.cache.spec import CacheSpec
from kvviz.show.colours import CONTESTED, GREY, HUES, INK, UNOWNED, Entry, Style, owned, thin
from kvviz.show.figures.canvas import (
    BODY,
    LINE_INCHES,
    TITLE,
    Sheet,
    draw_boxes,
    draw_legend,
    legend_lines,
    settings,
    text_inches,
    wrapped,
)
from kvviz.show.states import STATES

# Lengths in inches. Right of the bars of a page, PAGE_RIGHT inches stay free for a text.
WIDTH, MARGIN, RIGHT, PAGE_RIGHT = 11.0, 0.12, 0.45, 2.2
SCALE_INCHES, CELL_INCHES, OFFSETS_INCHES, PAGE_INCHES = 0.32, 0.5, 0.3, 0.24
MOST_EDGES = 200
"""If a bar has more rectangles than this, they are drawn without edges, because the edges would cover them."""

DATA = {half: owned(0, "data", half) for half in "KV"}
SCALE = {half: owned(0, "scale", half) for half in "KV"}


@dataclass(frozen=True)
class Piece:
    """A part of a cell. It takes the bytes ``[start, stop)`` of the bar in which it is drawn."""

    name: str
    start: int
    stop: int
    style: Style


def cell_parts(spec: CacheSpec, half: str, start: int = 0) -> tuple[Piece, ...]:
    """Return the data and the scale of a cell that starts at byte ``start``.

    Without a tail, the scale lies on the data. In a mode without scales in the cache, return only the data.
    """
    data = Piece(f"{half} data", start, start + spec.data_bytes, DATA[half])
    if not spec.is_per_token_head:
        return (data,)
    first = start + spec.scale_offset_bytes
    return (data, Piece(f"{half} scale", first, first + spec.scale_bytes, SCALE[half] if spec.tail else CONTESTED))


def cell_figure(spec: CacheSpec, *, packing: str = "packed") -> Figure:
    """Draw one large cell, byte by byte. Draw a page of such cells below it.

    Args:
        packing: ``packed`` if the K cell and the V cell of a token and head are adjacent. ``split`` if a page holds all
            its K cells first, then all its V cells.

    Raises:
        ValueError: ``packing`` has another value.
    """
    one_of("packing", packing, ("packed", "split"))
    bars = _cell_bars(spec, packing)
    names = [*bars, "content_page_size_bytes"]
    left = MARGIN + 0.1 + max(text_inches(name, BODY) for name in names)
    inner = WIDTH - left - RIGHT
    with settings():
        legend = legend_lines(_cell_legend(spec), inner)
        notes = wrapped(_cell_note(spec, packing), BODY, inner)
        cells_top = MARGIN + 0.32 + 0.18 * len(notes)
        bar_inches = SCALE_INCHES * spec.is_per_token_head + CELL_INCHES + OFFSETS_INCHES
        page_top = cells_top + bar_inches * len(bars) + 0.1
        legend_top = page_top + 0.3 + 3 * (PAGE_INCHES + 0.1) + 0.08
        sheet = Sheet(WIDTH, legend_top + LINE_INCHES * len(legend) + MARGIN, _cell_alt(spec, packing))
        sheet.write(left, MARGIN + 0.1, _cell_title(spec), TITLE, weight="bold")
        for number, line in enumerate(notes):
            sheet.write(left, MARGIN + 0.34 + 0.18 * number, line, BODY, color=GREY)
        for number, (name, parts) in enumerate(bars.items()):
            _draw_cell(sheet, (left, cells_top + bar_inches * number, inner), name, parts, spec)
        _draw_page(sheet, (left, page_top, inner), spec, packing)
        draw_legend(sheet, left, legend_top, legend)
    return sheet


def _mode(spec: CacheSpec) -> Mode:
    return get_mode(spec.kv_cache_dtype)


def _cell_bars(spec: CacheSpec, packing: str) -> dict[str, tuple[Piece, ...]]:
    if packing == "packed":
        return {"K cell and V cell": cell_parts(spec, "K") + cell_parts(spec, "V", spec.cell_bytes)}
    return {f"{half} cell": cell_parts(spec, half) for half in "KV"}


def _cell_title(spec: CacheSpec) -> str:
    scale = f" and {spec.scale_bytes} bytes of scale" if spec.is_per_token_head and spec.tail else ""
    without = ", and no tail for its scale" if spec.is_per_token_head and not spec.tail else ""
    return f"{spec.kv_cache_dtype}: a cell is {spec.data_bytes} bytes of data{scale}{without}"


def _cell_note(spec: CacheSpec, packing: str) -> str:
    if packing == "packed":
        place = f"Packed: K cell and V cell of a token and head are adjacent, {2 * spec.cell_bytes} bytes together."
    else:
        place = f"Split: a block holds all its K cells first, then all its V cells, {spec.cell_bytes} bytes each."
    if not spec.is_per_token_head:
        return f"{place} {_mode(spec).scale_label}"
    missing = spec.cells_per_page * spec.scale_bytes
    return place + ("" if spec.tail else f" Tails for all scales would take {missing} more bytes per page.")


def _cell_alt(spec: CacheSpec, packing: str) -> str:
    bars = _cell_bars(spec, packing)
    parts = "; ".join(f"{p.name} at bytes [{p.start}, {p.stop})" for bar in bars.values() for p in bar)
    return (
        f"{_cell_title(spec)}. {_cell_note(spec, packing)} {parts}. A page of {spec.block_size} tokens and "
        f"{spec.num_kv_heads} heads has {spec.cells_per_page} cells: real_page_size_bytes {spec.real_page_size_bytes}, "
        f"content_page_size_bytes {spec.content_page_size_bytes}, page_size_bytes {spec.page_size_bytes}."
    )


def _cell_legend(spec: CacheSpec) -> list[Entry]:
    entries = [Entry((style,), f"{half} data") for half, style in DATA.items()]
    if spec.is_per_token_head:
        on_data = Entry((CONTESTED,), f"the place of a scale: the last {spec.scale_bytes} bytes of data")
        entries.append(Entry(tuple(dict.fromkeys(SCALE.values())), "scale") if spec.tail else on_data)
    padded = spec.page_size_bytes > spec.content_page_size_bytes
    return entries + [Entry((UNOWNED,), STATES["unowned"].meaning)] * padded


def _draw_cell(sheet: Sheet, place: tuple[float, float, float], name: str, parts: tuple[Piece, ...], spec: CacheSpec):
    left, top, width = place
    total = parts[-1].stop
    upper = SCALE_INCHES * spec.is_per_token_head
    lower, height = upper + CELL_INCHES, upper + CELL_INCHES + OFFSETS_INCHES
    ax = sheet.panel(left, top, width, height)
    ax.set(xlim=(0, total), ylim=(height, 0))
    inch = total / width
    draw_boxes(ax, [((p.start, p.stop, upper, lower), p.style) for p in parts])
    if inch < 1 / 0.04:
        ax.vlines(range(1, total), lower - 0.07, lower, color=INK, lw=0.4, zorder=4)
    sheet.write(left - 0.1, top + upper + CELL_INCHES / 2, name, ha="right")
    for part in parts:
        if part.name.endswith("scale"):
            _draw_scale_label(ax, part, spec, inch)
        else:
            _draw_data_label(ax, part, spec, upper + CELL_INCHES / 2, inch)
    edges = sorted({edge for part in parts for edge in (part.start, part.stop)})
    for edge in edges:
        # A scale is drawn narrower than the byte numbers below its two edges. Move these numbers apart.
        starts_scale = any(part.start == edge and part.name.endswith("scale") for part in parts)
        ends_scale = edge > 0 and edge - spec.scale_bytes in edges
        side = "right" if starts_scale else "left" if ends_scale else "center"
        shift = {"right": 0.03, "left": -0.03, "center": 0.0}[side] * inch
        ax.vlines(edge, lower, lower + 0.06, color=INK, lw=0.8, clip_on=False)
        ax.text(edge + shift, lower + 0.14, str(edge), fontsize=BODY, ha=side, va="center_baseline")


def _draw_data_label(ax: Axes, part: Piece, spec: CacheSpec, y: float, inch: float) -> None:
    stop = part.stop - (0 if spec.tail else spec.scale_bytes)
    middle, size = (part.start + stop) / 2, part.stop - part.start
    long = f"{spec.head_size} {_mode(spec).code_label}"
    looks = {"ha": "center", "va": "center_baseline", "zorder": 5}
    ax.text(middle, y - 0.1, f"{part.name}, {size} bytes", fontsize=BODY + 1, **looks)
    if text_inches(long, BODY) < (stop - part.start) / inch - 0.1:
        ax.text(middle, y + 0.09, long, fontsize=BODY, **looks)


def _draw_scale_label(ax: Axes, part: Piece, spec: CacheSpec, inch: float) -> None:
    short = f"{part.name}, {part.stop - part.start} bytes"
    where, what = "" if spec.tail else ", on the last bytes of data", _mode(spec).scale_label
    room = spec.cell_bytes / inch - 0.1
    choice = (f"{short}{where}: {what}", f"{short}: {what}", f"{short}{where}", short)
    text = next((words for words in choice if text_inches(words, BODY) <= room), part.name)
    middle = (part.start + part.stop) / 2
    ax.vlines(middle, SCALE_INCHES - 0.12, SCALE_INCHES, color=INK, lw=0.8)
    ax.text(middle + 0.25 * inch, SCALE_INCHES - 0.21, text, fontsize=BODY, ha="right", va="center_baseline")


def _draw_page(sheet: Sheet, place: tuple[float, float, float], spec: CacheSpec, packing: str) -> None:
    left, top, width = place
    sizes = {spec.real_page_size_bytes, spec.content_page_size_bytes, spec.page_size_bytes}
    equal = {1: "its three sizes are equal", 2: "two of its three sizes are equal", 3: "its three sizes differ"}
    title = (
        f"A page holds {spec.block_size} token{'s' * (spec.block_size > 1)} × {spec.num_kv_heads} "
        f"head{'s' * (spec.num_kv_heads > 1)} × K and V = {spec.cells_per_page} cells; {equal[len(sizes)]}"
    )
    sheet.write(left, top + 0.1, title, TITLE, weight="bold")
    step, whole = PAGE_INCHES + 0.1, spec.page_size_bytes
    width -= PAGE_RIGHT - RIGHT
    ax = sheet.panel(left, top + 0.3, width, 3 * step)
    ax.set(xlim=(0, whole), ylim=(3 * step, 0))
    for number, (name, size, parts, what) in enumerate(_page_bars(spec, packing)):
        y = number * step
        boxes = [((p.start, p.stop, y, y + PAGE_INCHES), p.style) for p in parts]
        draw_boxes(ax, ((box, thin(style) if len(boxes) > MOST_EDGES else style) for box, style in boxes))
        sheet.write(left - 0.1, top + 0.3 + y + PAGE_INCHES / 2, name, ha="right")
        away = 0.08 * whole / width
        looks = {"fontsize": BODY, "va": "center_baseline", "clip_on": False}
        ax.text(size + away, y + PAGE_INCHES / 2, f"{size} bytes: {what}", **looks)


def _page_bars(spec: CacheSpec, packing: str) -> list[tuple[str, int, list[Piece], str]]:
    real, content, page = spec.real_page_size_bytes, spec.content_page_size_bytes, spec.page_size_bytes
    order = "KV" * (spec.cells_per_page // 2)
    order = order if packing == "packed" else "".join(sorted(order))
    size = spec.data_bytes
    data = [Piece("", i * size, (i + 1) * size, DATA[half]) for i, half in enumerate(order)]
    cells = [part for i, half in enumerate(order) for part in cell_parts(spec, half, i * spec.cell_bytes)]
    padding = [Piece("", content, page, UNOWNED)] if page > content else []
    tails = "data and tails" if spec.tail and spec.is_per_token_head else "data; there are no tails"
    step = f"{page - content} of them padding" if padding else "no padding"
    return [
        ("real_page_size_bytes", real, data, "data only"),
        ("content_page_size_bytes", content, cells, tails),
        ("page_size_bytes", page, [Piece("", 0, content, Style(HUES[0], 0.42)), *padding], step),
    ]
