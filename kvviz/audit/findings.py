"""Findings: the records that an audit returns, for example "these 4 bytes are shared by 24 views".

Each finding has a kind. :data:`KINDS` holds everything that text, pages and maps need to know about a kind.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvviz.audit.arguments import one_of, plain

FRAME, ARROW, PLACE, NO_MAP = "frame", "arrow", "place", "no map"
"""How a map shows a finding: :class:`FindingKind` explains each word."""


@dataclass(frozen=True)
class FindingKind:
    """One kind of finding.

    Attributes:
        name: the word in reports and files.
        meaning: one line for people.
        severity: ``error`` or ``warning``. A finding of this kind can have another severity.
        drawing: how a map shows a finding of this kind.
            ``frame``: a frame around the bytes that several views claim.
            ``arrow``: an arrow from the element's rightful place to the place where the element lies. The example
            of such a finding holds these places: first where the element lies, then its rightful place.
            ``place``: a map of the first place, without a frame or an arrow.
            ``no map``: no map. A map cannot show that one view writes a byte twice.
    """

    name: str
    meaning: str
    severity: str = "error"
    drawing: str = PLACE

    @property
    def can_be_pointed_at(self) -> bool:
        """Return True if a map can point at a finding of this kind with a frame or an arrow."""
        return self.drawing in (FRAME, ARROW)


_KINDS = (
    FindingKind("collision", "several views claim a byte that they must not share", drawing=FRAME),
    FindingKind("misplaced", "an element lies at another byte than its rightful place", drawing=ARROW),
    FindingKind(
        "permuted",
        "a view has the right set of bytes in another order: harmless while every writer, reader and mover uses the "
        "same order",
        drawing=ARROW,
    ),
    FindingKind("out_of_bounds", "a view reaches past its storage"),
    FindingKind("truncated", "an extent or a part does not cover all of its content"),
    FindingKind("oversized", "an extent or a part covers bytes that it must not touch"),
    FindingKind("self_overlap", "two elements of one view share a byte", drawing=NO_MAP),
    FindingKind("ambiguous", "a shape can be read in several ways, and nothing declares which one is meant"),
    FindingKind("unaligned", "rows do not start at multiples of a boundary"),
    FindingKind("index_space", "an id or an address does not fit its table, pool or number type, or its unit is wrong"),
)

KINDS: dict[str, FindingKind] = {kind.name: kind for kind in _KINDS}
"""Every kind of finding by name. To add one, add a line above, then return it from a check."""

MOST_HITS, MOST_NAMES, MOST_PLACES = 6, 4, 4
"""The text of a finding lists at most this many owners, names of views, and places."""

ARROW_LABELS = ("first", "belongs", "belongs there")
"""Labels of an arrow's places: where the first element lies, where it belongs, and which element belongs there."""

LOOK_ELSEWHERE = (
    "clean: every claim holds. Look next at ordering (a race, a missing wait), at lifetimes (stale bytes of a block's "
    "last owner) and at the contents of tables: a layout shows none of these."
)


def get_kind(name: str) -> FindingKind:
    """Return the kind of that name. If there is none, raise a ValueError that suggests the nearest name."""
    return KINDS[one_of("finding kind", name, KINDS)]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 byte``, ``2 bytes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def cost_of_names(names: Iterable[str]) -> int:
    """Return the work of keeping these names in a finding. Texts, JSON files and pages print them later."""
    return sum(16 + 4 * len(name) for name in names)


