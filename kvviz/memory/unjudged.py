"""What an audit did not judge, in words: claims that were too much work, and blocks that a claim does not reach."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from kvviz.memory.claims import (
    Addressed,
    Aligned,
    BelongsAt,
    Claim,
    Covers,
    Declared,
    Disjoint,
    Follows,
    Maps,
    Overlay,
    SameBytes,
    StepAlike,
)
from kvviz.memory.extents import TooMuchWorkError
from kvviz.memory.finding import Finding
from kvviz.memory.view import View

KIND_OF: dict[type, str] = {
    Disjoint: "collision",
    Overlay: "collision",
    BelongsAt: "misplaced",
    Follows: "misplaced",
    Covers: "truncated",
    StepAlike: "truncated",
    SameBytes: "truncated",
    Maps: "index_space",
    Addressed: "index_space",
    Aligned: "unaligned",
    Declared: "ambiguous",
}
"""The kind of finding that stands in for a claim's own."""


def not_judged(claim: Claim, named: Mapping[str, View], error: TooMuchWorkError) -> Finding:
    """Stands in for what a claim was too much work to say: an error without counts, so that it never passes for clean.

    Args:
        named: the views of the audit by name.
    """
    given = [getattr(claim, part.name) for part in fields(claim) if part.name not in ("name", "address_type")]
    names = [name for value in given for name in (value if isinstance(value, tuple) else (value,))]
    views = tuple(name for name in dict.fromkeys(names) if isinstance(name, str) and name in named)
    storage = named[views[0]].storage.name
    return Finding(KIND_OF[type(claim)], views, storage, None, None, text=f"not judged: {error}")


def blocks_left(extent: View, content: Sequence[View]) -> Iterator[str]:
    """The blocks that content has beyond an extent's: nobody says that they should be covered."""
    blocks = extent.shape[0] if extent.shape else 1
    for view in content:
        if view.shape and view.num_elements and view.shape[0] > blocks:
            left = f"block {blocks}" if view.shape[0] == blocks + 1 else f"blocks {blocks} to {view.shape[0] - 1}"
            are = "was" if view.shape[0] == blocks + 1 else "were"
            yield f"{left} of {view.name} {are} not judged: {extent.name} ends at its {blocks} blocks"
