"""The dye: a number for each mark of each cell, and the bytes that show this number.

A *mark* is 1, 2, 4 or 8 bytes of a cell. All marks of all processes get different numbers. A number is mixed to 64
bits, so that half of one number and half of another number almost never give a third number. If a mark has fewer than
8 bytes, the 64 bits are painted in several passes: a mark of 4 bytes needs 2 passes.

Every process can make the same palette, because it depends only on the views.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import torch

from kvviz.audit.audit import audit_views
from kvviz.audit.claims import Disjoint
from kvviz.audit.view import View
from kvviz.trace.memory import Memory, cell_shape

WORD_BYTES = 8
FACTORS = tuple(np.uint64(number) for number in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Odd numbers, so that multiplication by them modulo 2**64 can be undone."""
INVERSES = tuple(np.uint64(pow(int(factor), -1, 1 << 64)) for factor in FACTORS)
SHIFT = np.uint64(32)
NOBODY = -1
"""The number of bytes that show no number."""


@dataclass(frozen=True)
class Swatch:
    """The numbers of one view: ``first``, ``first + 1``, ... in the order of its marks.

    Attributes:
        process: name of the process.
        shape: the number of marks along each axis.
        steps: bytes from one mark to the next along each axis.
    """

    process: str
    view: View
    first: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def count(self) -> int:
        """Return the number of marks."""
        return prod(self.shape)

    @property
    def per_cell(self) -> int:
        """Return the number of marks of a cell."""
        return self.count // prod(cell_shape(self.view))


class Palette:
    """The numbers of all marks of several processes.

    Args:
        processes: the views of each process. No two views of a process share a byte.
        mark_bytes: bytes of a mark. Default: the largest of 8, 4, 2 and 1 that fits the rows of all views.

    Attributes:
        passes: the number of passes that show the whole number.
        swatches: for each process, the swatches of its views by name.

    Raises:
        ValueError: two views of a process share a byte. Or ``mark_bytes`` does not fit.
    """

    def __init__(self, processes: Mapping[str, Sequence[View]], mark_bytes: int | None = None) -> None:
        runs = [_run_bytes(view) for views in processes.values() for view in views]
        fits = gcd(WORD_BYTES, *runs)
        if mark_bytes is not None and (mark_bytes < 1 or fits % mark_bytes):
            raise ValueError(
                f"mark_bytes is {mark_bytes}, but the rows of these views have marks of 1 to {fits} bytes: give a "
                f"power of two up to {fits}"
            )
        self.mark_bytes = mark_bytes or fits
        self.passes = WORD_BYTES // self.mark_bytes
        self.swatches: dict[str, dict[str, Swatch]] = {}
        self.total = 0
        for process, views in processes.items():
            _check_disjoint(process, views)
            mine = self.swatches[process] = {}
            for view in views:
                mine[view.name] = self.swatch(process, view, self.total)
                self.total += mine[view.name].count
        self._all = [one for mine in self.swatches.values() for one in mine.values()]
        self._firsts = np.array([one.first for one in self._all])

    def swatch(self, process: str, view: View, first: int) -> Swatch:
        """Return the numbers of a view, which begin at ``first``."""
        inner, steps = _run_bytes(view) // self.mark_bytes, tuple(step * view.itemsize for step in view.stride)
        if _has_run(view):
            return Swatch(process, view, first, (*view.shape[:-1], inner), (*steps[:-1], self.mark_bytes))
        return Swatch(process, view, first, (*view.shape, inner), (*steps, self.mark_bytes))

    def paint(self, process: str, memory: Memory, number: int) -> None:
        """Paint all cells of a process in pass ``number``."""
        for one in self.swatches[process].values():
            word = mix(np.arange(one.first, one.first + one.count, dtype=np.uint64))
            part = word.view(np.uint8).reshape(-1, self.passes, self.mark_bytes)[:, number]
            self._bytes(one, memory).copy_(torch.from_numpy(part.copy()).view(*one.shape, self.mark_bytes))
        memory.synchronise()

    def read(self, one: Swatch, memory: Memory) -> np.ndarray:
        """Read the bytes of all marks of a view: uint8 array of shape (marks, mark_bytes)."""
        return self._bytes(one, memory).cpu().numpy().reshape(-1, self.mark_bytes)

    def numbers(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the numbers that marks show, from the bytes of all passes. :data:`NOBODY` if they show none."""
        word = unmix(np.concatenate(parts, axis=1).view(np.uint64)[:, 0])
        return np.where(word < self.total, word, np.uint64(0)).astype(np.int64) - (word >= self.total)

    def swatch_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return for each number the index of its swatch in :attr:`all`, or -1 for :data:`NOBODY`."""
        return np.where(numbers < 0, -1, np.searchsorted(self._firsts, numbers, "right") - 1)

    @property
    def all(self) -> list[Swatch]:
        """Return all swatches, in the order of their numbers."""
        return self._all

    def _bytes(self, one: Swatch, memory: Memory) -> torch.Tensor:
        flat = memory.flats[one.view.storage.name]
        if any(step < 0 for step in one.steps):
            raise ValueError(
                f"{one.view.name} has a negative stride, which torch cannot write: give the view the other way round"
            )
        offset = one.view.offset * one.view.itemsize
        return flat.as_strided((*one.shape, self.mark_bytes), (*one.steps, 1), flat.storage_offset() + offset)


def mix(number: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers. Different numbers give different results."""
    for factor in FACTORS:
        number = (number ^ (number >> SHIFT)) * factor
    return number ^ (number >> SHIFT)


def unmix(word: np.ndarray) -> np.ndarray:
    """Undo :func:`mix`."""
    for inverse in reversed(INVERSES):
        word = (word ^ (word >> SHIFT)) * inverse
    return word ^ (word >> SHIFT)


def _has_run(view: View) -> bool:
    """Return True if the elements of the last axis are adjacent."""
    return len(view.shape) > 0 and view.stride[-1] == 1 and cell_shape(view) != view.shape


def _run_bytes(view: View) -> int:
    return view.itemsize * (view.shape[-1] if _has_run(view) else 1)


def _check_disjoint(process: str, views: Sequence[View]) -> None:
    found = audit_views(views, [Disjoint(tuple(view.name for view in views))] if len(views) > 1 else [])
    for one in found.of_kind("collision"):
        places = " and ".join(map(str, one.example[:2]))
        raise ValueError(
            f"{process}: views share bytes, so a byte cannot show the cells of both: {places}. Dye the views where "
            "they belong, and read through the other views with carry(..., through=views)"
        )
