"""Finds elements of a view: the element that covers a byte, and the elements that two index maps put at the same
place.

An index map says at which byte each index of a view has its element. Example: if elements of 4 bytes start 8 bytes
apart, index 1 has its element at bytes [8, 12). So byte 10 belongs to index 1, and byte 13 to no index.
"""

from contextlib import suppress

from kvviz.audit.budget import TooMuchWorkError, spend
from kvviz.audit.counting import count_solutions
from kvviz.audit.findings import Place
from kvviz.audit.view import View

MAX_STEPS = 100_000
"""Work limit of :func:`locate`, in search steps. After it the element counts as not found: a finding has no example."""

STEP_COST, PLACE_COST = 10, 100
"""Work of a search step, and of the record of one element, in units of the work limit."""


def place(view: View, index: tuple[int, ...]) -> Place:
    """Return the record of one element: its index and its bytes."""
    start = view.start_of(index)
    spend(PLACE_COST)
    return Place(view.name, index, view.where(index), start, start + view.itemsize)


def place_of_byte(view: View, byte: int) -> tuple[Place, ...]:
    """Find an element that covers ``byte``. Return ``(place,)``, or ``()`` if there is none."""
    index = locate(view, byte)
    return () if index is None else (place(view, index),)


def same_places(view: View, rightful: View) -> int:
    """Count the indices at which both views, of one shape, have their element at the same byte.

    The equation: ``view.start_of(i) == rightful.start_of(i)``. Both sides are sums of strides times indices, so
    the difference of the strides of each axis, times its index, must sum to the difference of the offsets.
    """
    dims = [
        (step * view.itemsize - rightful_step * rightful.itemsize, size)
        for step, rightful_step, size in zip(view.stride, rightful.stride, view.shape, strict=True)
    ]
    return count_solutions(dims, rightful.offset * rightful.itemsize - view.offset * view.itemsize)


def first_wrong(view: View, rightful: View) -> tuple[int, ...] | None:
    """Return the index of the lowest element of ``view`` that is not where ``rightful`` has it, or None.

    The answer is the lowest element of all, if this element is wrong. Otherwise start from it, and go along axes with
    equal strides in both views: all elements on the way are right. The first wrong element is one step along an axis
    with different strides. Of these axes, the one with the smallest stride gives the lowest element.
    """
    if view.num_elements == 0:
        return None
    lowest = view.lowest
    if view.start_of(lowest) != rightful.start_of(lowest):
        return lowest
    differing = [
        (abs(step), axis)
        for axis, (step, rightful_step, size) in enumerate(zip(view.stride, rightful.stride, view.shape, strict=True))
        if size > 1 and step * view.itemsize != rightful_step * rightful.itemsize
    ]
    if not differing:
        return None
    _, axis = min(differing)
    return tuple(i + (1 if i == 0 else -1) if a == axis else i for a, i in enumerate(lowest))


def locate(view: View, byte: int) -> tuple[int, ...] | None:
    """Return the index of the element that covers ``byte``: the first in index order, or None.

    If elements of the view overlap, the search ends after :data:`MAX_STEPS` steps with None. It also ends with None
    if the work limit is reached.
    """
    start, stop = view.span_bytes
    if view.num_elements == 0 or not start <= byte < stop:
        return None
    axes = list(range(len(view.shape)))
    if view.nested:  # at most one element covers the byte: with the largest stride first, each index is determined
        axes.sort(key=lambda axis: -abs(view.stride[axis]) if view.shape[axis] > 1 else 1)
    steps = [view.stride[axis] * view.itemsize for axis in axes]
    sizes = [view.shape[axis] for axis in axes]
    lows, highs = [0], [view.itemsize - 1]
    for step, size in zip(reversed(steps), reversed(sizes), strict=True):
        lows.append(lows[-1] + min(step, 0) * (size - 1))
        highs.append(highs[-1] + max(step, 0) * (size - 1))
    found = None
    with suppress(TooMuchWorkError):  # a finding keeps its counts, also if its example takes too much work
        found = _search(steps, sizes, lows[::-1], highs[::-1], byte - view.offset * view.itemsize)
    if found is None:
        return None
    index = [0] * len(axes)
    for axis, i in zip(axes, found, strict=True):
        index[axis] = i
    return tuple(index)


def _search(steps: list[int], sizes: list[int], lows: list[int], highs: list[int], distance: int) -> list[int] | None:
    """Return indices whose element covers the byte ``distance`` bytes after the start of element (0, ..., 0), or None.

    Indices are chosen axis by axis, depth first. Axes k, k + 1, ... together can add between ``lows[k]`` and
    ``highs[k]`` bytes, the bytes of the element itself included. An index that leaves a distance outside this range
    cannot lead to a solution and is not tried.

    Example: steps [10, 4], sizes [3, 2], itemsize 1, distance 14. Index 1 of the first axis leaves 4, which the
    second axis can add (0 or 4). Index 0 leaves 14, which is too much. The result is [1, 1].
    """
    stack, tried = [(0, distance, [])] if lows[0] <= distance <= highs[0] else [], 0
    while stack and tried < MAX_STEPS:
        axis, left, chosen = stack.pop()
        tried += 1
        if axis == len(steps):
            return chosen
        step, size = steps[axis], sizes[axis]
        low, high = lows[axis + 1], highs[axis + 1]
        first, last = 0, size - 1
        if step:  # only these indices leave a distance between low and high
            near, far = (left - high, left - low) if step > 0 else (low - left, high - left)
            first, last = max(0, -(-near // abs(step))), min(size - 1, far // abs(step))
        last = min(last, first + MAX_STEPS)
        spend(STEP_COST * max(last - first + 2, 1))
        for i in range(last, first - 1, -1):  # pushed last to first: the first is popped next
            stack.append((axis + 1, left - i * step, [*chosen, i]))
    return None
