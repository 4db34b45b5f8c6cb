"""Findings: what an audit answers. Records first; text is a rendering of them."""

from dataclasses import dataclass

KINDS = {
    "collision": "two claims on the same byte that must not share it",
    "misplaced": "an index maps to another byte than its rightful map says",
    "permuted": "a view's own set of bytes under another index map: right while all who move or read parts agree",
    "out_of_bounds": "reaches past its storage",
    "truncated": "does not cover all of its content",
    "oversized": "covers bytes that belong to somebody else, or to nobody at all",
    "self_overlap": "one view maps two indices to one byte",
    "ambiguous": "more than one reading of a shape fits: a declaration is needed",
    "unaligned": "rows miss a boundary",
    "index_space": "an id or address that its type, table or pool cannot hold, or that counts in another unit",
}
"""Every kind of finding, in one line each."""

MOST_HITS = 6
"""Lines of text about what misplaced elements hit."""

LOOK_ELSEWHERE = (
    "clean: what was claimed holds; look next at ordering (a race, a missing wait), at lifetimes (stale bytes of the "
    "block's last owner) and at the tables' contents: none of them shows in a layout"
)


@dataclass(frozen=True)
class Place:
    """One element of one view, and its byte range ``[start_bytes, stop_bytes)`` in the storage."""

    view: str
    index: tuple[int, ...]
    text: str
    start_bytes: int
    stop_bytes: int

    def __str__(self) -> str:
        return f"{self.text} at bytes [{self.start_bytes}, {self.stop_bytes})"


@dataclass(frozen=True)
class Finding:
    """One disagreement.

    Attributes:
        kind: one of :data:`KINDS`.
        views: the names involved, in the order in which they were given.
        storage: the storage's name.
        elements: elements concerned, over all the views involved, or None where they were not counted.
        bytes: distinct bytes concerned, or None where they were not counted.
        example: the first place in the storage: its claimants, of those that claim the very same
            bytes the first and the last (collision), or where the element is and where it belongs (misplaced,
            permuted).
        hits: for misplaced elements, what lies under their lowest byte instead, with counts.
        severity: ``error``, or ``warning`` where the layout is legal and slow.
        text: what the numbers mean, where the kind does not say it.
    """

    kind: str
    views: tuple[str, ...]
    storage: str
    elements: int | None
    bytes: int | None
    example: tuple[Place, ...] = ()
    hits: tuple[tuple[str, int], ...] = ()
    severity: str = "error"
    text: str = ""

    def __str__(self) -> str:
        names = (
            self.views if len(self.views) <= 4 else (*self.views[:2], f"... {len(self.views) - 3} more", self.views[-1])
        )
        counts = [f"{n} {what}" for n, what in ((self.elements, "elements"), (self.bytes, "bytes")) if n is not None]
        head = f"{self.kind}{' (warning)' if self.severity == 'warning' else ''}: {', '.join(names)}"
        lines = [f"{head}: {', '.join(counts) or 'not counted'} of {self.storage}"]
        lines += [f"  {self.text}"] if self.text else []
        if self.kind in ("misplaced", "permuted") and len(self.example) > 1:
            labels = ("first", "belongs", "there lies")
            lines += [f"  {label}: {place}" for label, place in zip(labels, self.example, strict=False)]
        else:
            lines += [f"  first: {place}" for place in self.example[:4]]
        lines += [f"  lands on {what}: {count}" for what, count in self.hits[:MOST_HITS]]
        rest = self.hits[MOST_HITS:]
        lines += [f"  lands on {len(rest)} more: {sum(count for _, count in rest)}"] if rest else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Audit:
    """All findings, and in words what was checked and what is worth knowing."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """True when no error was found; warnings (legal and slow) may remain."""
        return all(finding.severity == "warning" for finding in self.findings)

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(f for f in self.findings if f.kind == kind)

    def __str__(self) -> str:
        lines = [LOOK_ELSEWHERE] if self.clean else []
        lines += map(str, self.findings)
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, "checked: " + "; ".join(self.checked)])
