"""Linear equations over boxes of indices, counted exactly: no solution is listed.

An index tuple takes a value ``sum(c * i)``. Counted is how often that is a number, or a residue. Numbers are 64-bit
integers where all that occur fit, and Python's own where they might not.
"""

from collections.abc import Sequence
from math import gcd, prod

import numpy as np

from kvviz.audit.byte_sets import BUDGET, TooMuchWorkError
from kvviz.audit.view import View

SAFE = 1 << 62
"""Numbers below this are added and subtracted in 64 bits."""

SLOW = 16
"""What a case in Python's own integers counts for, against one in 64 bits."""

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
    low = sum(min(step, 0) * (size - 1) for step, size in bound)
    high = sum(max(step, 0) * (size - 1) for step, size in bound)
    if not low <= target <= high:
        return 0
    if not bound:
        return free
    listed, ((c, n), (d, m)) = bound[:-2], (bound[-1], bound[-2] if len(bound) > 1 else (1, 1))
    if c < 0:
        target, c = target - (n - 1) * c, -c
    if d > 0:
        target, d = target - (m - 1) * d, -d
    kind = _kind(2 * (high - low) + c - d, c, -d)
    if prod(size for _, size in listed) * (SLOW if kind is object else 1) > budget:
        raise TooMuchWorkError(f"an equation over {len(bound)} dims needs more than {budget} cases")
    rest = np.array([target], kind)
    for step, size in listed:
        rest = (rest[:, None] - np.arange(size, dtype=kind) * step).ravel()
    return free * int(pair_solutions(rest, (c, n), (-d, m)).sum())


def pair_solutions(target: np.ndarray, first: Dim, second: Dim) -> np.ndarray:
    """For each target the number of (x, y) with ``c * x - d * y == target``; c and d are positive."""
    (c, n), (d, m) = first, second
    grain = gcd(c, d)
    a, b = c // grain, d // grain
    largest = max(abs(int(target.max())), abs(int(target.min()))) if target.size else 0
    target = target.astype(_kind(largest + n + m, c, d))
    whole = target // grain
    x = whole % b * pow(a, -1, b) % b if b > 1 else whole * 0
    y = (x * a - whole) // b
    lower = np.maximum(0, -(y // a))
    upper = np.minimum((n - 1 - x) // b, (m - 1 - y) // a)
    return np.where(target % grain == 0, np.maximum(upper - lower + 1, 0), 0)


def _kind(largest: int, c: int, d: int) -> type:
    """The integers in which an equation with coefficients c and d is solved: products of residues must fit."""
    return np.int64 if largest < SAFE and max(c, d) // gcd(c, d) * (d // gcd(c, d)) < SAFE else object


def count_congruent(dims: Sequence[Dim], target: int, modulus: int, budget: int = BUDGET) -> int:
    """Number of index tuples with ``sum(c * i) % modulus == target % modulus``.

    An index that runs through whole cycles of residues leaves a question modulo a divisor; of what remains behind
    the cycles the longest dim is solved and the others are listed.

    Raises:
        TooMuchWorkError: more than ``budget`` tuples of the others.
    """
    dims = [(step % modulus, size) for step, size in dims]
    free = prod(size for step, size in dims if step == 0)
    bound = sorted(((step, size) for step, size in dims if step), key=lambda dim: gcd(dim[0], modulus))
    return free and free * _congruent(bound, [], target % modulus, modulus, budget)


def _congruent(dims: Sequence[Dim], short: Sequence[Dim], target: int, modulus: int, budget: int) -> int:
    """Tuples over dims and over ``short`` ones, whose indices do not come round."""
    if not dims:
        return _congruent_short(short, target, modulus, budget)
    (step, size), *others = dims
    grain = gcd(step, modulus)
    whole, rest = divmod(size, modulus // grain)
    count = whole and whole * count_congruent([*others, *short], target, grain, budget)
    return count + (_congruent(others, [*short, (step, rest)], target, modulus, budget) if rest else 0)


def _congruent_short(dims: Sequence[Dim], target: int, modulus: int, budget: int) -> int:
    dims = sorted((dim for dim in dims if dim[1] > 1), key=lambda dim: dim[1])
    if not dims:
        return int(target % modulus == 0)
    *listed, (step, size) = dims
    kind = np.int64 if modulus * modulus < SAFE else object
    rest = np.array([target % modulus], kind)
    for c, n in listed:
        if len(rest) * n * (SLOW if kind is object else 1) > budget:
            raise TooMuchWorkError(f"residues modulo {modulus} over {len(dims)} dims need more than {budget} cases")
        rest = (rest[:, None] - np.arange(n, dtype=kind) * c).ravel() % modulus
    grain = gcd(step, modulus)
    cycle = modulus // grain
    x = rest // grain * pow(step // grain, -1, cycle) % cycle
    return int(((rest % grain == 0) & (x < size)).sum())


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
