"""What a finding points at on a map: which of its places a map shows, and what is said there."""

from collections import Counter
from collections.abc import Sequence
from os.path import commonprefix

from kvviz.audit.findings import Finding, Place
from kvviz.show.byte_map import ByteMap

POINTED = ("collision", "misplaced", "permuted")
"""Kinds of findings that can be pointed at."""

MOST_NAMES, MAX_NAME = 4, 25
"""Views that a sentence on a figure names, and characters of a name: it must fit on the figure's width."""


def shows(record: ByteMap, finding: Finding) -> bool:
    """Whether the map was made from views that have this finding, and its window holds an end of it."""
    if record.storage.name != finding.storage:
        return False
    places = finding.example if finding.kind == "collision" else finding.example[:2]
    ends = [place for place in places if inside(record, place)]
    if not ends:
        return False
    if finding.kind == "collision":
        return all(_writes(record, place, place) for place in ends)
    landed, meant = places
    if inside(record, landed):
        return _writes(record, landed, landed)
    return not _writes(record, landed, meant)


def inside(record: ByteMap, place: Place) -> bool:
    """Whether a place starts in the map's window."""
    return record.start <= place.start_bytes < record.stop


def _writes(record: ByteMap, who: Place, where: Place) -> bool:
    """Whether the element ``who`` is among the writers of the byte at which ``where`` starts."""
    writers = record.at(where.start_bytes).writers
    return any(part.view == who.view and part.index == who.index[: len(part.index)] for part in writers)


def claim_of(finding: Finding, size: int) -> str:
    """``24 layers write these 4 bytes``, and as what; ``size`` is in bytes."""
    layers = Counter(_without_layer(view) for view in finding.views)
    if len(layers) == 1 and "" not in layers:
        name, count = next(iter(layers.items()))
        return f"{count} layers write these {size} bytes, each as its {name}"
    named = _named(finding.views, layers)
    alike = len(commonprefix(finding.views))
    names = [shortened(name, alike) if count == 1 else f"the {name} of {count} layers" for name, count in named]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{len(finding.views)} views write these {size} bytes: {', '.join(names[:MOST_NAMES])}{more}"


def shortened(name: str, alike: int = 0) -> str:
    """A name of at most :data:`MAX_NAME` characters: a longer one loses its first ``alike`` ones, or its middle."""
    if len(name) <= MAX_NAME:
        return name
    rest, half = name[alike:], (MAX_NAME - 1) // 2
    return f"…{rest}" if alike and 0 < len(rest) < MAX_NAME else f"{name[:half]}…{name[-half:]}"


def _named(views: Sequence[str], layers: Counter) -> list[tuple[str, int]]:
    """Names with counts: views of several layers by what they have in common, others by their own name."""
    found = {}
    for view in views:
        common = _without_layer(view)
        name = common if common and layers[common] > 1 else view
        found[name] = found.get(name, 0) + 1
    return list(found.items())


def _without_layer(view: str) -> str:
    """``K scale`` of ``layer 3 K scale``; nothing where a name has another form."""
    words = view.split()
    return " ".join(words[2:]) if len(words) > 2 and words[0] == "layer" and words[1].isdecimal() else ""
