"""Makes views of the blocks that a table selects, so that claims can be made about a block table or a ring buffer.

Example: a cache has 8 blocks, and the table of a request is ``[5, 6, 7, 0, -1]``. The result is two views, called
*pieces*: blocks 5 to 7, and block 0. The last entry of the table is a *hole*: no block belongs to it. A claim about the
table names all pieces, for example ``SameBytes(part=names of the pieces, whole="window")``.

A *run* is a range of entries of a table. In a run, all entries are holes, or the ids rise by equal steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvviz.audit.arguments import plain
from kvviz.audit.view import View

HOLE = -1
"""The number that a table has in a hole."""


def pieces(view: View, tables: Mapping[str, Sequence[int]]) -> dict[str, tuple[View, ...]]:
    """Return the pieces of each table. The ids of a table are indices of the first axis of ``view``.

    Each run of ids gives one piece: ``[0, 2, 4]`` is one view. Holes give no piece. The name of a piece is ``<table>
    <first entry>`` or ``<table> <first entry> to <last entry>``. All tables are cut at the same entries, so that two
    tables can be compared piece by piece.

    Raises:
        ValueError: the view has no axis, the tables differ in length, or an entry is neither -1 nor an index.
    """
    tables = {name: plain(list(table)) for name, table in tables.items()}
    if not view.shape:
        raise ValueError(f"{view.name} has no axis: a table selects entries of the first axis")
    lengths = {name: len(table) for name, table in tables.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"the tables differ in length: {', '.join(f'{n} has {k}' for n, k in lengths.items())} entries"
        )
    for name, table in tables.items():
        for entry, index in enumerate(table):
            if not (index == HOLE or 0 <= index < view.shape[0]):
                raise ValueError(
                    f"entry {entry} of {name} is {index}, but {view.name} has the entries 0 to {view.shape[0] - 1}: "
                    f'use the claim "maps", which reports such entries'
                )
    found: dict[str, list[View]] = {name: [] for name in tables}
    for first, stop in _runs(list(tables.values())):
        for name, table in tables.items():
            if table[first] != HOLE:
                found[name].append(_piece(view, name, table, first, stop))
    return {name: tuple(views) for name, views in found.items()}


def _runs(tables: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the first entry and the stop entry of each run. A run must be a run of every table."""
    runs, first = [], 0
    for stop in range(1, len(tables[0]) + 1) if tables else ():
        if stop == len(tables[0]) or any(_breaks(table, first, stop) for table in tables):
            runs.append((first, stop))
            first = stop
    return runs


def _breaks(table: Sequence[int], first: int, entry: int) -> bool:
    """Return True if an entry does not continue the run that starts at ``first``."""
    if HOLE in (table[first], table[entry]):
        return table[first] != table[entry]
    return entry > first + 1 and table[entry] - table[entry - 1] != table[first + 1] - table[first]


def _piece(view: View, name: str, table: Sequence[int], first: int, stop: int) -> View:
    step = table[first + 1] - table[first] if stop - first > 1 else 1
    return replace(
        view,
        name=f"{name} {first}" if stop - first == 1 else f"{name} {first} to {stop - 1}",
        shape=(stop - first, *view.shape[1:]),
        stride=(view.stride[0] * step, *view.stride[1:]),
        offset=view.offset + view.stride[0] * table[first],
    )
