"""Counts the solutions of a linear equation with bounded indices, without listing the solutions.

Example: how many pairs (i, j) with 0 <= i < 6 and 0 <= j < 4 give 3 * i + 5 * j == 15? Two: (5, 0) and (0, 3). The
coefficients of an audit are strides in bytes, and an equation says that two elements have the same address.

All counts are exact. If every number fits in 64 bits, numpy calculates. Otherwise Python integers do. A *case* is one
combination of the indices that are listed one by one. A *dim* is a coefficient and the size of its index.
"""

from collections.abc import Iterator, Sequence
from math import gcd, prod

import numpy as np

from kvviz.audit.budget import TooMuchWorkError, spend
from kvviz.audit.byte_sets import BUDGET

SAFE = 1 << 62
"""Numbers below this can be added and subtracted in 64 bits without overflow."""

CHUNK = 1 << 16
"""Number of cases that are in memory at the same time."""

PYTHON_COST = 16
"""Work of a case with Python integers. The work of a case with 64-bit integers is 1."""

STEP_COST = 32
"""Work of one step in Python, in cases."""

CALL_COST = 500
"""Work of one call, in addition to its cases. The unit is one case."""

Dim = tuple[int, int]
"""A coefficient, in bytes, and the number n of values of its index: 0, 1, ..., n - 1."""


