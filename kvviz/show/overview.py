"""Computes the strip under an interactive map. The strip shows a whole storage, of any size, in at most 200 columns.

For each column, the strip knows exactly how many bytes are owned and how many bytes are written. These counts are
computed from the strides of the views. So a storage of 40 GiB takes no longer than a small storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvviz.audit.budget import TooMuchWorkError
from kvviz.audit.byte_sets import ByteSet, Pattern, byte_sets
from kvviz.audit.view import View
from kvviz.show.byte_map import ByteMap
from kvviz.show.describe import hue_key

COLUMNS = 200
"""Columns of an overview. A strip on a screen is 500 to 1000 pixels wide, so a column has at least two pixels."""


@dataclass(frozen=True)
class Column:
    """Bytes ``[start, stop)`` of a storage.

    Attributes:
        owned: number of bytes with an owner. A byte with two owners counts twice.
        written: number of bytes with a writer. A byte with two writers counts twice. If ``written`` is larger than
            ``owned``, several views write the same byte.
        most: name of the view that owns most bytes of the column, or "" if no byte has an owner.
        shared: True if all views of other layers together own at least a fifth of the bytes that ``most`` owns.
    """

    start: int
    stop: int
    owned: int
    written: int
    most: str
    shared: bool


def overview(record: ByteMap, columns: int = COLUMNS) -> tuple[Column, ...]:
    """Divide the storage of a map into at most ``columns`` columns, and count the bytes of each column.

    If the strides of a view are too irregular to count its bytes within the work limit, return an empty tuple.
    """
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
    """Count the bytes of each view between neighbouring edges. Return an int64 array of shape (views, columns)."""
    below = [sum((_below(byte_set, edges) for byte_set in byte_sets(view)), np.zeros_like(edges)) for view in views]
    return np.diff(np.asarray(below, np.int64).reshape(len(views), len(edges)), axis=1)


def _below(byte_set: ByteSet, edges: np.ndarray) -> np.ndarray:
    return sum((_pattern_below(pattern, edges) for pattern in byte_set), np.zeros_like(edges))


def _pattern_below(p: Pattern, edges: np.ndarray) -> np.ndarray:
    """Count the bytes of a pattern below each edge.

    A pattern consists of copies that start every ``step`` bytes. A copy that ends below the edge counts in full. A copy
    can be longer than ``step``, so one edge can cut several copies. Their bytes are counted one copy after the other.
    """
    interlocked = -(-p.span // p.step) if p.count > 1 else 1
    whole = np.clip((edges - p.base - p.span) // p.step + 1, 0, p.count)
    total = whole * (len(p.starts) * p.width)
    for ahead in range(interlocked):
        copy = whole + ahead
        rest = edges - p.base - copy * p.step
        pieces = np.searchsorted(p.starts, rest)
        last = np.clip(rest - p.starts[np.maximum(pieces - 1, 0)], 0, p.width)
        part = np.where(pieces > 0, (pieces - 1) * p.width + last, 0)
        total += np.where(copy < p.count, part, 0)
    return total
