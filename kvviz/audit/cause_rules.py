"""Recognise why a view is wrong, by comparing its numbers with the numbers of the place where it belongs.

Each rule gets a wrong view, its rightful place and the other views. It returns a :class:`Guess` if one known mistake
turns the rightful numbers into the wrong ones, else None. A rule looks at strides, offsets and sizes only. For
example: a scale view that steps 33,792 bytes per block, next to data that step 24 times as far, was made from the
shape of one layer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from kvviz.audit.view import View


@dataclass(frozen=True)
class Guess:
    """One mistake that explains one wrong view.

    Attributes:
        cause: the name of a cause in ``kvviz.audit.causes.CAUSES``.
        view: the wrong view's name.
        repaired: the view as it should be, or None if the rule cannot say.
        facts: the numbers that prove the guess, by name; views with one cause and one ``key`` are told together.
        key: what must be equal for two views to have made the same mistake.
    """

    cause: str
    view: str
    repaired: View | None
    facts: Mapping[str, int | str] = field(default_factory=dict, hash=False)
    key: tuple = ()


@dataclass(frozen=True)
class Surroundings:
    """What a rule may look at besides the wrong view: all views by name, and the rightful places that are claimed."""

    views: Mapping[str, View]
    rightful: Mapping[str, View] = field(default_factory=dict)

    def family(self, name: str) -> list[View]:
        """Return the views in one storage whose names differ from ``name`` in a number only, the lowest number first."""
        wanted, storage = family_of(name), self.views[name].storage
        found = [view for view in self.views.values() if family_of(view.name) == wanted and view.storage == storage]
        return sorted(found, key=lambda view: natural(view.name))

    def place(self, name: str) -> View:
        """Return where the view of that name belongs: its rightful place, or the view itself if none is claimed."""
        return self.rightful.get(name, self.views[name])


def family_of(name: str) -> str:
    """Return a name with its numbers replaced, for example ``layer # K scale``."""
    return re.sub(r"\d+", "#", name)


def natural(name: str) -> tuple:
    """Return a key that sorts ``layer 2`` before ``layer 10``."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def start_of(view: View) -> int:
    """Return the byte at which element (0, ..., 0) starts."""
    return view.offset * view.itemsize


def steps_of(view: View) -> tuple[int, ...]:
    """Return the byte step of each axis; 0 for an axis with one index, whose stride has no effect."""
    return tuple(step * view.itemsize if size > 1 else 0 for step, size in zip(view.stride, view.shape, strict=True))


def moved_to(view: View, place: View) -> View:
    """Return ``view`` with the geometry of ``place``."""
    return replace(
        view,
        storage=place.storage,
        shape=place.shape,
        stride=place.stride,
        offset=place.offset,
        itemsize=place.itemsize,
    )


def axis_of(view: View, word: str, default: int | None = None) -> int | None:
    """Return the number of the axis that has this name, or ``default``."""
    return view.axes.index(word) if word in view.axes else default


def block_axis(view: View) -> int | None:
    """Return the axis that counts blocks: the one called ``block``, or the first one; None for a scalar."""
    return axis_of(view, "block", 0 if view.shape else None)


def page_of(view: View, around: Surroundings) -> tuple[int, int]:
    """Return the bytes that one layer uses in a block, and how many layers share the block.

    The page is the distance from one layer's view to the next inside a block. Without such neighbours it is the
    stretch that all views of the storage use in block 0.
    """
    axis = block_axis(view)
    step = abs(steps_of(view)[axis]) if axis is not None else 0
    starts = sorted({start_of(around.place(one.name)) for one in around.family(view.name)})
    inside = [start for start in starts if start - starts[0] < step] if step else []
    if len(inside) > 1 and len({b - a for a, b in zip(inside, inside[1:], strict=False)}) == 1:
        return inside[1] - inside[0], len(inside)
    return content_of(view, around), 1


def content_of(view: View, around: Surroundings) -> int:
    """Return how many bytes the views around ``view``'s block 0 use: those of its own layer, from first to last byte."""
    layer = _layer(view.name)
    near = [around.place(one.name) for one in around.views.values() if one.storage == view.storage]
    near = [one for one in near if _layer(one.name) == layer and one.role in ("data", "scale") and one.num_elements]
    ends = [_block_span(one) for one in near or [view]]
    return max(stop for _, stop in ends) - min(start for start, _ in ends)


def _layer(name: str) -> str:
    found = re.search(r"\d+", name)
    return found.group() if found else ""


def _block_span(view: View) -> tuple[int, int]:
    axis = block_axis(view)
    if axis is None:
        return view.span_bytes
    shape = tuple(1 if one == axis else size for one, size in enumerate(view.shape))
    return replace(view, shape=shape).span_bytes


# Rules for a view whose rightful place is known.