def count_solutions(dims: Sequence[Dim], target: int, budget: int = BUDGET) -> int:
    """Count the indices with ``sum(c * i) == target`` and ``0 <= i < n``, for dims ``(c, n)``.

    Example: ``count_solutions([(3, 6), (5, 4)], 15)`` is 2, see the example of the module.

    The indices of all dims but the two largest are listed. For each case, :func:`pair_solutions` solves the equation
    for the two largest dims. An index with coefficient 0 can have any value. So it multiplies the count by its size.

    Raises:
        TooMuchWorkError: there are more than ``budget`` cases.
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
    # pair_solutions wants c > 0 and d < 0. To change the sign of a coefficient, count its index downwards: i becomes
    # n - 1 - i.
    if c < 0:
        target, c = target - (n - 1) * c, -c
    if d > 0:
        target, d = target - (m - 1) * d, -d
    kind = _integer_type(2 * (high - low) + c - d, c, -d)
    work = prod(size for _, size in listed) * (PYTHON_COST if kind is object else 1)
    if work > budget:
        raise TooMuchWorkError(
            f"comparing two views with {len(bound)} different strides needs more than {budget} cases, which is the "
            f"work limit; compare fewer indices at once"
        )
    spend(CALL_COST + work)
    found = 0
    for targets in _differences(target, listed, kind):  # for each case: the sum that the two largest dims must give
        found += int(pair_solutions(targets, (c, n), (-d, m)).sum())
    return free * found


def _differences(target: int, dims: Sequence[Dim], kind: type, modulus: int = 0) -> Iterator[np.ndarray]:
    """Yield ``target - sum(c * i)`` for all indices of the dims, :data:`CHUNK` values at a time.

    Args:
        kind: the type of the values: np.int64 or object.
        modulus: if it is not 0, the values are remainders of the division by it.
    """
    total = prod(size for _, size in dims)
    for first in range(0, total, CHUNK):
        number = np.arange(first, min(first + CHUNK, total))
        values = np.full(len(number), target, kind)
        for step, size in dims:
            number, index = np.divmod(number, size)
            values = values - index.astype(kind) * step
            values = values % modulus if modulus else values
        yield values


def pair_solutions(target: np.ndarray, first: Dim, second: Dim) -> np.ndarray:
    """For each target count the pairs (x, y) with ``c * x - d * y == target``, ``0 <= x < n`` and ``0 <= y < m``.

    Both coefficients, c of ``first`` and d of ``second``, are positive.

    Example: ``6 * x - 4 * y == 2``. Divide by gcd(6, 4) = 2: ``3 * x - 2 * y == 1``. So ``3 * x`` divided by 2 must
    leave the remainder 1. The smallest x with this remainder is 1, and then y is 1. Each further solution adds 2 to x
    and 3 to y: (1, 1), (3, 4), (5, 7), ... With x < 6 and y < 5 there are two solutions, (1, 1) and (3, 4).
    There is no solution if the gcd does not divide the target.
    """
    (c, n), (d, m) = first, second
    divisor = gcd(c, d)
    a, b = c // divisor, d // divisor
    largest = max(abs(int(target.max())), abs(int(target.min()))) if target.size else 0
    target = target.astype(_integer_type(largest + n + m, c, d))
    whole = target // divisor
    # The smallest x >= 0 for which a * x - whole is a multiple of b; pow(a, -1, b) is the inverse of a modulo b.
    x = whole % b * pow(a, -1, b) % b if b > 1 else whole * 0
    y = (x * a - whole) // b
    # All solutions are (x + k * b, y + k * a). Both bounds of both indices limit k.
    lowest_k = np.maximum(0, -(y // a))
    highest_k = np.minimum((n - 1 - x) // b, (m - 1 - y) // a)
    return np.where(target % divisor == 0, np.maximum(highest_k - lowest_k + 1, 0), 0)


def _integer_type(largest: int, c: int, d: int) -> type:
    """Return int64 if the equation with coefficients c and d fits in 64 bits. Otherwise return object: Python integers.

    pair_solutions multiplies numbers below a and b, so the product of a and b must fit as well.
    """
    return np.int64 if largest < SAFE and max(c, d) // gcd(c, d) * (d // gcd(c, d)) < SAFE else object


def count_congruent(dims: Sequence[Dim], target: int, modulus: int, budget: int = BUDGET) -> int:
    """Count the indices with ``sum(c * i) % modulus == target % modulus``, for dims ``(c, n)``.

    Example: ``count_congruent([(4, 10)], 0, 6)``. The remainders of 4 * i are 0, 4, 2, 0, 4, 2, 0, 4, 2, 0: they
    repeat after a cycle of 6 / gcd(4, 6) = 3 indices. Each of the three whole cycles has one remainder 0. One index is
    left, and its remainder is 0 too. The count is 4.

    Raises:
        TooMuchWorkError: there are more than ``budget`` cases.
    """
    dims = [(step % modulus, size) for step, size in dims]
    free = prod(size for step, size in dims if step == 0)
    bound = sorted(((step, size) for step, size in dims if step), key=lambda dim: gcd(dim[0], modulus))
    return free and free * _count_cycles(bound, [], target % modulus, modulus, budget)


def _count_cycles(dims: Sequence[Dim], short: Sequence[Dim], target: int, modulus: int, budget: int) -> int:
    """Count the solutions over ``dims`` and ``short`` together. A dim of ``short`` is shorter than one cycle.

    The first dim has coefficient c. Let g be gcd(c, modulus). In one cycle, each multiple of g occurs exactly once as
    the remainder of ``c * i``. Take any indices of the other dims. If they solve the equation modulo g, exactly one
    index of the cycle completes a solution. If they do not, no index does. So count the solutions of the other dims
    modulo g, and multiply by the number of whole cycles. The indices after the last whole cycle have the same
    remainders as the first indices of a cycle. They become a short dim.
    """
    spend(STEP_COST)
    if not dims:
        return _count_short(short, target, modulus, budget)
    (step, size), *others = dims
    divisor = gcd(step, modulus)
    cycles, left = divmod(size, modulus // divisor)
    count = cycles and cycles * count_congruent([*others, *short], target, divisor, budget)
    return count + (_count_cycles(others, [*short, (step, left)], target, modulus, budget) if left else 0)


def _count_short(dims: Sequence[Dim], target: int, modulus: int, budget: int) -> int:
    """Count the solutions over dims that are shorter than one cycle. List all dims but the longest, and solve for it.

    The equation ``c * x == remainder`` modulo ``modulus`` has at most one solution x in a cycle. Let g be
    gcd(c, modulus). If g divides the remainder, x is ``remainder / g`` times the inverse of ``c / g``, modulo
    ``modulus / g``. Otherwise there is no solution.

    Example: ``4 * x == 2`` modulo 6. Here g is 2, and dividing by 2 gives ``2 * x == 1`` modulo 3. The inverse of 2
    modulo 3 is 2, so x is 2: ``4 * 2 == 8``, which leaves the remainder 2.
    """
    dims = sorted((dim for dim in dims if dim[1] > 1), key=lambda dim: dim[1])
    if not dims:
        return int(target % modulus == 0)
    *listed, (step, size) = dims
    kind = np.int64 if modulus * modulus < SAFE else object
    work = prod(n for _, n in listed) * (PYTHON_COST if kind is object else 1)
    if work > budget:
        raise TooMuchWorkError(
            f"remainders modulo {modulus} over {len(dims)} strides need more than {budget} cases, which is the "
            f"work limit; check fewer indices of the view at once"
        )
    spend(CALL_COST + work)
    divisor = gcd(step, modulus)
    cycle, found = modulus // divisor, 0
    for remainders in _differences(target % modulus, listed, kind, modulus):
        x = remainders // divisor * pow(step // divisor, -1, cycle) % cycle
        found += int(((remainders % divisor == 0) & (x < size)).sum())
    return found
