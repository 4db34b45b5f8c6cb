"""Exact arithmetic on index maps: which element covers a byte, and where two maps agree.

Everything is solved, not listed: the work does not grow with the number of blocks.
"""

from kvviz.memory.equations import count_solutions
from kvviz.memory.view import View

MAX_STEPS = 100_000
"""Steps that looking for an element may take."""


def same_places(view: View, rightful: View) -> int:
    """Number of index tuples at which both views (of one shape) have their element at the same byte."""
    dims = [
        (ours * view.itemsize - theirs * rightful.itemsize, size)
        for ours, theirs, size in zip(view.stride, rightful.stride, view.shape, strict=True)
    ]
    return count_solutions(dims, rightful.offset * rightful.itemsize - view.offset * view.itemsize)


def first_wrong(view: View, rightful: View) -> tuple[int, ...] | None:
    """The element of ``view`` with the lowest address that is not where ``rightful`` has it, or None.

    Either the lowest element itself is wrong; or it is right, and then so is everything reached from it along
    dims whose strides agree, so that the lowest wrong one is a single step along another dim.
    """
    if view.num_elements == 0:
        return None
    lowest = tuple(size - 1 if step < 0 else 0 for step, size in zip(view.stride, view.shape, strict=True))
    if view.start_of(lowest) != rightful.start_of(lowest):
        return lowest
    steps = [
        (abs(ours), axis)
        for axis, (ours, theirs, size) in enumerate(zip(view.stride, rightful.stride, view.shape, strict=True))
        if size > 1 and ours * view.itemsize != theirs * rightful.itemsize
    ]
    if not steps:
        return None
    _, axis = min(steps)
    return tuple(i + (1 if i == 0 else -1) if a == axis else i for a, i in enumerate(lowest))


def locate(view: View, byte: int) -> tuple[int, ...] | None:
    """Coordinates of the element of ``view`` that covers ``byte``, the first in index order, or None.

    Where indices of a view meet, the search is broken off after :data:`MAX_STEPS` steps with any that was found.
    """
    start, stop = view.span_bytes
    if view.num_elements == 0 or not start <= byte < stop:
        return None
    axes = list(range(len(view.shape)))
    if view.nested:  # only one can cover it: outermost first, every choice is forced
        axes.sort(key=lambda axis: -abs(view.stride[axis]) if view.shape[axis] > 1 else 1)
    steps = [view.stride[axis] * view.itemsize for axis in axes]
    sizes = [view.shape[axis] for axis in axes]
    low, high = [0], [view.itemsize - 1]
    for step, size in zip(reversed(steps), reversed(sizes), strict=True):
        low.append(low[-1] + min(step, 0) * (size - 1))
        high.append(high[-1] + max(step, 0) * (size - 1))
    found = _descend(steps, sizes, low[::-1], high[::-1], byte - view.offset * view.itemsize)
    if found is None:
        return None
    index = [0] * len(axes)
    for axis, i in zip(axes, found, strict=True):
        index[axis] = i
    return tuple(index)


def _descend(steps: list[int], sizes: list[int], low: list[int], high: list[int], rest: int) -> list[int] | None:
    """Indices that make up ``rest`` bytes; what axes k, k + 1, ... can add lies in ``[low[k], high[k]]``."""
    stack, tried = [(0, rest, [])] if low[0] <= rest <= high[0] else [], 0
    while stack and tried < MAX_STEPS:
        depth, rest, chosen = stack.pop()
        tried += 1
        if depth == len(steps):
            return chosen
        step, size = steps[depth], sizes[depth]
        first, last = 0, size - 1
        if step:
            ends = sorted(((rest - high[depth + 1]) / step, (rest - low[depth + 1]) / step))
            first, last = max(0, int(ends[0]) - 1), min(size - 1, int(ends[1]) + 1)
        for i in range(min(last, first + MAX_STEPS), first - 1, -1):
            if low[depth + 1] <= rest - i * step <= high[depth + 1]:
                stack.append((depth + 1, rest - i * step, [*chosen, i]))
    return None
