"""What a guess about a mistake is, and helpers for all rules: starts, steps, pages and families of views.

A rule looks at the numbers of a wrong view and returns a :class:`Guess` if one known mistake gives these numbers.
Views are of one *family* if they lie in one storage and their names differ in numbers only: ``layer 3 K scale`` and
``layer 4 K scale``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from kvviz.audit.view import View


@dataclass(frozen=True)
class Guess:
    """One mistake that explains one wrong view.

    Attributes:
        cause: the name of a cause in ``kvviz.audit.cause_words.CAUSES``.
        view: the name of the wrong view.
        repaired: the view as it should be, or None if the rule cannot say.
        facts: the numbers that prove the guess, by name. ``claim`` holds a claim and the repaired claim.
        key: what must be equal for two views to have made the same mistake. One diagnosis holds all such views.
    """

    cause: str
    view: str
    repaired: View | None
    facts: Mapping = field(default_factory=dict, hash=False)
    key: tuple = ()


@dataclass(frozen=True)
class Surroundings:
    """Everything that a rule may look at, besides the wrong view.

    Attributes:
        views: all views by name.
        rightful: the claimed rightful places by the name of the view that belongs there.
    """

    views: Mapping[str, View]
    rightful: Mapping[str, View] = field(default_factory=dict)

    @cached_property
    def _families(self) -> dict[tuple, list[View]]:
        found: dict[tuple, list[View]] = {}
        for view in sorted(self.views.values(), key=lambda view: natural(view.name)):
            found.setdefault((family_of(view.name), view.storage), []).append(view)
        return found

    @cached_property
    def _spans(self) -> dict[tuple, tuple[int, int]]:
        """For each storage and layer, the first and the last byte that data and scales of this layer use in block 0."""
        found: dict[tuple, tuple[int, int]] = {}
        for view in map(self.place, self.views):
            if view.role in ("data", "scale") and view.num_elements:
                key, (start, stop) = (view.storage, _layer(view.name)), block_span(view)
                first, last = found.get(key, (start, stop))
                found[key] = min(first, start), max(last, stop)
        return found

    @cached_property
    def _starts(self) -> dict[tuple, list[int]]:
        families = self._families.items()
        return {key: sorted({start_of(self.place(one.name)) for one in family}) for key, family in families}

    @cached_property
    def _at_span(self) -> dict[tuple, list[str]]:
        found: dict[tuple, list[str]] = {}
        for view in self.views.values():
            found.setdefault((view.storage, block_span(view)), []).append(view.name)
        return found

    def same_span(self, view: View) -> list[str]:
        """Return the names of all views that use the same bytes of block 0, from the first to the last byte."""
        return self._at_span.get((view.storage, block_span(view)), [])

    def family(self, name: str) -> list[View]:
        """Return all views of the family of a view. The view with the lowest number is first."""
        return self._families[family_of(name), self.views[name].storage]

    def rightful_starts(self, name: str) -> list[int]:
        """Return the bytes at which the views of a family belong, each once, in rising order."""
        return self._starts[family_of(name), self.views[name].storage]

    def first_start(self, view: View) -> int:
        """Return the lowest byte at which a view of the same storage belongs."""
        return min(starts[0] for (_, storage), starts in self._starts.items() if storage == view.storage)

    def place(self, name: str) -> View:
        """Return the rightful place of a view. If no claim gives a place, return the view itself."""
        return self.rightful.get(name, self.views[name])

    def content_bytes(self, view: View) -> int:
        """Return how many bytes the layer of ``view`` uses in block 0, from its first to its last byte."""
        start, stop = self._spans.get((view.storage, _layer(view.name))) or block_span(view)
        return stop - start

    def page(self, view: View) -> tuple[int, int]:
        """Return the bytes that one layer has in a block, and how many layers share the block.

        The page is the distance from one layer's view to the next view inside a block. Without such neighbours, the
        page is the content of block 0.
        """
        axis = block_axis(view)
        step = abs(steps_of(view)[axis]) if axis is not None else 0
        starts = self.rightful_starts(view.name)
        inside = [start for start in starts if start - starts[0] < step] if step else []
        if len(inside) > 1 and len({b - a for a, b in zip(inside, inside[1:], strict=False)}) == 1:
            return inside[1] - inside[0], len(inside)
        return self.content_bytes(view), 1


@lru_cache(maxsize=1 << 14)
def family_of(name: str) -> str:
    """Return a name with its numbers replaced, for example ``layer # K scale``."""
    return re.sub(r"\d+", "#", name)


def natural(name: str) -> tuple:
    """Return a key that sorts ``layer 2`` before ``layer 10``."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdecimal() and len(part) < 20 else (0, part) for part in parts)


def start_of(view: View) -> int:
    """Return the byte at which element (0, ..., 0) starts."""
    return view.offset * view.itemsize


def steps_of(view: View) -> tuple[int, ...]:
    """Return the step of each axis in bytes. An axis of size 1 gets 0, because its stride has no effect."""
    return tuple(step * view.itemsize if size > 1 else 0 for step, size in zip(view.stride, view.shape, strict=True))


def moved_to(view: View, place: View) -> View:
    """Return ``view`` with the geometry of ``place``."""
    return replace(place, name=view.name, axes=view.axes, role=view.role, read_only=view.read_only)


def block_axis(view: View) -> int | None:
    """Return the axis that counts blocks. It is the axis named ``block``, or else the first axis. A scalar has None."""
    return view.axes.index("block") if "block" in view.axes else 0 if view.shape else None


def block_span(view: View) -> tuple[int, int]:
    """Return the first byte that the view uses in block 0, and the byte after the last one."""
    axis = block_axis(view)
    if axis is None:
        return view.span_bytes
    return replace(view, shape=tuple(1 if one == axis else size for one, size in enumerate(view.shape))).span_bytes


def axis_name(view: View, axis: int) -> str:
    """Return the name of an axis, or ``axis 1`` if the axes have no names."""
    return view.axes[axis] if view.axes else f"axis {axis}"


def other_half(name: str) -> str | None:
    """Return the name with K and V exchanged: ``layer 0 V scale`` for ``layer 0 K scale``.

    If it has neither, return None.
    """
    words = name.split(" ")
    if sum(word in ("K", "V") for word in words) != 1:
        return None
    return " ".join({"K": "V", "V": "K"}.get(word, word) for word in words)


def one_of_each(views: Sequence[View]) -> str:
    """Return a name for several views of one family: ``layer n K scale``."""
    return family_of(views[0].name).replace("#", "n", 1)


def _layer(name: str) -> str:
    found = re.search(r"\d+", name)
    return found.group() if found else ""