def wrong_unit(view: View, place: View, around: Surroundings) -> Guess | None:
    """Numbers in bytes that were used as elements, or the reverse: every step is too large or small by the itemsize."""
    size = view.itemsize
    if size == 1:
        return None
    ours, right = (start_of(view), *steps_of(view)), (start_of(place), *steps_of(place))
    for name, factor_ours, factor_right in (("bytes for elements", 1, size), ("elements for bytes", size, 1)):
        differing = [a != b for a, b in zip(ours, right, strict=True)]
        scaled = [a * factor_ours == b * factor_right for a, b in zip(ours, right, strict=True)]
        steps_scaled, offset_scaled = all(scaled[1:]) and any(differing[1:]), scaled[0] and differing[0]
        if (steps_scaled and (scaled[0] or not differing[0])) or (offset_scaled and not any(differing[1:])):
            what = "strides and offset" if steps_scaled and offset_scaled else "strides" if steps_scaled else "offset"
            facts = {"itemsize": size, "taken": name, "what": what}
            return Guess("element_size", view.name, moved_to(view, place), facts, (name, what, size))
    return None


def swapped_halves(view: View, place: View, around: Surroundings) -> Guess | None:
    """A K view that lies where the V view of its layer belongs, or the reverse."""
    other = _other_half(view.name)
    if other is None or other not in around.views:
        return None
    there = around.place(other)
    if (start_of(view), steps_of(view), view.storage) == (start_of(there), steps_of(there), there.storage):
        return Guess("kv_swapped", view.name, moved_to(view, place), {"other": other, "start": start_of(view)})
    return None


def _other_half(name: str) -> str | None:
    words = name.split(" ")
    if sum(word in ("K", "V") for word in words) != 1:
        return None
    return " ".join({"K": "V", "V": "K"}.get(word, word) for word in words)


def swapped_axes(view: View, place: View, around: Surroundings) -> Guess | None:
    """Two axes in the other order: the outer one is walked as the inner one (tokens and heads, K/V and blocks)."""
    ours, right = steps_of(view), steps_of(place)
    if start_of(view) != start_of(place):
        return None
    wrong = [axis for axis in range(len(ours)) if ours[axis] != right[axis]]
    if len(wrong) == 2:
        a, b = sorted(wrong, key=lambda axis: abs(right[axis]))  # a is the inner axis of the rightful place
        exchanged = ours[a] == right[b] and ours[b] == right[a]
        reordered = ours[b] == right[a] and ours[a] == right[a] * view.shape[b] and right[b] == right[a] * view.shape[a]
        if not (exchanged or reordered):
            return None
        names = {_axis_name(view, a), _axis_name(view, b)}
        cause = "token_head_order" if names == {"token", "head"} else "kv_order" if "kv" in names else "axis_order"
        facts = {"inner": _axis_name(view, b), "outer": _axis_name(view, a), "step": ours[b], "belongs": right[b]}
        return Guess(cause, view.name, moved_to(view, place), facts, tuple(sorted(names)))
    if len(wrong) > 2 and sorted(ours) == sorted(right):
        facts = {"inner": ", ".join(_axis_name(view, axis) for axis in wrong), "outer": "", "step": 0, "belongs": 0}
        return Guess("axis_order", view.name, moved_to(view, place), facts, ("several",))
    return None


def _axis_name(view: View, axis: int) -> str:
    return view.axes[axis] if view.axes else f"axis {axis}"


def from_shape(view: View, place: View, around: Surroundings) -> Guess | None:
    """Strides that follow from the shape alone, as if one layer had a dense buffer of its own (vLLM 48412)."""
    ours, right = steps_of(view), steps_of(place)
    if ours == right:
        return None
    for halves in (1, 2):  # a dense block holds K, or K and V
        if _dense(view, halves) != ours:
            continue
        axis = block_axis(view)
        factor = right[axis] // ours[axis] if axis is not None and ours[axis] and right[axis] % ours[axis] == 0 else 0
        facts = {"step": ours[axis] if axis is not None else 0, "belongs": right[axis] if axis is not None else 0,
                 "factor": factor}  # fmt: skip
        return Guess("from_shape", view.name, moved_to(view, place), facts, ())
    return None


def _dense(view: View, halves: int) -> tuple[int, ...]:
    """Return the steps of ``view``'s shape, laid out densely in the order of the axes, from its own innermost step."""
    ours = steps_of(view)
    inner = [axis for axis in range(len(ours)) if ours[axis]]
    if not inner:
        return ()
    step, made = ours[inner[-1]], [0] * len(ours)
    for axis in reversed(inner):
        if axis == inner[0] and len(inner) > 1:
            step *= halves
        made[axis] = step
        step *= view.shape[axis]
    return tuple(made)


