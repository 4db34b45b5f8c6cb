"""Recognise why a view is wrong, by comparing its numbers with the numbers of the place where it belongs.

Example: scale views step 33,792 bytes per block, and their data step 24 times as far. 33,792 bytes are the size of one
dense layer. So the strides were computed from the shape of one layer.

Each rule takes a wrong view, its rightful place and the other views. It returns a guess, or None if its mistake does
not give these numbers. A rule looks at strides, offsets and sizes.
"""

from collections.abc import Sequence

from kvviz.audit.guesses import (
    Guess,
    Surroundings,
    axis_name,
    block_axis,
    moved_to,
    other_half,
    start_of,
    steps_of,
)
from kvviz.audit.view import View


def wrong_unit(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if bytes were used as elements, or elements as bytes.

    Then numbers are wrong by the size of an element.
    """
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


def rounded(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if the rightful places are not multiples of the element size, and were rounded to such
    multiples."""
    size = view.itemsize
    ours, right = (start_of(view), *steps_of(view)), (start_of(place), *steps_of(place))
    if ours == right or not any(number % size for number in right):
        return None
    if any(abs(a - b) >= size for a, b in zip(ours, right, strict=True)):
        return None
    facts = {"itemsize": size, "belongs": start_of(place)}
    return Guess("rounded", view.name, moved_to(view, place), facts, (size,))


def swapped_halves(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if a K view lies where the V view of its layer belongs, or the reverse."""
    other = other_half(view.name)
    if other is None or other not in around.views:
        return None
    there = around.place(other)
    if (start_of(view), steps_of(view), view.storage) == (start_of(there), steps_of(there), there.storage):
        return Guess("kv_swapped", view.name, moved_to(view, place), {"other": other, "start": start_of(view)})
    return None


def swapped_axes(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if two axes are exchanged: tokens and heads, or K/V and blocks."""
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
        names = {axis_name(view, a), axis_name(view, b)}
        cause = "token_head_order" if names == {"token", "head"} else "kv_order" if "kv" in names else "axis_order"
        facts = {"inner": axis_name(view, b), "outer": axis_name(view, a), "step": ours[b], "belongs": right[b]}
        return Guess(cause, view.name, moved_to(view, place), facts, tuple(sorted(names)))
    if len(wrong) > 2 and sorted(ours) == sorted(right):
        facts = {"inner": ", ".join(axis_name(view, axis) for axis in wrong), "outer": "", "step": 0, "belongs": 0}
        return Guess("axis_order", view.name, moved_to(view, place), facts, ("several",))
    return None


def from_shape(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if the strides follow from the shape alone, as in a dense buffer of one layer (vLLM 48412)."""
    ours, right = steps_of(view), steps_of(place)
    if ours == right:
        return None
    for halves in (1, 2):  # a dense block holds K only, or K and V
        if _dense(view, halves) != ours:
            continue
        wrong = [axis for axis in range(len(ours)) if ours[axis] != right[axis]]
        axis = block_axis(view) if block_axis(view) in wrong else wrong[0]
        step, belongs, (page, layers) = ours[axis], right[axis], around.page(place)
        factor = belongs // step if step and belongs % step == 0 else 0
        facts = {"step": step, "belongs": belongs, "axis": axis_name(view, axis), "factor": factor,
                 "page": page, "layers": layers}  # fmt: skip
        return Guess("from_shape", view.name, moved_to(view, place), facts)
    return None


def _dense(view: View, halves: int) -> tuple[int, ...]:
    """Return the steps that a dense view of this shape has. The step of the innermost axis stays."""
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
    """Return a guess if only the block stride is wrong, because of layers, padding or another block size."""
    axis, ours, right = block_axis(view), steps_of(view), steps_of(place)
    if axis is None or not ours[axis] or start_of(view) != start_of(place):
        return None
    if any(a != b for n, (a, b) in enumerate(zip(ours, right, strict=True)) if n != axis) or ours == right:
        return None
    step, belongs = ours[axis], right[axis]
    page, layers = around.page(place)
    content = around.content_bytes(place)
    facts = {"step": step, "belongs": belongs, "page": page, "layers": layers, "content": content}
    repaired = moved_to(view, place)
    if layers > 1 and step % page == 0 and 0 < step // page != layers:
        facts |= {"counted": step // page, "axis": axis_name(view, axis), "factor": 0}
        cause, key = ("from_shape", ()) if step == content else ("layer_count", (step // page,))
        return Guess(cause, view.name, repaired, facts, key)
    if step < belongs and step in (content, content * layers):
        return Guess("padding_left_out", view.name, repaired, facts)
    if belongs < step and belongs in (content, content * layers) and step % belongs:
        return Guess("padding_left_out", view.name, repaired, {**facts, "reverse": 1}, ("reverse",))
    if step and (belongs % step == 0 or step % belongs == 0):
        larger, smaller = max(step, belongs), min(step, belongs)
        return Guess("block_unit", view.name, repaired, {**facts, "ratio": larger // smaller}, (larger // smaller,))
    return None


def page_step(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if the step of a block was used for each of the smaller kernel blocks in it (vLLM 54877)."""
    ours, right = steps_of(view), steps_of(place)
    wrong = [axis for axis in range(len(ours)) if ours[axis] != right[axis]]
    if len(wrong) != 2 or start_of(view) != start_of(place):
        return None
    block, part = wrong
    if not right[part] or ours[part] != right[block] or ours[block] != ours[part] * view.shape[part]:
        return None
    facts = {"step": ours[part], "belongs": right[part], "ratio": view.shape[part]}
    return Guess("block_unit", view.name, moved_to(view, place), facts, (view.shape[part],))


def strides_of_the_other_half(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if a V view has the strides of K, or the reverse, and lies in another storage than K."""
    other = other_half(view.name)
    if other is None or other not in around.views or around.place(other).storage == place.storage:
        return None
    if steps_of(around.place(other)) != steps_of(view) or steps_of(view) == steps_of(place):
        return None
    facts = {"other": other, "step": max(steps_of(view)), "belongs": max(steps_of(place))}
    return Guess("half_strides", view.name, moved_to(view, place), facts)


def packed_rows(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if each row of data was taken to have its scale behind it, although the rows lie side by side.

    Example: the indexer cache of vLLM 50576. A scale view with the same steps shows the mistake.
    """
    ours, right = steps_of(view), steps_of(place)
    if view.role == "scale" or len(ours) < 2 or start_of(view) != start_of(place) or ours[:-2] != right[:-2]:
        return None
    if ours[-1] != right[-1] or ours[-2] == right[-2] or right[-2] != view.shape[-1] * view.itemsize:
        return None
    near = (one for one in around.views.values() if one.role == "scale" and one.storage == view.storage)
    for scale in near:
        behind = ours[-2] == right[-2] + scale.itemsize and start_of(scale) == start_of(view) + right[-2]
        if behind and steps_of(scale) == ours[:-1]:
            facts = {"start": start_of(view), "belongs": start_of(place), "taken": "block"}
            return Guess("scale_region", view.name, moved_to(view, place), facts, ("cell",))
    return None


def ring_start(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if the cells of a ring lie one after the other from its start, and not from where they belong.

    All views that share the storage move by the same distance, counted around the ring (llama.cpp 25297).
    """
    if steps_of(view) != steps_of(place) or start_of(view) == start_of(place):
        return None
    family = [one for one in around.views.values() if one.storage == view.storage and one.name in around.rightful]
    places = [around.place(one.name) for one in family]
    size = sum(one.num_elements * one.itemsize for one in family)
    spans = [
        (min(one.span_bytes[0] for one in given), max(one.span_bytes[1] for one in given)) for given in (family, places)
    ]
    if len(family) < 2 or any(stop - start != size for start, stop in spans) or spans[0] != spans[1]:
        return None
    moved = {(start_of(there) - start_of(one)) % size for one, there in zip(family, places, strict=True)}
    if len(moved) != 1:
        return None
    facts = {"cells": size, "moved": moved.pop(), "start": start_of(view), "belongs": start_of(place)}
    return Guess("ring_start", view.name, moved_to(view, place), facts)


def dropped_offset(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if only the start is wrong, and the view starts where the storage or the first layer starts."""
    if steps_of(view) != steps_of(place) or start_of(view) == start_of(place):
        return None
    family = around.family(view.name)
    starts = around.rightful_starts(view.name)
    facts = {"start": start_of(view), "belongs": start_of(place), "first": starts[0]}
    repaired = moved_to(view, place)
    if len(family) > 1 and start_of(view) == starts[0]:
        same = sum(start_of(one) == start_of(view) for one in family)
        cause = "offset_dropped" if view.role == "scale" or same < len(family) else "one_base"
        return Guess(cause, view.name, repaired, {**facts, "views": same}, ())
    share = _shared_section(view, place, family, around)
    if share:
        return Guess("rank_sections", view.name, repaired, {**facts, **share}, (share["ranks"],))
    base = around.first_start(view)
    if base > 0 and start_of(view) == start_of(place) - base:
        return Guess("offset_dropped", view.name, repaired, {**facts, "base": base}, ("storage",))
    return None


def _shared_section(view: View, place: View, family: Sequence[View], around: Surroundings) -> dict | None:
    """If view n lies at section n, but belongs at section n // r, return the number r of ranks per section."""
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
    """Return a guess if scales were taken for one dense region, although each lies in its cell.

    The reverse fits too.
    """
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
    in_blocks = kind == "cell" and len(inner) > 1 and right[inner[0]] > right[inner[1]] * place.shape[inner[1]]
    taken = "block" if in_blocks else kind
    return Guess("scale_region", view.name, moved_to(view, place), {**facts, "taken": taken}, (kind,))


def kv_packing(view: View, place: View, around: Surroundings) -> Guess | None:
    """Return a guess if K and V were taken for two halves of a block, although their cells alternate.

    The reverse fits too.
    """
    other = other_half(view.name)
    if other is None or other not in around.views:
        return None
    ours, right = steps_of(view), steps_of(place)
    inner = [axis for axis in range(len(ours)) if ours[axis] and axis != block_axis(view)]
    pairs = [(ours[axis], right[axis]) for axis in inner if axis_name(view, axis) != "byte"]
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
    """Return a guess that only names a wrong number. It is for views that no known mistake explains."""
    if view.storage != place.storage:
        facts = {"what": "storage", "is": view.storage.name, "belongs": place.storage.name}
        return Guess("other_number", view.name, moved_to(view, place), facts, ("storage",))
    ours, right = (start_of(view), *steps_of(view)), (start_of(place), *steps_of(place))
    wrong = [number for number, (a, b) in enumerate(zip(ours, right, strict=True)) if a != b]
    if not wrong:
        return None
    number = wrong[-1]
    what = "start" if number == 0 else f"step along {axis_name(view, number - 1)}"
    facts = {"what": what, "is": ours[number], "belongs": right[number]}
    difference = ours[number] - right[number]
    return Guess("other_number", view.name, moved_to(view, place), facts, (what, difference, len(wrong)))


PLACE_RULES = (
    swapped_halves,
    swapped_axes,
    wrong_unit,
    rounded,
    ring_start,
    scale_region,
    packed_rows,
    from_shape,
    page_step,
    strides_of_the_other_half,
    block_step,
    dropped_offset,
    kv_packing,
)
"""All rules for a view whose rightful place is known, the surest first."""


def explain_place(view: View, place: View, around: Surroundings) -> list[Guess]:
    """Return every guess that fits a misplaced view, the surest first.

    There is at least one, unless no number is wrong.
    """
    found = [guess for rule in PLACE_RULES if (guess := rule(view, place, around))]
    return found or [guess for guess in (other_number(view, place, around),) if guess]
