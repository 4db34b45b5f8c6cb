"""Decides if a map can point at a finding and at which of its places, and writes the sentence beside a frame."""

from collections import Counter
from collections.abc import Sequence
from os.path import commonprefix

from kvviz.audit.findings import FRAME, KINDS, Finding, Place
from kvviz.show.byte_map import ByteMap

POINTED = tuple(name for name, kind in KINDS.items() if kind.can_be_pointed_at)
"""Names of the kinds of findings at which a map can point."""

MOST_NAMES, MAX_NAME = 4, 25
"""Limits of a sentence on a figure: number of view names, and characters per name. A longer sentence would be wider
than the figure."""


def shows(record: ByteMap, finding: Finding) -> bool:
    """Return True if a map can point at this finding.

    A place of the finding must lie in the window of the map, and the views of the finding must be writers of the map.
    So a map in which all views are at their rightful places does not point at the place of a misplaced element.
    """
    if record.storage.name != finding.storage or finding.kind not in POINTED:
        return False
    places = finding.example if finding.drawing == FRAME else finding.example[:2]
    visible = [place for place in places if inside(record, place)]
    if not visible:
        return False
    if finding.drawing == FRAME:  # a map does not show views that are only read
        return all(_writes(record, place, place) for place in visible if place.view not in finding.readers)
    landed, meant = places
    if inside(record, landed):
        return _writes(record, landed, landed)
    return not _writes(record, landed, meant)


def inside(record: ByteMap, place: Place) -> bool:
    """Return True if a place starts in the map's window."""
    return record.start <= place.start_bytes < record.stop


def _writes(record: ByteMap, element: Place, place: Place) -> bool:
    """Return True if ``element`` is one of the writers of the first byte of ``place``."""
    writers = record.at(place.start_bytes).writers
    return any(part.view == element.view and part.index == element.index[: len(part.index)] for part in writers)


def claim_of(finding: Finding, size: int) -> str:
    """Return the sentence for a framed finding: ``24 layers write these 4 bytes, each as its K scale``.

    Args:
        size: number of bytes in the frame.
    """
    layers = Counter(_without_layer(view) for view in finding.views)
    if not finding.readers and len(layers) == 1 and "" not in layers:
        name, count = next(iter(layers.items()))
        return f"{count} layers write these {size} bytes, each as its {name}"
    named = _grouped(finding.views, layers)
    common = len(commonprefix(finding.views))
    names = [shortened(name, common) if count == 1 else f"the {name} of {count} layers" for name, count in named]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{who_writes(finding)} these {size} bytes: {', '.join(names[:MOST_NAMES])}{more}"


def who_writes(finding: Finding) -> str:
    """Return the beginning of a sentence about shared bytes: ``2 views write``, or ``1 view writes and 2 read``."""
    readers = len(finding.readers)
    writers = len(finding.views) - readers
    text = f"{writers} view{'s write' if writers != 1 else ' writes'}"
    return f"{text} and {readers} read{'s' if readers == 1 else ''}" if readers else text


def shortened(name: str, common: int = 0) -> str:
    """Return a name of at most :data:`MAX_NAME` characters.

    A longer name loses its first ``common`` characters, because other names have the same beginning. If the rest is
    still too long, the name loses its middle instead.
    """
    if len(name) <= MAX_NAME:
        return name
    rest, half = name[common:], (MAX_NAME - 1) // 2
    return f"…{rest}" if common and 0 < len(rest) < MAX_NAME else f"{name[:half]}…{name[-half:]}"


def _grouped(views: Sequence[str], layers: Counter) -> list[tuple[str, int]]:
    """Return names and counts. Views that differ only in their layer are counted under one name."""
    found = {}
    for view in views:
        common = _without_layer(view)
        name = common if common and layers[common] > 1 else view
        found[name] = found.get(name, 0) + 1
    return list(found.items())


def _without_layer(view: str) -> str:
    """Return ``K scale`` for ``layer 3 K scale``, and an empty string for a name of another form."""
    words = view.split()
    return " ".join(words[2:]) if len(words) > 2 and words[0] == "layer" and words[1].isdecimal() else ""
