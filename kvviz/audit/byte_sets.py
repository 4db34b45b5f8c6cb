"""Exact arithmetic on strided byte sets, without listing addresses block by block.

A view's bytes repeat: one block's pattern of runs, shifted by the block stride. So several views over one storage
are cut into *periods* (the least common multiple of their block strides); where the same views are fully active,
every period looks the same, and one sweep over one period, times the number of periods, counts them all. The work
depends on the runs of a few periods, not on the number of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kvviz.audit.view import View

BUDGET = 4_000_000
"""Runs that a set of views may expand to before :class:`TooMuchWorkError` is raised."""

FEW_RUNS = 1 << 14
"""Runs of one repetition that are no burden, and runs of all views that need no period."""


MAX_LANES = 4096
"""Parts that a view which meets itself may be cut into."""

Dims = list[tuple[int, int]]
"""``(step in bytes, size)`` of each dim, the innermost first."""


class TooMuchWorkError(ValueError):
    """The strides drift so that counting would exceed the stated budget of work."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """``count`` copies, ``step`` bytes apart from ``base`` on, of runs ``[starts, starts + width)``.

    ``starts`` is sorted and begins at 0.
    """

    base: int
    step: int
    count: int
    starts: np.ndarray
    width: int

    @property
    def span(self) -> int:
        """Bytes from a copy's first to its last."""
        return int(self.starts[-1]) + self.width

    @property
    def stop(self) -> int:
        """One past the last byte of the last copy."""
        return self.base + (self.count - 1) * self.step + self.span


Lane = list[Pattern]
"""Bytes of a view in which no byte occurs twice."""


def interval(start: int, stop: int) -> Lane:
    """All bytes of ``[start, stop)``."""
    size = stop - start
    return [Pattern(start, size, 1, np.zeros(1, np.int64), size)] if size > 0 else []


def normal_dims(view: View) -> tuple[int, Dims]:
    """First byte and dims of a view with positive steps, sorted; dims of size 1 and of stride 0 are left out."""
    start, dims = view.offset * view.itemsize, []
    for step, size in zip(view.stride, view.shape, strict=True):
        if size > 1 and step:
            start += min(step, 0) * (size - 1) * view.itemsize
            dims.append((abs(step) * view.itemsize, size))
    return start, sorted(dims)


def byte_lanes(view: View) -> list[Lane]:
    """All bytes of all elements: one lane, or several where indices of the view meet on a byte.

    Raises:
        TooMuchWorkError: more than :data:`MAX_LANES` lanes or :data:`BUDGET` runs.
    """
    return _lanes(view, view.itemsize, {})


def start_lanes(view: View) -> list[Lane]:
    """The first byte of each element, likewise."""
    return _lanes(view, 1, {})


def all_byte_lanes(views: Sequence[View]) -> list[list[Lane]]:
    """:func:`byte_lanes` of each view; what views of one form have in common is worked out once."""
    forms: dict[tuple, list[Lane]] = {}
    return [_lanes(view, view.itemsize, forms) for view in views]


def _lanes(view: View, width: int, forms: dict[tuple, list[Lane]]) -> list[Lane]:
    if view.num_elements == 0:
        return []
    start, dims = normal_dims(view)
    repeats = prod(size for step, size in zip(view.stride, view.shape, strict=True) if step == 0)
    key = (tuple(dims), width, repeats)
    if key not in forms:
        forms[key] = _form(dims, width, repeats, view.name)
    return [[Pattern(start + p.base, p.step, p.count, p.starts, p.width) for p in lane] for lane in forms[key]]


def _form(dims: Dims, width: int, repeats: int, name: str) -> list[Lane]:
    """The lanes of elements ``width`` bytes wide whose first one starts at byte 0."""
    if repeats > MAX_LANES:
        raise TooMuchWorkError(f"{name} repeats each element {repeats} times, more than {MAX_LANES}")
    parts = nested_parts(dims, width, name, MAX_LANES // repeats)
    return [_patterns(begin, nested, width, name) for begin, nested in parts] * repeats


def nested_parts(dims: Dims, width: int, name: str, most: int = MAX_LANES) -> list[tuple[int, Dims]]:
    """Dims cut into nested ones, each with its first byte: in none of them two elements of ``width`` bytes meet.

    Raises:
        TooMuchWorkError: more than ``most`` parts.
    """
    cut: list[tuple[int, Dims]] = [(0, [])]
    for dim in dims:
        begun, cut = cut, []
        for part in begun:
            cut += _add_dim(*part, dim, width)
            if len(cut) > most:
                raise TooMuchWorkError(f"{name} meets itself in more than {MAX_LANES} ways")
    return cut


def _add_dim(start: int, dims: Dims, dim: tuple[int, int], width: int) -> list[tuple[int, Dims]]:
    """Put a dim around nested ones; where its step is too short for them, every m-th index makes a lane of its own."""
    step, size = dim
    reach = sum((n - 1) * s for s, n in dims) + width
    parts = min(-(-reach // step), size)
    sizes = [-(-(size - j) // parts) for j in range(parts)]
    return [(start + j * step, [*dims, (parts * step, n)] if n > 1 else dims) for j, n in enumerate(sizes)]


def _patterns(start: int, dims: Dims, width: int, name: str) -> Lane:
    """Nested dims as patterns: one dim repeats, what lies outside it is unrolled, what lies inside becomes runs.

    The outermost dim repeats that leaves few runs; where none does, the longest.
    """
    merged: Dims = [(1, width)]
    for step, size in dims:
        inner, count = merged[-1]
        if step == inner * count:
            merged[-1] = (inner, count * size)
        else:
            merged.append((step, size))
    width, rest = merged[0][1], merged[1:]
    if not rest:
        return interval(start, start + width)
    total = prod(size for _, size in rest)
    few = [i for i, (_, size) in enumerate(rest) if total // size <= FEW_RUNS]
    chosen = few[-1] if few else max(range(len(rest)), key=lambda i: rest[i][1])
    step, count = rest[chosen]
    inner, outer = rest[:chosen], rest[chosen + 1 :]
    if prod(size for _, size in (*inner, *outer)) > BUDGET:
        raise TooMuchWorkError(f"{name}: its dims {rest} give more than {BUDGET} runs a period")
    starts = _sums(inner)
    return [Pattern(start + shift, step, count, starts, width) for shift in _sums(outer).tolist()]


def _sums(dims: Dims) -> np.ndarray:
    """All sums of one multiple of each step, sorted."""
    total = np.zeros(1, np.int64)
    for step, size in dims:
        total = (total[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return np.sort(total)
