"""Views whose strides drift: no period is short enough for a sweep, so each pair is solved by itself."""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import gcd

import numpy as np

from kvviz.memory.equations import pair_solutions
from kvviz.memory.extents import BUDGET, VISIT, Pattern, TooMuchWorkError, byte_lanes
from kvviz.memory.finding import Finding
from kvviz.memory.view import View

NOT_COUNTED = "they overlap; the strides drift so that the bytes were not counted within the budget"
NOT_DECIDED = "they may overlap; the strides drift so that neither that nor the bytes were settled within the budget"
PAIR_BUDGET = 20_000_000
"""Pairs of runs and distances that one claim may solve where strides drift."""

PAIR_COST = 5_000
"""Pairs of runs that looking at a pair of views counts for."""

MAX_PAIRS = 8_192
"""Pairs of views that one claim takes one by one."""

NOT_TAKEN = f"not judged: the strides drift, the first {MAX_PAIRS} pairs of views were taken one by one"

EASY, HARD, HARD_PAIRS = 1 << 6, 1 << 14, 64
"""Candidates that numpy tries to settle whether two views meet, and for how many pairs it may try the more."""


def drifting_bytes(a: Pattern, b: Pattern, budget: int = BUDGET) -> int:
    """Bytes that two patterns share, whatever their steps: closed form over pairs of runs.

    Two runs at a distance meet as often as ``a.step * x - b.step * y`` takes that value in the box of counts.

    Raises:
        TooMuchWorkError: more than ``budget`` pairs of runs and distances.
    """
    if a.stop <= b.base or b.stop <= a.base:
        return 0
    grain = gcd(a.step, b.step)
    pairs, reach = len(a.starts) * len(b.starts), -(-(a.width + b.width - 1) // grain)
    if pairs * reach > budget:
        raise TooMuchWorkError(f"{pairs} pairs of runs at {reach} distances exceed the budget of {budget}")
    distances = (a.base + a.starts)[:, None] - (b.base + b.starts)
    lowest = -a.width + 1 + (distances + a.width - 1) % grain
    meet = lowest[..., None] + np.arange(reach, dtype=np.int64) * grain
    shared = np.maximum(np.minimum(meet + a.width, b.width) - np.maximum(meet, 0), 0)
    target = meet - distances[..., None]
    return int((shared * pair_solutions(target, (a.step, a.count), (b.step, b.count))).sum())


def drifting_collisions(kinds: Sequence[Sequence[View]]) -> Iterator[Finding]:
    """Where strides drift: each pair of classes by itself, in closed form, or only yes or no past the budget.

    Views beyond :data:`MAX_PAIRS` pairs are told in one finding.
    """
    left, hard = PAIR_BUDGET, HARD_PAIRS
    for kind in kinds:
        if len(kind) > 1:
            yield Finding("collision", tuple(v.name for v in kind), kind[0].storage.name, None, _own_bytes(kind[0]))
    pairs, rest = _close_pairs([kind[0] for kind in kinds])
    ghosts = {number: np.asarray(_Ghost(kinds[number][0])) for number in sorted(set(chain(*pairs)))}
    for one, other in pairs:
        meet = _meet(ghosts[one], ghosts[other], EASY)
        if meet is None and hard:
            meet, hard = _meet(ghosts[one], ghosts[other], HARD), hard - 1
        if meet is False:
            continue
        bytes_, spent = _pair_bytes(kinds[one][0], kinds[other][0], left)
        left -= spent
        if meet and bytes_ == 0:  # numpy and the count contradict each other: say so rather than nothing
            bytes_ = None
        if bytes_ != 0:
            text = "" if bytes_ is not None else NOT_COUNTED if meet else NOT_DECIDED
            views = (*kinds[one], *kinds[other])
            yield Finding("collision", tuple(v.name for v in views), views[0].storage.name, None, bytes_, text=text)
    if rest:
        views = [view for number in rest for view in kinds[number]]
        text = f"{NOT_TAKEN}, and not these"
        yield Finding("collision", tuple(v.name for v in views), views[0].storage.name, None, None, text=text)


def _close_pairs(views: Sequence[View]) -> tuple[list[tuple[int, int]], list[int]]:
    """Numbers of views whose spans overlap, pair by pair, and the numbers of those left where they are too many."""
    order = sorted(range(len(views)), key=lambda number: views[number].span_bytes[0])
    lows = np.array([views[number].span_bytes[0] for number in order], np.int64)
    stops = np.searchsorted(lows, [views[number].span_bytes[1] for number in order])
    pairs: list[tuple[int, int]] = []
    rest: set[int] = set()
    for place, (number, stop) in enumerate(zip(order, stops.tolist(), strict=True)):
        others = order[place + 1 : stop]
        if len(pairs) + len(others) <= MAX_PAIRS and not rest:
            pairs += [(min(number, other), max(number, other)) for other in others]
        elif others:
            rest.update(order[place:])
            break
    return sorted(pairs), sorted(rest)


def _own_bytes(view: View) -> int | None:
    return view.num_elements * view.itemsize if view.nested else None


def _pair_bytes(a: View, b: View, budget: int) -> tuple[int | None, int]:
    """Bytes that two views share and the work that it took; None past the budget or where a view meets itself."""
    if not (a.nested and b.nested) or budget <= 0:
        return None, 0
    try:
        ours, theirs = byte_lanes(a)[0], byte_lanes(b)[0]
        runs = sum(len(p.starts) for p in ours) * sum(len(q.starts) for q in theirs)
        work = PAIR_COST + runs + len(ours) * len(theirs) * VISIT
        if work > budget:
            return None, PAIR_COST
        return sum(drifting_bytes(p, q) for p in ours for q in theirs), work
    except TooMuchWorkError:
        return None, PAIR_COST


class _Ghost:
    """An array that exists by its address alone; nobody reads it."""

    def __init__(self, view: View) -> None:
        strides = tuple(step * view.itemsize for step in view.stride)
        base = (1 << 40) + view.offset * view.itemsize
        self.__array_interface__ = {
            "version": 3, "shape": view.shape, "typestr": f"|V{view.itemsize}", "strides": strides, "data": (base, True)
        }  # fmt: skip


def _meet(a: np.ndarray, b: np.ndarray, work: int) -> bool | None:
    """Whether two ghosts share a byte, by numpy's bounded search; None where ``work`` candidates did not settle it."""
    try:
        return bool(np.shares_memory(a, b, max_work=work))
    except (np.exceptions.TooHardError, ValueError, OverflowError):
        return None
