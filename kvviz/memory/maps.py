"""Exact arithmetic on index maps: which element covers a byte, and where two maps agree.

Everything is solved, not listed: the work does not grow with the number of blocks.
"""

from collections.abc import Sequence
from math import gcd, prod

import numpy as np

from kvviz.memory.extents import BUDGET, TooMuchWorkError
from kvviz.memory.view import View

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
    """Coordinates of an element of ``view`` that covers ``byte``, the lexicographically simplest, or None."""
    if view.num_elements == 0:
        return None
    start, dims = view.offset * view.itemsize, []
    for axis, (step, size) in enumerate(zip(view.stride, view.shape, strict=True)):
        step *= view.itemsize
        start += min(step, 0) * (size - 1)
        if size > 1 and step:
            dims.append((abs(step), size, axis, step < 0))
    dims.sort(reverse=True)
    reach = [view.itemsize - 1]
    for step, size, _, _ in reversed(dims):
        reach.append(reach[-1] + step * (size - 1))
    found = _descend(dims, reach[::-1], byte - start)
    if found is None:
        return None
    index = [0] * len(view.shape)
    for (_, size, axis, flipped), i in zip(dims, found, strict=True):
        index[axis] = size - 1 - i if flipped else i
    for axis, (step, size) in enumerate(zip(view.stride, view.shape, strict=True)):
        if step < 0 and size == 1:
            index[axis] = 0
    return tuple(index)


def _descend(dims: Sequence[tuple[int, int, int, bool]], reach: Sequence[int], rest: int) -> list[int] | None:
    """Indices for ``rest`` bytes from the outermost dim on; ``reach[k]`` is how far dims k, k + 1, ... can go."""
    if not 0 <= rest <= reach[0]:
        return None
    if not dims:
        return []
    step, size = dims[0][:2]
    highest = min(rest // step, size - 1)
    lowest = max(-(-(rest - reach[1]) // step), 0)
    for i in range(highest, lowest - 1, -1):
        inner = _descend(dims[1:], reach[1:], rest - i * step)
        if inner is not None:
            return [i, *inner]
    return None
