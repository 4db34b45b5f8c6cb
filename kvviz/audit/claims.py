"""Claims: statements about views that an audit can check, for example "no two of these views share a byte".

A claim gives the names of its views. In claims about blocks, the first axis of a view counts blocks.
Lists and numpy integers in a claim are converted to tuples and Python integers.
"""

from dataclasses import dataclass, fields

from kvviz.audit.arguments import plain
from kvviz.audit.view import View


@dataclass(frozen=True)
class _Statement:
    """The base class of all claims. It converts the fields, so that claims can be keys of a dict."""

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

    The last axis of ``data`` counts the elements inside a cell. ``scale`` has the other axes of ``data``. If scales do
    not start at multiples of their size, make ``scale`` a view of single bytes. Then it has one more axis, for the
    bytes of a scale.
    """

    scale: str
    data: str
    at_bytes: int


@dataclass(frozen=True)
class Covers(_Statement):
    """Each block of ``extent`` covers all bytes of the same block of ``content``, and no byte of another block.

    An extent is the bytes that an operation takes of each block, for example a transfer, a registration, a clear or a
    save. Several extents count together. Example: one extent takes the data, and another extent takes the scales from
    another storage. ``neighbours`` are the views whose other blocks must not be touched. Default: the content itself.
    An extent may cover padding, because padding has no owner. If a block of the content has no extent, it counts as not
    covered.

    If an operation takes a block in several pieces, set ``extents_per_block``: this many indices of the extent are one
    block. If it takes several blocks at once, set ``blocks_per_extent``: this many blocks of the content and of the
    neighbours belong to one index of the extent.
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
    """``part`` covers exactly the bytes of ``whole``. Example: the heads that one process sends to another process.

    ``part`` is the name of a view, or several names. So is ``whole``. Several views count together.
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
    """The number type ``address_type`` can hold the address of every element of ``view`` exactly.

    ``base`` says where address 0 is: ``storage`` means the first byte of the storage, and ``view`` means the element
    (0, ..., 0) of the view. ``unit`` says what an address counts: ``elements`` or ``bytes``.
    """

    view: str
    address_type: str
    base: str = "storage"
    unit: str = "elements"


@dataclass(frozen=True)
class Aligned(_Statement):
    """Every row starts at a multiple of ``boundary_bytes``. A row is one index of all axes but the last.

    If ``required`` is True, a row at another byte is an error. Otherwise it is a warning: legal but slow. If
    ``strides`` is True, the stride of an axis of size 1 must be a multiple of the boundary too. This stride moves no
    row, but a TMA descriptor rejects a wrong one (vLLM PR 40737).
    """

    view: str
    boundary_bytes: int
    required: bool = True
    strides: bool = False


@dataclass(frozen=True)
class Declared(_Statement):
    """The shape of ``view`` can be understood in several ways, called readings. ``declared`` says which one is meant.

    ``readings`` holds names of views, one view per reading. ``declared`` is one of these names, or empty. If it is
    empty, and several readings with different index maps fit in the storage, the shape is ambiguous.
    """

    view: str
    readings: tuple[str, ...]
    declared: str = ""


Claim = (
    Disjoint | Overlay | BelongsAt | Follows | Covers | StepAlike | SameBytes | Maps | Addressed | Aligned | Declared
)
