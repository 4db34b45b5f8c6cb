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


def names_in(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a field that holds one name or several names."""
    return (given,) if isinstance(given, str) else given


@dataclass(frozen=True)
class Disjoint(_Statement):
    """No two of these views share a byte. Views that are only read may share bytes with each other."""

    views: tuple[str, ...]


@dataclass(frozen=True)
class Overlay(_Statement):
    """These views may share bytes of blocks with equal ids, but never bytes of blocks with different ids.

    Views that are only read may share any bytes with each other.

    Example: two KV cache groups that take their blocks from one pool.

    An id of the pool may stand for several blocks of a view. Then ``blocks_per_id`` holds one number per view. Example:
    a sliding block is as long as three full blocks, and the pool counts sliding blocks: ``(1, 3)`` for the views
    ``("sliding", "full")``. Default: each id stands for one block of each view.
    """

    views: tuple[str, ...]
    blocks_per_id: tuple[int, ...] = ()


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

    An extent is what a transfer, a registration, a clear or a save takes of each block. Several extents count together:
    for example one extent takes the data, and another one takes the scales from another storage. ``neighbours`` are the
    views whose other blocks must not be touched; default: the content itself. Padding has no owner, so an extent may
    cover it. Blocks of the content for which there is no extent are not covered.

    A block may be taken in several pieces: then ``extents_per_block`` entries of the extent are one block. An extent
    may take several blocks, for example a registration in chunks: then ``blocks_per_extent`` blocks of the content and
    of the neighbours belong to one entry of the extent.
    """

    extent: str | tuple[str, ...]
    content: tuple[str, ...]
    neighbours: tuple[str, ...] = ()
    extents_per_block: int = 1
    blocks_per_extent: int = 1


@dataclass(frozen=True)
class StepAlike(_Statement):
    """Source and target of a copy have the same row width, the same block stride and the same number of blocks."""

    source: str
    target: str


@dataclass(frozen=True)
class SameBytes(_Statement):
    """``part`` (a slice of heads, a section, a rank's share) covers exactly the bytes of ``whole``.

    Both are the name of a view or several names. Several views count together: for example the three sections that
    belong to one rank.
    """

    part: str | tuple[str, ...]
    whole: str | tuple[str, ...]


@dataclass(frozen=True)
class Maps(_Statement):
    """Ids 0 to ``count - 1`` all lie in ``view``. Each id stands for ``ratio`` consecutive blocks of the view.

    ``stride_bytes`` is the distance in bytes that a consumer assumes between two neighbouring ids, if it is known. If
    the ids are not 0 to ``count - 1``, ``table`` lists these ``count`` ids, for example the block table of a request or
    the slots of a rank. In a table, -1 is a hole: no block belongs to this entry.
    """

    name: str
    view: str
    count: int
    ratio: int = 1
    stride_bytes: int | None = None
    table: tuple[int, ...] = ()


@dataclass(frozen=True)
class Addressed(_Statement):
    """``address_type`` represents the address of every element of ``view`` exactly.

    The address of an element counts from ``base``: ``storage`` is the first byte of the storage, and ``view`` is the
    element (0, ..., 0) of the view. ``unit`` says what it counts: ``elements`` or ``bytes``.
    """

    view: str
    address_type: str
    base: str = "storage"
    unit: str = "elements"


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
