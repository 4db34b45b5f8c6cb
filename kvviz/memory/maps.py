"""Exact arithmetic on index maps: which element covers a byte, and where two maps agree.

Everything is solved, not listed: the work does not grow with the number of blocks.
"""

from collections.abc import Sequence
from math import gcd, prod

import numpy as np

from kvviz.memory.extents import BUDGET, TooMuchWorkError
from kvviz.memory.view import View

MAX_STEPS = 100_000
"""Steps that looking for an element may take."""

Dim = tuple[int, int]
"""A coefficient in bytes and how many values its index takes."""


def count_solutions(dims: Sequence[Dim], target: int, budget: int = BUDGET) -> int:
    """Number of index tuples with ``sum(c * i) == target`` and ``0 <= i < n`` for each dim ``(c, n)``.

    Free dims multiply, the two longest are solved in closed form, the others are listed.

    Raises:
        TooMuchWorkError: more than ``budget`` tuples of the others.
    """
    if any(size == 0 for _, size in dims):
        return 0
    free = prod(size for step, size in dims if step == 0)
    bound = sorted(((step, size) for step, size in dims if step and size > 1), key=lambda dim: dim[1])
    if not bound:
        return free if target == 0 else 0
    listed, (first, second) = bound[:-2], (bound[-1], bound[-2] if len(bound) > 1 else (0, 1))
    if prod(size for _, size in listed) > budget:
        raise TooMuchWorkError(f"an equation over {len(bound)} dims needs more than {budget} cases")
    rest = np.array([target], dtype=np.int64)
    for step, size in listed:
        rest = (rest[:, None] - np.arange(size, dtype=np.int64) * step).ravel()
    return free * int(_pairs(rest, first, second).sum())


def _pairs(target: np.ndarray, first: Dim, second: Dim) -> np.ndarray:
    """For each target the number of (x, y) with ``c * x + d * y == target`` in the two ranges."""
    (c, n), (d, m) = first, second
    if c < 0:
        target, c = target - (n - 1) * c, -c
    if d == 0:
        x, left = np.divmod(target, c)
        return ((left == 0) & (x >= 0) & (x < n)).astype(np.int64)
    if d > 0:
        target, d = target - (m - 1) * d, -d
    grain = gcd(c, d)
    a, b = c // grain, -d // grain
    if a * b >= 1 << 62:
        raise TooMuchWorkError(f"steps of {c} and {d} bytes are too long to be solved")
    whole = target // grain
    x = whole % b * pow(a, -1, b) % b if b > 1 else np.zeros_like(whole)
    y = (x * a - whole) // b
    lower = np.maximum(0, -(y // a))
    upper = np.minimum((n - 1 - x) // b, (m - 1 - y) // a)
    return np.where(target % grain == 0, np.maximum(upper - lower + 1, 0), 0)


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