@dataclass(frozen=True)
class Place:
    """One element of one view, and its byte range ``[start_bytes, stop_bytes)`` in the storage."""

    view: str
    index: tuple[int, ...]
    text: str
    start_bytes: int
    stop_bytes: int

    def __post_init__(self) -> None:
        for name in ("index", "start_bytes", "stop_bytes"):
            object.__setattr__(self, name, plain(getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.text} at bytes [{self.start_bytes}, {self.stop_bytes})"


@dataclass(frozen=True)
class Finding:
    """One disagreement between views and claims.

    Attributes:
        kind: a name from :data:`KINDS`.
        views: names of the views involved, in the order in which they were given.
        storage: name of the storage.
        elements: number of elements involved, summed over all views, or None if they were not counted.
        bytes: number of distinct bytes involved, or None if they were not counted.
        example: places at the lowest address. In a collision: elements that share the first byte, one element per
            view. If several views have equal geometry, the example has only the first view and the last view.
            If misplaced or permuted: where the element lies, where it belongs, and whose element belongs at the place
            where it lies.
        hits: for misplaced elements: pairs (owner, number of elements). The first byte of these elements belongs to
            this owner.
        readers: names of those ``views`` of a collision that are only read. The other views write.
        severity: ``error`` or ``warning`` (legal but slow). Default: the severity of the kind.
        text: an explanation of the numbers, if the kind does not explain them.
        judged: False if the work limit was reached before these views were judged. Then the finding says only that.

    Raises:
        ValueError: the kind is not in :data:`KINDS`.
    """

    kind: str
    views: tuple[str, ...]
    storage: str
    elements: int | None
    bytes: int | None
    example: tuple[Place, ...] = ()
    hits: tuple[tuple[str, int], ...] = ()
    severity: str = ""
    text: str = ""
    readers: tuple[str, ...] = ()
    judged: bool = True

    def __post_init__(self) -> None:
        kind = get_kind(self.kind)
        for name in ("views", "elements", "bytes", "example", "hits", "readers"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        object.__setattr__(self, "severity", self.severity or kind.severity)

    @property
    def drawing(self) -> str:
        """Return the word for how a map shows this finding, for example ``arrow``. FindingKind lists these words."""
        return get_kind(self.kind).drawing

    def __str__(self) -> str:
        counts = [counted(self.elements, "element")] if self.elements is not None else []
        counts += [counted(self.bytes, "byte")] if self.bytes is not None else []
        warning = " (warning)" if self.severity == "warning" else ""
        if not self.judged:
            return f"{self.kind} (not judged): {self.names} of {self.storage}\n  {self.text}"
        lines = [f"{self.kind}{warning}: {self.names}: {', '.join(counts) or 'not counted'} of {self.storage}"]
        lines += [f"  {self.text}"] if self.text else []
        if self.drawing == ARROW and len(self.example) > 1:
            lines += [f"  {label}: {place}" for label, place in zip(ARROW_LABELS, self.example, strict=False)]
        else:
            lines += [f"  first: {place}" for place in self.example[:MOST_PLACES]]
        lines += [f"  lands on {owner}: {count}" for owner, count in self.hits[:MOST_HITS]]
        rest = self.hits[MOST_HITS:]
        lines += [f"  lands on {len(rest)} more: {sum(count for _, count in rest)}"] if rest else []
        return "\n".join(lines)

    @property
    def names(self) -> str:
        """Return the names of the views as text. A long list is cut: the first two, how many more, and the last."""
        if len(self.views) <= MOST_NAMES:
            return ", ".join(self.views)
        return ", ".join((*self.views[:2], f"... {len(self.views) - 3} more", self.views[-1]))


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        findings: all findings, in the order of the checks.
        checked: sentences that say what was checked. If a check failed, its sentence begins with ``failed`` and says
            what does not hold.
        notes: sentences that say what was not checked, or needs attention.
    """

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Return True if everything was judged, and there is no error. There may be warnings."""
        return all(finding.severity == "warning" and finding.judged for finding in self.findings)

    @property
    def not_judged(self) -> tuple[Finding, ...]:
        """Return the findings with ``judged`` False. Each stands for a claim or a view that takes too much work."""
        return tuple(finding for finding in self.findings if not finding.judged)

    @property
    def judged(self) -> tuple[Finding, ...]:
        """Return the findings with ``judged`` True: all findings but :attr:`not_judged`."""
        return tuple(finding for finding in self.findings if finding.judged)

    @property
    def verdict(self) -> str:
        """Return the result in one or two sentences: clean, or the number of errors and warnings."""
        warnings = sum(finding.severity == "warning" for finding in self.judged)
        if self.not_judged:
            checks = counted(len(self.not_judged), "check")
            errors = counted(len(self.judged) - warnings, "error")
            return f"not all judged: {checks} would take too much work; {errors} in the rest"
        if self.clean and not warnings:
            return LOOK_ELSEWHERE
        if self.clean:
            slow = f"{counted(warnings, 'warning')} (legal but slow)"
            return f"clean, with {slow}: no error was found. {LOOK_ELSEWHERE.partition('. ')[2]}"
        errors = counted(len(self.findings) - warnings, "error")
        return f"{errors}, {counted(warnings, 'warning')} (legal but slow)" if warnings else errors

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """Return the findings of one kind. Raise a ValueError if there is no kind of that name."""
        name = get_kind(kind).name
        return tuple(finding for finding in self.findings if finding.kind == name)

    def __str__(self) -> str:
        lines = [self.verdict] if self.clean else []
        lines += map(str, self.findings)
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, "checked: " + "; ".join(self.checked)])
