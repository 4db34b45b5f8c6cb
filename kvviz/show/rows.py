"""Cuts a byte map into rows. If each row is one page, the rows have labels such as ``block 1 · layer 0``."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from kvviz.show.byte_map import ByteMap, ByteRange


@dataclass(frozen=True)
class Row:
    """One row of a drawn map: its first byte, a label such as ``block 1 · layer 0``, and its byte ranges."""

    start: int
    label: str
    ranges: tuple[ByteRange, ...]

    @property
    def mixed(self) -> bool:
        """False if all bytes with an owner belong to one block of one layer. Otherwise True."""
        return len(_blocks_and_layers(self.ranges)) != 1


def checked_row_bytes(row_bytes: int) -> int:
    """Return ``row_bytes`` as a Python int. Raise ValueError if it is not an integer, or is smaller than 1."""
    try:
        number = operator.index(row_bytes)
    except TypeError:
        raise ValueError(f"row_bytes must be an integer, not {row_bytes!r}") from None
    if number < 1:
        raise ValueError(f"row_bytes must be at least 1, not {number}")
    return number


def rows(record: ByteMap, row_bytes: int) -> tuple[Row, ...]:
    """Cut a map into rows of ``row_bytes`` bytes. If ``row_bytes`` is the page size of the cache, each row is one page.

    Raises:
        ValueError: ``row_bytes`` is not an integer, or is smaller than 1.
    """
    row_bytes = checked_row_bytes(row_bytes)
    cut: dict[int, list[ByteRange]] = {start: [] for start in range(record.start, record.stop, row_bytes)}
    for stretch in record.ranges:
        first = stretch.start - (stretch.start - record.start) % row_bytes
        for start in range(first, stretch.stop, row_bytes):
            ends = (max(stretch.start, start), min(stretch.stop, start + row_bytes))
            cut[start].append(ByteRange(*ends, stretch.owner, stretch.writers, stretch.state))
    return tuple(Row(start, _row_label(ranges), tuple(ranges)) for start, ranges in cut.items())


def _row_label(ranges: Sequence[ByteRange]) -> str:
    """Return the label of a row: ``block 1 · layer 0``, or ``block 0 · layers 0–3`` if the row has several layers.

    The label is "" if no owner in the row has a block or a layer.
    """
    found = _blocks_and_layers(ranges)
    blocks = sorted({block for block, _ in found if block is not None})
    layers = sorted({layer for _, layer in found if layer is not None})
    return " · ".join(_span(word, numbers) for word, numbers in (("block", blocks), ("layer", layers)) if numbers)


def _blocks_and_layers(ranges: Sequence[ByteRange]) -> set[tuple[int | None, int | None]]:
    """Return (block, layer) of each owner. A number is None if the owner has no block, or no layer."""
    owners = [stretch.owner for stretch in ranges if stretch.owner]
    return {(part.index[0] if part.axes[:1] == ("block",) else None, part.layer) for part in owners} - {(None, None)}


def _span(word: str, numbers: Sequence[int]) -> str:
    return f"{word} {numbers[0]}" if len(numbers) == 1 else f"{word}s {numbers[0]}–{numbers[-1]}"
