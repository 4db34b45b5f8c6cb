"""A whole storage, however large, in a few hundred columns: how many bytes of each are owned and written, exactly.

Nothing is drawn byte by byte: how many of a view's bytes lie below an address is counted from its strides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvviz.audit.byte_sets import Lane, Pattern, TooMuchWorkError, byte_lanes
from kvviz.audit.view import View
from kvviz.show.byte_map import ByteMap
from kvviz.show.describe import hue_key

COLUMNS = 200


@dataclass(frozen=True)
class Column:
    """Bytes ``[start, stop)`` of a storage.

    Attributes:
        owned: how many of them owners claim, a byte of two owners twice.
        written: the same of writers. More written than owned bytes: some are written more than once.
        most: the owner of the most of them, or nothing where nobody owns any.
        shared: whether other owners have at least a fifth as many.
    """

    start: int
    stop: int
    owned: int
    written: int
    most: str
    shared: bool


def overview(record: ByteMap, columns: int = COLUMNS) -> tuple[Column, ...]:
    """The storage of a map in at most ``columns`` columns; empty where views meet themselves in too many ways."""
    size = record.storage.nbytes
    count = min(columns, size)
    edges = np.asarray([size * n // count for n in range(count + 1)], np.int64)
    try:
        owned, written = (_by_view(views, edges) for views in (record.owners, record.writers))
    except TooMuchWorkError:
        return ()
    layers = np.asarray([str(hue_key(view.name)) for view in record.owners])
    made = []
    for n, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        mine, most, shared = owned[:, n], "", False
        if mine.any():
            first = int(mine.argmax())
            most, shared = record.owners[first].name, bool(5 * mine[layers != layers[first]].sum() >= mine[first])
        made.append(Column(start, stop, int(mine.sum()), int(written[:, n].sum()), most, shared))
    return tuple(made)


def _by_view(views: Sequence[View], edges: np.ndarray) -> np.ndarray:
    """Bytes that each view claims between the edges: ``(views, columns)``."""
    below = [sum((_below(lane, edges) for lane in byte_lanes(view)), np.zeros_like(edges)) for view in views]
    return np.diff(np.asarray(below, np.int64).reshape(len(views), len(edges)), axis=1)


def _below(lane: Lane, edges: np.ndarray) -> np.ndarray:
    return sum((_pattern_below(pattern, edges) for pattern in lane), np.zeros_like(edges))


def _pattern_below(p: Pattern, edges: np.ndarray) -> np.ndarray:
    """Bytes of a pattern below each edge. Copies may interlock: those that an edge cuts are taken one by one."""
    interlocked = -(-p.span // p.step) if p.count > 1 else 1
    whole = np.clip((edges - p.base - p.span) // p.step + 1, 0, p.count)
    total = whole * (len(p.starts) * p.width)
    for ahead in range(interlocked):
        copy = whole + ahead
        rest = edges - p.base - copy * p.step
        runs = np.searchsorted(p.starts, rest)
        last = np.clip(rest - p.starts[np.maximum(runs - 1, 0)], 0, p.width)
        part = np.where(runs > 0, (runs - 1) * p.width + last, 0)
        total += np.where(copy < p.count, part, 0)
    return total
