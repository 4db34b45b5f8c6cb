"""What an audit did not judge, in words: claims that were too much work, and blocks that a claim does not reach."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from kvviz.memory.claims import Claim
from kvviz.memory.extents import TooMuchWorkError
from kvviz.memory.finding import Finding
from kvviz.memory.view import View


def not_judged(kind: str, claim: Claim, named: Mapping[str, View], error: TooMuchWorkError) -> Finding:
    """Stands in for what a claim was too much work to say: an error without counts, so that it never passes for clean.

    Args:
        kind: what the claim would have found.
        named: the views of the audit by name.
    """
    given = [getattr(claim, part.name) for part in fields(claim) if part.name not in ("name", "address_type")]
    names = [name for value in given for name in (value if isinstance(value, tuple) else (value,))]
    views = tuple(name for name in dict.fromkeys(names) if isinstance(name, str) and name in named)
    storage = named[views[0]].storage.name
    return Finding(kind, views, storage, None, None, text=f"not judged: {error}")


def blocks_left(extent: View, content: Sequence[View]) -> Iterator[str]:
    """The blocks that content has beyond an extent's: nobody says that they should be covered."""
    blocks = extent.shape[0] if extent.shape else 1
    for view in content:
        if view.shape and view.num_elements and view.shape[0] > blocks:
            left = f"block {blocks}" if view.shape[0] == blocks + 1 else f"blocks {blocks} to {view.shape[0] - 1}"
            are = "was" if view.shape[0] == blocks + 1 else "were"
            yield f"{left} of {view.name} {are} not judged: {extent.name} ends at its {blocks} blocks"
