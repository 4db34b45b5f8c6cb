"""Recognise why an extent is wrong: a transfer, a registration or a clear that must cover the content of its block.

Example: an extent takes 128 bytes per block, and the content of a block has 192 bytes. 64 of them are scales. So the
width leaves out the scales.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from kvviz.audit.guesses import Guess, Surroundings, block_axis, block_span, start_of, steps_of
from kvviz.audit.view import View


def explain_extent(extent: View, content: Sequence[View], around: Surroundings) -> list[Guess]:
    """Return every guess that fits an extent with the wrong width, step or start, the surest first."""
    places = [around.place(one.name) for one in content if one.num_elements]
    if not places or not extent.shape:
        return []
    start, stop = min(block_span(place)[0] for place in places), max(block_span(place)[1] for place in places)
    owed, begin = stop - start, block_span(extent)[0]
    width = block_span(extent)[1] - begin
    step = abs(steps_of(extent)[0])
    belongs = next((abs(steps_of(p)[block_axis(p)]) for p in places if steps_of(p)[block_axis(p)]), 0)
    repaired = _covering(extent, places, start, owed, belongs)
    facts = {"width": width, "owed": owed, "step": step, "belongs": belongs, "start": begin, "start_belongs": start}
    return list(_extent_guesses(extent, content, around, facts, repaired))


def _extent_guesses(
    extent: View, content: Sequence[View], around: Surroundings, facts: dict, repaired: View
) -> Iterator[Guess]:
    width, owed, step, belongs = (facts[name] for name in ("width", "owed", "step", "belongs"))
    name, blocks = extent.name, extent.shape[0]
    family = around.family(name)
    bytes_owed = sum(prod(one.shape[1:]) * one.itemsize for one in content)
    layers = max(len(family), around.page(extent)[1])
    if facts["start"] != facts["start_belongs"]:
        first = min(start_of(one) for one in family)
        same = sum(start_of(one) == facts["start"] for one in family)
        if len(family) > 1 and same > 1 and facts["start"] == first:
            yield Guess("one_base", name, repaired, {**facts, "views": same})
    if width < owed:
        scales = sum(prod(one.shape[1:]) * one.itemsize for one in content if one.role == "scale")
        cells = {prod(one.shape[1:-1]) for one in content if len(one.shape) > 1}
        hidden = sum(prod(one.shape[1:-1]) for one in content if len(one.shape) > 1)
        if (scales and width == owed - scales) or (cells and width == owed - 4 * hidden):
            yield Guess("width_without_scales", name, repaired, {**facts, "missing": owed - width}, (owed - width,))
        if bytes_owed == width < owed:
            yield Guess("kv_packing", name, repaired, {**facts, "taken": "packed"}, ("extent",))
        twin = _same_start(extent, content, around)
        if twin:
            yield Guess("one_base", name, repaired, {**facts, "twin": twin}, ("length",))
    if width > owed:
        if width == step and step == belongs:
            yield Guess("step_for_length", name, repaired, facts)
        elif len(family) > 1 and width == owed * layers:
            yield Guess("layer_count", name, repaired, {**facts, "counted": layers, "layers": 1, "page": owed}, ("x",))
        elif width == 2 * owed and step in (0, belongs):
            yield Guess("kv_packing", name, repaired, {**facts, "taken": "double"}, ("double",))
        if width % owed == 0 and width // owed > 1 and width != step:
            yield Guess("block_unit", name, repaired, {**facts, "ratio": width // owed}, (width // owed,))
    if blocks > 1 and step != belongs and belongs and step:
        page, count = around.page(content[0])
        if belongs == step * count and count > 1:
            extra = {**facts, "factor": count, "axis": "block", "page": step, "layers": count}
            yield Guess("from_shape", name, repaired, extra, ("extent",))
        elif step < belongs and step == owed:
            yield Guess("padding_left_out", name, repaired, {**facts, "content": owed, "layers": 1}, ("extent",))
        elif belongs % step == 0 or step % belongs == 0:
            ratio = max(step, belongs) // min(step, belongs)
            yield Guess("block_unit", name, repaired, {**facts, "ratio": ratio}, (ratio,))
    facts = {**facts, "blocks": blocks, "blocks_owed": repaired.shape[0]}
    pairs = [("width", "owed"), ("step", "belongs"), ("start", "start_belongs"), ("blocks", "blocks_owed")]
    pairs = [pair for pair in pairs if blocks > 1 or pair[0] != "step"]  # one block has no step
    wrong = next((pair for pair in pairs
                  if facts[pair[0]] != facts[pair[1]]), ("width", "owed"))  # fmt: skip
    if facts[wrong[0]] == facts[wrong[1]]:
        return
    what = {
        "width": "width of a block in bytes", "step": "step along block", "start": "start", "blocks": "number of blocks"
    }[wrong[0]]  # fmt: skip
    yield Guess("other_number", name, repaired, {"what": what, "is": facts[wrong[0]], "belongs": facts[wrong[1]]},
                (what, facts[wrong[0]] - facts[wrong[1]]))  # fmt: skip


def _same_start(extent: View, content: Sequence[View], around: Surroundings) -> str:
    """Return the name of another view with the start and width of the extent. If there is none, return ""."""
    names = {extent.name, *(one.name for one in content)}
    return next((name for name in around.same_span(extent) if name not in names), "")


def _covering(extent: View, places: Sequence[View], start: int, owed: int, step: int) -> View:
    """Return the repaired extent. It covers all bytes of the content of each block."""
    blocks = max(place.shape[block_axis(place)] for place in places)
    if len(places) == 1:
        shape, stride = _merged(places[0])
        return replace(extent, shape=shape, stride=stride, offset=start, itemsize=1, axes=())
    return replace(extent, shape=(blocks, owed), stride=(step or owed, 1), offset=start, itemsize=1, axes=())


def _merged(place: View) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a place in bytes. Adjacent elements are joined to one axis of bytes."""
    axis = block_axis(place)
    outer = (place.shape[axis], place.stride[axis] * place.itemsize)
    rest = [(place.stride[n] * place.itemsize, size) for n, size in enumerate(place.shape) if n != axis and size > 1]
    width, kept = place.itemsize, []
    for step, size in sorted(rest):
        if step == width and not kept:
            width *= size
        else:
            kept.append((step, size))
    kept.reverse()
    shape = (outer[0], *(size for _, size in kept), width)
    return shape, (outer[1], *(step for step, _ in kept), 1)
