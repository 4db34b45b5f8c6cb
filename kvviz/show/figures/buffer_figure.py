"""Draws whole buffers, all to the same scale: the place of every block of every layer, and the pieces of one block.

The places come from the strides of the tensors of the cache, and not from the name of the layout. So the figure shows
what is really allocated. The tensors may be on torch's ``meta`` device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvviz.cache.buffers import KVCache, block_runs
from kvviz.show.colours import GREY, HUES, INK, OUTLINE, SHADES, UNOWNED, Style, thin
from kvviz.show.figures.canvas import (
    BODY,
    SMALL,
    TITLE,
    Box,
    Sheet,
    check_titles,
    check_width,
    draw_boxes,
    settings,
    text_inches,
    ticks,
    wrapped,
)

WIDTH, MARGIN, RIGHT = 11.0, 0.12, 0.75
STRIP_INCHES, BRACKET_INCHES, STRIP_GAP = 0.28, 0.2, 0.08
HEAD_INCHES, TICKS_INCHES = 0.24, 0.34
MAX_STRETCHES = 50_000
"""Limit of the byte ranges that all layers of a cache have in a figure. With more, a byte range would be narrower than
a pixel."""

MOST_EDGES = 400
"""If a strip has more stripes than this, they are drawn without edges, because the edges would cover them."""


@dataclass(frozen=True)
class Stripe:
    """Adjacent bytes ``[start, stop)`` of a storage that belong to one block of one layer."""

    layer: int
    block: int
    start: int
    stop: int


def stripes(cache: KVCache) -> dict[str, tuple[Stripe, ...]]:
    """Return the stripes of all blocks of all layers: for each name of a storage, a tuple that is sorted by ``start``.

    The stripes are computed from the strides of ``cache.kv_caches``.

    Raises:
        ValueError: the layers have more than :data:`MAX_STRETCHES` byte ranges together.
    """
    found: dict[str, list[Stripe]] = {}
    for layer, kv in enumerate(cache.kv_caches):
        starts, length = block_runs(kv)
        if starts.size * len(cache.kv_caches) > MAX_STRETCHES:
            raise ValueError(
                f"{len(cache.kv_caches)} layers with {starts.size} byte ranges each are too many to draw (at most "
                f"{MAX_STRETCHES} byte ranges together): draw a similar cache with fewer blocks"
            )
        mine = found.setdefault(cache.storage_of(layer).name, [])
        for block, firsts in enumerate(starts.tolist()):
            mine += [Stripe(layer, block, first, first + length) for first in sorted(firsts)]
    return {name: _joined(mine) for name, mine in found.items()}


def _joined(found: list[Stripe]) -> tuple[Stripe, ...]:
    """Sort stripes, and join adjacent stripes of the same block and layer."""
    joined: list[Stripe] = []
    for stripe in sorted(found, key=lambda s: s.start):
        last = joined[-1] if joined else None
        if last and (last.layer, last.block, last.stop) == (stripe.layer, stripe.block, stripe.start):
            joined[-1] = Stripe(last.layer, last.block, last.start, stripe.stop)
        else:
            joined.append(stripe)
    return tuple(joined)


def pieces(found: tuple[Stripe, ...]) -> list[tuple[int, int, int]]:
    """Return ``(block, start, stop)`` of each piece of each block. Between start and stop are no bytes of other blocks.

    Padding does not divide a piece.
    """
    groups = ((block, list(group)) for block, group in groupby(found, key=lambda stripe: stripe.block))
    return [(block, group[0].start, group[-1].stop) for block, group in groups]


def buffer_figure(
    caches: Mapping[str, KVCache] | KVCache,
    *,
    block: int | None = None,
    max_layers_shown: int = 8,
    width_inches: float = WIDTH,
) -> Figure:
    """Draw whole buffers to the same scale. There is one strip per storage, with every block of every layer.

    Args:
        caches: a mapping of titles to caches, or one cache. The title of one cache is the name of its layout. The
            tensors may be on torch's ``meta`` device.
        block: number of a block. The figure outlines its bytes in all layers, and counts its pieces.
        max_layers_shown: limit of the strips per cache. If a cache has more storages, the others are only counted.
        width_inches: width of the figure. A notebook shows 11 inches as 1100 pixels.

    Raises:
        ValueError: there is no cache, a title is not a text, the block does not exist, the figure is too narrow, or a
            cache has too many byte ranges to draw.
    """
    named = _named(caches)
    check_width(width_inches)
    if max_layers_shown < 1:
        raise ValueError(f"max_layers_shown must be at least 1, not {max_layers_shown}")
    for title, cache in named.items():
        if block is not None and not 0 <= block < cache.spec.num_blocks:
            raise ValueError(
                f"block {block} does not exist: choose one of the blocks 0 to {cache.spec.num_blocks - 1} of {title!r}"
            )
    with settings():
        panels = [_Panel.of(title, cache, block, max_layers_shown, width_inches) for title, cache in named.items()]
        left = MARGIN + 0.1 + max(text_inches(name, BODY) for panel in panels for name in panel.strips)
        whole = max(size for panel in panels for size in panel.sizes)
        inner = width_inches - left - RIGHT
        edges = {stripe.start for panel in panels for mine in panel.strips.values() for stripe in mine}
        marks = ticks(whole, int(inner / 0.8), edges)
        alt = " ".join(f"{panel.summary}." for panel in panels)
        sheet = Sheet(width_inches, MARGIN + sum(panel.inches for panel in panels) + 0.3, alt)
        top = MARGIN
        for panel in panels:
            ax = _draw_panel(sheet, panel, (left, top, inner), marks, whole, block)
            top += panel.inches
        ax.set_xlabel("byte within the buffer", fontsize=BODY)
    return sheet


def _named(caches: Mapping[str, KVCache] | KVCache) -> dict[str, KVCache]:
    if isinstance(caches, KVCache):
        return {caches.layout.name: caches}
    if not caches or not isinstance(caches, Mapping):
        raise ValueError("there is no cache to draw: give one KVCache, or a mapping of titles to caches")
    check_titles(caches, KVCache)
    return dict(caches)


@dataclass(frozen=True)
class _Panel:
    """A part of the figure with one cache: the title with the counts, and one strip per storage."""

    title: tuple[str, ...]
    summary: str
    strips: dict[str, tuple[Stripe, ...]]
    sizes: tuple[int, ...]
    more: int

    @classmethod
    def of(cls, title: str, cache: KVCache, block: int | None, most: int, width: float) -> "_Panel":
        found = stripes(cache)
        summary = f"{title}: {_counts(found, cache, block)}"
        shown = dict(list(found.items())[:most])
        sizes = tuple(storage.numel() for storage in cache.storages[: len(shown)])
        lines = wrapped(summary, TITLE, width - 2 * MARGIN, bold=True)
        return cls(tuple(lines), summary, shown, sizes, len(found) - len(shown))

    @property
    def body_inches(self) -> float:
        heights = [STRIP_INCHES + STRIP_GAP + bracket_inches(mine) for mine in self.strips.values()]
        return sum(heights) + (0.2 if self.more else 0.0)

    @property
    def inches(self) -> float:
        return HEAD_INCHES * len(self.title) + self.body_inches + TICKS_INCHES


def bracket_inches(found: Sequence[Stripe]) -> float:
    """Return the height in inches of the brackets above a strip. It is 0 if the strip has only one layer.

    A bracket has the number of a block.
    """
    return BRACKET_INCHES if len({stripe.layer for stripe in found}) > 1 else 0.0


def _counts(found: Mapping[str, tuple[Stripe, ...]], cache: KVCache, block: int | None) -> str:
    """Return a text with the number of buffers, and the number of pieces of the block."""
    sizes = sorted({storage.numel() for storage in cache.storages})
    count = len(found)
    buffers = f"{count} buffer{'s' * (count > 1)} of {' or '.join(map(str, sizes))} bytes"
    if block is None:
        return buffers
    lengths = [stop - start for mine in found.values() for b, start, stop in pieces(mine) if b == block]
    each = f"{lengths[0]} bytes" if len(set(lengths)) == 1 else f"{sum(lengths)} bytes together"
    own = sum(s.stop - s.start for mine in found.values() for s in mine if s.block == block)
    padding = ", padding between its pages included" if own < sum(lengths) else ""
    return f"{buffers}; block {block} is {len(lengths)} piece{'s' * (len(lengths) > 1)} of {each}{padding}"


def _draw_panel(
    sheet: Sheet, panel: _Panel, place: tuple[float, float, float], marks: Sequence[int], whole: int, block: int | None
) -> Axes:
    left, top, width = place
    for number, line in enumerate(panel.title):
        sheet.write(MARGIN, top + HEAD_INCHES * (number + 0.4), line, TITLE, weight="bold")
    ax = sheet.panel(left, top + HEAD_INCHES * len(panel.title), width, panel.body_inches)
    ax.set(xlim=(0, whole), ylim=(panel.body_inches, 0))
    ax.set_xticks(marks)
    ax.tick_params(labelsize=BODY, length=3, color=GREY, pad=2)
    y = 0.0
    for (name, mine), size in zip(panel.strips.items(), panel.sizes, strict=True):
        bracket = bracket_inches(mine)
        _draw_strip(ax, mine, (y + bracket, size), whole / width, block)
        middle = y + bracket + STRIP_INCHES / 2
        ax.text(-0.1 * whole / width, middle, name, fontsize=BODY, ha="right", va="center_baseline")
        y += bracket + STRIP_INCHES + STRIP_GAP
    if panel.more:
        text = f"… and {panel.more} more buffers of the same kind, not drawn"
        ax.text(0, y + 0.08, text, fontsize=BODY, color=GREY, va="center_baseline")
    return ax


def _draw_strip(ax: Axes, found: Sequence[Stripe], place: tuple[float, int], per_inch: float, block: int | None):
    """Draw one storage: padding in the background, one stripe per block and layer, and brackets or outlines."""
    y, size = place
    ends = (y, y + STRIP_INCHES)
    plain = len(found) <= MOST_EDGES
    boxes = [((0, size, *ends), UNOWNED)] if _has_gaps(found, size) else []
    boxes += [((s.start, s.stop, *ends), stripe_style(s, block)) for s in found]
    draw_boxes(ax, ((box, style if plain else thin(style)) for box, style in boxes))
    mixed = bracket_inches(found) > 0
    for stripe in found:
        _write(ax, stripe_words(stripe, mixed), (stripe.start, stripe.stop, *ends), per_inch, BODY)
    for number, start, stop in pieces(found):
        if number == block:
            draw_boxes(ax, [((start, stop, *ends), OUTLINE)])
        if mixed:
            _bracket(ax, (start, stop, y - BRACKET_INCHES, y), number, per_inch, number == block)
    away = 0.08 * per_inch
    looks = {"fontsize": SMALL, "color": GREY, "va": "center_baseline", "clip_on": False}
    ax.text(size + away, y + STRIP_INCHES / 2, f"{size} bytes", **looks)


def _has_gaps(found: Sequence[Stripe], size: int) -> bool:
    return sum(stripe.stop - stripe.start for stripe in found) < size


def stripe_style(stripe: Stripe, block: int | None) -> Style:
    """Return a shade of the hue of the layer. If a block is outlined, all other blocks have a lighter shade."""
    strong = block is None or stripe.block == block
    return Style(HUES[stripe.layer % len(HUES)], SHADES["K data" if strong else "V data"].share)


def stripe_words(stripe: Stripe, mixed: bool) -> tuple[str, ...]:
    """Return the texts for a stripe, the longest first.

    If the buffer has several layers (``mixed``), the texts name the layer. Otherwise the texts name the block.
    """
    if mixed:
        return (f"layer {stripe.layer}", f"L{stripe.layer}", str(stripe.layer))
    return (f"block {stripe.block}", str(stripe.block))


def _write(ax: Axes, candidates: Sequence[str], box: Box, per_inch: float, size: float, **looks) -> None:
    room = (box[1] - box[0]) / per_inch - 0.04
    text = next((word for word in candidates if text_inches(word, size) <= room), "")
    if text:
        place = ((box[0] + box[1]) / 2, (box[2] + box[3]) / 2)
        ax.text(*place, text, fontsize=size, ha="center", va="center_baseline", zorder=5, **looks)


def _bracket(ax: Axes, box: Box, block: int, per_inch: float, strong: bool) -> None:
    left, right, top, bottom = box
    inset = min(0.02 * per_inch, (right - left) / 4)
    y = bottom - 0.045
    path = ([left + inset, left + inset, right - inset, right - inset], [bottom - 0.01, y, y, bottom - 0.01])
    ax.plot(*path, color=INK if strong else GREY, lw=1.4 if strong else 0.7, clip_on=False)
    weight = "bold" if strong else "normal"
    _write(ax, (f"block {block}", str(block)), (left, right, top, y), per_inch, BODY, weight=weight)
