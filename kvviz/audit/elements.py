"""Finds elements of a view: the element that covers a byte, or the elements that lie at the same byte in another view.

An *index map* says at which bytes the element of each index lies. Example: elements of 4 bytes start 8 bytes apart.
Then the element of index 1 lies at bytes [8, 12). So byte 10 belongs to index 1, and byte 13 belongs to no index.
"""

from contextlib import suppress

from kvviz.audit.budget import TooMuchWorkError, spend
from kvviz.audit.counting import count_solutions
from kvviz.audit.findings import Place
from kvviz.audit.view import View

MAX_STEPS = 100_000
"""Largest number of search steps of :func:`locate`. If it finds no element until then, the finding has no example."""

STEP_COST, PLACE_COST = 10, 100
"""Work of one search step, and work of making one :class:`Place`, in units of the work limit."""


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
    """Count the indices whose elements start at the same byte in both views. The views must have equal shapes.

    The function counts the solutions i of ``view.start_of(i) == rightful.start_of(i)``. This is a linear equation. Its
    coefficients are the differences of the strides, and its target is the difference of the offsets.
    """
    dims = [
        (step * view.itemsize - rightful_step * rightful.itemsize, size)
        for step, rightful_step, size in zip(view.stride, rightful.stride, view.shape, strict=True)
    ]
    return count_solutions(dims, rightful.offset * rightful.itemsize - view.offset * view.itemsize)


def first_wrong(view: View, rightful: View) -> tuple[int, ...] | None:
    """Return the index of the lowest element of ``view`` that starts at another byte in ``rightful``, or None.

    First look at the lowest element of the view. If it starts at another byte, it is the answer. Otherwise, a step
    along an axis with equal strides in both views never leads to a wrong element. A step along an axis with different
    strides leads to a wrong element at once. Of these axes, the axis with the smallest stride gives the answer.
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
    """Return the index of an element that covers ``byte``, or None. If several elements do, return the first index.

    The result is also None if the search takes more than :data:`MAX_STEPS` steps, or reaches the work limit.
    """
    start, stop = view.span_bytes
    if view.num_elements == 0 or not start <= byte < stop:
        return None
    axes = list(range(len(view.shape)))
    if view.nested:  # only one element can cover the byte. With large strides first, an axis has one possible index
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
    """Return indices of an element that covers a byte, or None.

    The byte lies ``distance`` bytes after the start of element (0, ..., 0). Indices are chosen axis by axis, depth
    first. The axes from k on can reach a distance from ``lows[k]`` to ``highs[k]``. If an index leaves a distance
    outside this range, it cannot lead to a solution and is not tried.

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
        for i in range(last, first - 1, -1):  # the first index is pushed last, so it is tried first
            stack.append((axis + 1, left - i * step, [*chosen, i]))
    return None
