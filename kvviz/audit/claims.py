"""What may be stated of a set of views. The audit checks each claim; see ``kvviz.audit.audit``.

Views are named; claims that speak of blocks expect the views' first axis to be the block.
"""

from dataclasses import dataclass

from kvviz.audit.view import View


@dataclass(frozen=True)
class Disjoint:
    """No two of these views share a byte."""

    views: tuple[str, ...]


@dataclass(frozen=True)
class Overlay:
    """These views may share bytes of *equal* block ids (groups over one pool), and never of different ones."""

    views: tuple[str, ...]


@dataclass(frozen=True)
class BelongsAt:
    """Each element of ``view`` starts where the same element of ``rightful`` (a view, or the name of one) starts."""

    view: str
    rightful: View | str


@dataclass(frozen=True)
class Follows:
    """Each scale starts ``at_bytes`` behind the start of its data cell; the data's last axis runs inside a cell."""

    scale: str
    data: str
    at_bytes: int


@dataclass(frozen=True)
class Covers:
    """Block by block, ``extent`` covers all bytes of ``content``, and no byte of another block of ``neighbours``.

    An extent is a transfer, a registration, a clear or a save. ``neighbours`` are views that may not be touched
    across blocks; by default the content itself. Padding of the block's own is nobody's, and may be covered. An extent
    of fewer blocks is one of the first blocks: only they are judged, and a note names the content's others.
    """

    extent: str
    content: tuple[str, ...]
    neighbours: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepAlike:
    """Both sides of a copy have the same row width, the same block stride and the same number of blocks."""

    source: str
    target: str


@dataclass(frozen=True)
class SameBytes:
    """``part`` (a slice of heads, a section, a rank's share) covers exactly the bytes of ``whole``."""

    part: str
    whole: str


@dataclass(frozen=True)
class Maps:
    """``count`` ids, each standing for ``ratio`` consecutive blocks of ``view``, all lie in it.

    ``stride_bytes`` is how far apart a consumer takes two neighbouring ids to be, if that is known.
    """

    name: str
    view: str
    count: int
    ratio: int = 1
    stride_bytes: int | None = None


@dataclass(frozen=True)
class Addressed:
    """Every element address of ``view`` (in elements, from the storage's start) is exact in ``address_type``."""

    view: str
    address_type: str


@dataclass(frozen=True)
class Aligned:
    """Every row (all axes but the last) starts at a multiple of ``boundary_bytes``.

    ``required`` by the consumer: a miss is an error. Otherwise a warning, with the sectors that rows touch. With
    ``strides`` the stride of an axis with a single index counts too: no row shows it, and a TMA descriptor refuses it
    all the same (vLLM PR 40737).
    """

    view: str
    boundary_bytes: int
    required: bool = True
    strides: bool = False


@dataclass(frozen=True)
class Declared:
    """``view`` must be read as one of ``readings`` (names of views), and something must say as which.

    Ambiguous when ``declared`` is empty and more than one reading stays in bounds with another map.
    """

    view: str
    readings: tuple[str, ...]
    declared: str = ""


Claim = (
    Disjoint | Overlay | BelongsAt | Follows | Covers | StepAlike | SameBytes | Maps | Addressed | Aligned | Declared
)