def block_step(view: View, place: View, around: Surroundings) -> Guess | None:
    """A wrong distance between blocks, all else right: layers or padding left out, or blocks of another size."""
    axis, ours, right = block_axis(view), steps_of(view), steps_of(place)
    if axis is None or not ours[axis] or start_of(view) != start_of(place):
        return None
    if any(a != b for n, (a, b) in enumerate(zip(ours, right, strict=True)) if n != axis) or ours == right:
        return None
    step, belongs = ours[axis], right[axis]
    page, layers = page_of(place, around)
    content = content_of(place, around)
    facts = {"step": step, "belongs": belongs, "page": page, "layers": layers, "content": content}
    repaired = moved_to(view, place)
    if layers > 1 and step % page == 0 and 0 < step // page != layers:
        facts["counted"] = step // page
        return Guess("from_shape" if step == content else "layer_count", view.name, repaired, facts, (step // page,))
    if step < belongs and step in (content, content * layers):
        return Guess("padding_left_out", view.name, repaired, facts)
    if belongs < step and belongs in (content, content * layers):
        return Guess("padding_left_out", view.name, repaired, {**facts, "reverse": 1}, ("reverse",))
    if step and (belongs % step == 0 or step % belongs == 0):
        larger, smaller = max(step, belongs), min(step, belongs)
        return Guess("block_unit", view.name, repaired, {**facts, "ratio": larger // smaller}, (larger // smaller,))
    return None


def dropped_offset(view: View, place: View, around: Surroundings) -> Guess | None:
    """The right steps from the wrong start: the start of the storage, or of the first layer."""
    if steps_of(view) != steps_of(place) or start_of(view) == start_of(place):
        return None
    family = around.family(view.name)
    starts = [start_of(around.place(one.name)) for one in family]
    facts = {"start": start_of(view), "belongs": start_of(place), "first": min(starts)}
    repaired = moved_to(view, place)
    if len(family) > 1 and start_of(view) == min(starts):
        same = sum(start_of(one) == start_of(view) for one in family)
        cause = "offset_dropped" if view.role == "scale" or same < len(family) else "one_base"
        return Guess(cause, view.name, repaired, {**facts, "views": same}, ())
    share = _shared_section(view, place, family, around)
    if share:
        return Guess("rank_sections", view.name, repaired, {**facts, **share}, (share["ranks"],))
    base = min(start_of(around.place(one.name)) for one in around.views.values() if one.storage == view.storage)
    if base > 0 and start_of(view) == start_of(place) - base:
        return Guess("offset_dropped", view.name, repaired, {**facts, "base": base}, ("storage",))
    return None


def _shared_section(view: View, place: View, family: Sequence[View], around: Surroundings) -> dict | None:
    """Return how many ranks hold one section, if the n-th view lies at section n instead of at n // ranks."""
    if len(family) < 2:
        return None
    ours = [start_of(one) for one in family]
    right = [start_of(around.place(one.name)) for one in family]
    section = ours[1] - ours[0]
    if section <= 0 or ours != [ours[0] + n * section for n in range(len(ours))]:
        return None
    for ranks in range(2, len(family) + 1):
        if right == [right[0] + n // ranks * section for n in range(len(right))]:
            return {"ranks": ranks, "section": section}
    return None


def scale_region(view: View, place: View, around: Surroundings) -> Guess | None:
    """Scales taken for one dense region, while each lies in its cell; or the reverse."""
    if view.role != "scale":
        return None
    ours, right = steps_of(view), steps_of(place)
    inner = [axis for axis in range(len(ours)) if ours[axis] and right[axis]]
    if not inner:
        return None
    dense = min(abs(ours[axis]) for axis in inner) == view.itemsize
    planar = min(abs(right[axis]) for axis in inner) == place.itemsize
    if dense == planar:
        return None
    facts = {"start": start_of(view), "belongs": start_of(place), "itemsize": view.itemsize,
             "cell": min(abs(step) for step in (right if dense else ours) if step)}  # fmt: skip
    kind = "region" if dense else "cell"
    return Guess("scale_region", view.name, moved_to(view, place), {**facts, "taken": kind}, (kind,))


def kv_packing(view: View, place: View, around: Surroundings) -> Guess | None:
    """K and V taken for two halves of a block while they alternate cell by cell, or the reverse."""
    other = _other_half(view.name)
    if other is None or other not in around.views:
        return None
    ours, right = steps_of(view), steps_of(place)
    inner = [axis for axis in range(len(ours)) if ours[axis] and axis != block_axis(view)]
    pairs = [(ours[axis], right[axis]) for axis in inner if _axis_name(view, axis) != "byte"]
    if not pairs:
        return None
    if all(b == 2 * a for a, b in pairs):
        taken = "split"
    elif all(a == 2 * b for a, b in pairs):
        taken = "packed"
    else:
        return None
    facts = {"step": min(a for a, _ in pairs), "belongs": min(b for _, b in pairs), "taken": taken}
    return Guess("kv_packing", view.name, moved_to(view, place), facts, (taken,))


def other_number(view: View, place: View, around: Surroundings) -> Guess | None:
    """No known mistake: name the first number that is wrong."""
    if view.storage != place.storage:
        facts = {"what": "storage", "is": view.storage.name, "belongs": place.storage.name}
        return Guess("other_number", view.name, moved_to(view, place), facts, ("storage",))
    ours, right = (start_of(view), *steps_of(view)), (start_of(place), *steps_of(place))
    wrong = [number for number, (a, b) in enumerate(zip(ours, right, strict=True)) if a != b]
    if not wrong:
        return None
    number = wrong[-1]
    what = "start" if number == 0 else f"step along {_axis_name(view, number - 1)}"
    facts = {"what": what, "is": ours[number], "belongs": right[number]}
    difference = ours[number] - right[number]
    return Guess("other_number", view.name, moved_to(view, place), facts, (what, difference, len(wrong)))


PLACE_RULES = (
    swapped_halves,
    swapped_axes,
    wrong_unit,
    scale_region,
    from_shape,
    block_step,
    dropped_offset,
    kv_packing,
)
"""The rules for a view with a known rightful place, the surest first."""


def explain_place(view: View, place: View, around: Surroundings) -> list[Guess]:
    """Return every guess that fits a misplaced view, the surest first. At least one is returned."""
    found = [guess for rule in PLACE_RULES if (guess := rule(view, place, around))]
    return found or [guess for guess in (other_number(view, place, around),) if guess]


# Rules for an extent (a transfer, a registration, a clear) that must cover the content of its block.


def explain_extent(extent: View, content: Sequence[View], around: Surroundings) -> list[Guess]:
    """Return every guess that fits an extent with the wrong width, step or start, the surest first."""
    places = [around.place(one.name) for one in content if one.num_elements]
    if not places or not extent.shape:
        return []
    start, stop = (f(edge) for f, edge in ((min, [_block_span(p)[0] for p in places]),
                                           (max, [_block_span(p)[1] for p in places])))  # fmt: skip
    owed, begin = stop - start, _block_span(extent)[0]
    width = _block_span(extent)[1] - begin
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
    layers = max(len(family), page_of(extent, around)[1])
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
        elif width == 2 * owed:
            yield Guess("kv_packing", name, repaired, {**facts, "taken": "double"}, ("double",))
        if width % owed == 0 and width // owed > 1 and width != step:
            yield Guess("block_unit", name, repaired, {**facts, "ratio": width // owed}, (width // owed,))
    if blocks > 1 and step != belongs and belongs and step:
        page, count = page_of(content[0], around)
        if belongs == step * count and count > 1:
            yield Guess("from_shape", name, repaired, {**facts, "factor": count}, ("extent",))
        elif step < belongs and step == owed:
            yield Guess("padding_left_out", name, repaired, {**facts, "content": owed, "layers": 1}, ("extent",))
        elif belongs % step == 0 or step % belongs == 0:
            ratio = max(step, belongs) // min(step, belongs)
            yield Guess("block_unit", name, repaired, {**facts, "ratio": ratio}, (ratio,))
    wrong = next((pair for pair in (("width", "owed"), ("step", "belongs"), ("start", "start_belongs"))
                  if facts[pair[0]] != facts[pair[1]]), ("width", "owed"))  # fmt: skip
    what = {"width": "width of a block", "step": "step along block", "start": "start"}[wrong[0]]
    yield Guess("other_number", name, repaired, {"what": what, "is": facts[wrong[0]], "belongs": facts[wrong[1]]},
                (what, facts[wrong[0]] - facts[wrong[1]]))  # fmt: skip


def _same_start(extent: View, content: Sequence[View], around: Surroundings) -> str:
    """Return the name of another view with the extent's start and width, if the content does not have that width."""
    names = {extent.name, *(one.name for one in content)}
    mine = _block_span(extent)
    found = (one.name for one in around.views.values()
             if one.name not in names and one.storage == extent.storage and _block_span(one) == mine)  # fmt: skip
    return next(found, "")


def _covering(extent: View, places: Sequence[View], start: int, owed: int, step: int) -> View:
    """Return the extent as it should be: block by block, all bytes of the content, and none between its stretches."""
    blocks = max(place.shape[block_axis(place)] for place in places)
    if len(places) == 1:
        shape, stride = _merged(places[0])
        return replace(extent, shape=shape, stride=stride, offset=start, itemsize=1, axes=())
    return replace(extent, shape=(blocks, owed), stride=(step or owed, 1), offset=start, itemsize=1, axes=())


def _merged(place: View) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and byte strides of a place, with axes that continue each other taken as one range of bytes."""
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
