"""Claims: statements about views that an audit can check, for example "no two of these views share a byte".

A claim names views by their names. Claims about blocks take the first axis of a view as the block.
Lists and numpy integers in a claim are converted to tuples and Python integers.
"""

from dataclasses import dataclass, fields

from kvviz.audit.arguments import plain
from kvviz.audit.view import View


@dataclass(frozen=True)
class _Statement:
    """Base of all claims: makes their fields hashable."""

    def __post_init__(self) -> None:
        for part in fields(self):
            object.__setattr__(self, part.name, plain(getattr(self, part.name)))


@dataclass(frozen=True)
class Disjoint(_Statement):
    """No two of these views share a byte."""

    views: tuple[str, ...]


@dataclass(frozen=True)
class Overlay(_Statement):
    """These views may share bytes of blocks with equal ids, but never bytes of blocks with different ids.

    Example: two KV cache groups that take their blocks from one pool.
    """

    views: tuple[str, ...]


@dataclass(frozen=True)
class BelongsAt(_Statement):
    """Each element of ``view`` starts at the same byte as the element of ``rightful`` with the same index.

    ``rightful`` is a view, or the name of a view.
    """

    view: str
    rightful: View | str


@dataclass(frozen=True)
class Follows(_Statement):
    """Each scale starts ``at_bytes`` after the start of its data cell.

    The last axis of ``data`` counts the elements inside a cell. ``scale`` has the other axes of ``data``. A scale that
    does not start at a multiple of its size can be given as single bytes: with one more axis, for the bytes of a scale.
    """

    scale: str
    data: str
    at_bytes: int


@dataclass(frozen=True)
class Covers(_Statement):
    """Each block of ``extent`` covers all bytes of the same block of ``content``, and no byte of another block.

    An extent is what a transfer, a registration, a clear or a save takes of each block. ``neighbours`` are the views
    whose other blocks must not be touched; default: the content itself. Padding has no owner, so an extent may cover
    it. If the extent has fewer blocks than the content, only these first blocks are checked, and a note says so.
    """

    extent: str
    content: tuple[str, ...]
    neighbours: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepAlike(_Statement):
    """Source and target of a copy have the same row width, the same block stride and the same number of blocks."""

    source: str
    target: str


@dataclass(frozen=True)
class SameBytes(_Statement):
    """``part`` (a slice of heads, a section, a rank's share) covers exactly the bytes of ``whole``."""

    part: str
    whole: str


@dataclass(frozen=True)
class Maps(_Statement):
    """Ids 0 to ``count - 1`` all lie in ``view``. Each id stands for ``ratio`` consecutive blocks of the view.

    ``stride_bytes`` is the distance in bytes that a consumer assumes between two neighbouring ids, if it is known.
    """

    name: str
    view: str
    count: int
    ratio: int = 1
    stride_bytes: int | None = None


@dataclass(frozen=True)
class Addressed(_Statement):
    """``address_type`` represents the address of every element of ``view`` exactly.

    Addresses count elements from the start of the storage.
    """

    view: str
    address_type: str


@dataclass(frozen=True)
class Aligned(_Statement):
    """Every row (all axes but the last) starts at a multiple of ``boundary_bytes``.

    If the boundary is ``required`` by the consumer, a row off the boundary is an error. Otherwise it is a warning that
    counts the sectors which the rows touch. With ``strides``, the stride of an axis of size 1 is checked too: no row
    shows this stride, but a TMA descriptor rejects it (vLLM PR 40737).
    """

    view: str
    boundary_bytes: int
    required: bool = True
    strides: bool = False


@dataclass(frozen=True)
class Declared(_Statement):
    """``declared`` names the reading of ``view`` that is meant, out of ``readings`` (names of views).

    The shape is ambiguous if ``declared`` is empty, and several readings fit in the storage with different index maps.
    """

    view: str
    readings: tuple[str, ...]
    declared: str = ""


Claim = (
    Disjoint | Overlay | BelongsAt | Follows | Covers | StepAlike | SameBytes | Maps | Addressed | Aligned | Declared
)
