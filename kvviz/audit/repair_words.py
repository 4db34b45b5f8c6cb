"""Words for repaired views and claims, and for the effect of a mistake.

Example of a repair: ``layer n K scale, in elements of 4 bytes: offset 8,448 n + 32, strides (675840, 264, 33)``. ``n``
is the first number in the name of the view.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

from kvviz.audit.claims import Claim
from kvviz.audit.findings import KINDS, Finding
from kvviz.audit.guesses import family_of, natural, one_of_each
from kvviz.audit.view import View

MOST_OFFSETS = 4
"""Offsets that a repair lists one by one, if they do not follow a rule."""

MOST_CODE_OFFSETS = 100
"""The same limit for the Python lines of a repair."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 byte``, ``2,048 bytes``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def joined(parts: Sequence[str], word: str = "and") -> str:
    """Return parts as a list in a sentence: ``a, b and c``."""
    return f" {word} ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)


def repair_words(repaired: Sequence[View], claims: Sequence[tuple[Claim, Claim]], views: Mapping[str, View]) -> str:
    """Return the changed numbers of repaired views and claims; empty if nothing was repaired.

    Args:
        claims: pairs of a claim and the repaired claim.
        views: the views before the repair, by name.
    """
    lines = [_family(members, views) for members in _families(repaired)]
    return "; ".join([*lines, *dict.fromkeys(_claim(old, new) for old, new in claims)])


def _families(repaired: Sequence[View]) -> list[list[View]]:
    """Group views whose names differ in numbers only and that have one shape, stride, element size and storage."""
    families: dict[tuple, list[View]] = {}
    for view in sorted(repaired, key=lambda one: natural(one.name)):
        key = (family_of(view.name), view.shape, view.stride, view.itemsize, view.storage.name)
        families.setdefault(key, []).append(view)
    return list(families.values())


def _family(members: Sequence[View], views: Mapping[str, View]) -> str:
    first = members[0]
    who = first.name if len(members) == 1 else one_of_each(members)
    if 0 in first.shape:
        return f"{who}: write nothing, skip slots below 0"
    before = [views[view.name] for view in members]
    numbers = []
    if any(view.storage != old.storage for view, old in zip(members, before, strict=True)):
        numbers.append(f"storage {first.storage.name} of at least {first.storage.nbytes:,} bytes")
    if any(view.shape != old.shape for view, old in zip(members, before, strict=True)):
        numbers.append(f"shape {first.shape}")
    numbers += [f"offset {_offsets(members)}", f"strides {first.stride}"]
    unit = f", in elements of {first.itemsize} bytes" if first.itemsize > 1 else ""
    return f"{who}{unit}: {', '.join(numbers)}"


def _offsets(members: Sequence[View]) -> str:
    """Return ``8,448 n + 32`` if the offsets are linear in the numbers of the views, else the offsets."""
    rule, offsets = _rule(members), [view.offset for view in members]
    if rule is not None:
        slope, base = rule
        sign = f" {'+' if base > 0 else '-'} {abs(base):,}" if base else ""
        return f"{slope:,} n{sign}" if slope else f"{base:,}"
    shown = joined([f"{offset:,}" for offset in offsets[:MOST_OFFSETS]])
    return shown if len(offsets) <= MOST_OFFSETS else f"{shown} and {len(offsets) - MOST_OFFSETS} more"


def _rule(members: Sequence[View]) -> tuple[int, int] | None:
    """Return ``slope`` and ``base`` if the offset of each view is ``slope`` times the number of the view plus ``base``.

    The number of a view is the first number in its name.
    """
    offsets = [view.offset for view in members]
    if len(set(offsets)) == 1:
        return 0, offsets[0]
    numbers = list(map(_number, members))
    rise = numbers[1] - numbers[0]
    slope = (offsets[1] - offsets[0]) // rise if rise else 0
    base = offsets[0] - slope * numbers[0]
    linear = all(offset == base + slope * number for offset, number in zip(offsets, numbers, strict=True))
    return (slope, base) if linear else None


def _number(view: View) -> int:
    parts = natural(view.name)
    return parts[1][0] if len(parts) > 1 else 0


def repair_code(repaired: Sequence[View]) -> str:
    """Return the geometry of repaired views as lines of Python, to be pasted. ``n`` is the first number in the name.

    The views of one family with one shape and one stride take two lines: a comment, and an assignment. If more than
    :data:`MOST_CODE_OFFSETS` offsets follow no rule, the comment says how many are left out.
    """
    lines = []
    for members in _families(repaired):
        first, rule = members[0], _rule(members)
        who = first.name if len(members) == 1 else f"{one_of_each(members)} ({len(members):,} views)"
        who = " ".join(who.split())  # a name with a line break must not end the comment
        lines.append(f"# {who}, in elements of {counted(first.itemsize, 'byte')}")
        if rule is not None:
            slope, base = rule
            offset = " + ".join([f"{slope} * n"] * bool(slope) + [f"{base}"] * bool(base or not slope))
        else:
            named = {view.name: view.offset for view in members[:MOST_CODE_OFFSETS]}
            offset = f"{named}[name]"
            if len(members) > len(named):
                lines.append(f"# {len(members) - len(named):,} more offsets: see the option --json")
        lines.append(f"shape, stride, offset = {first.shape}, {first.stride}, {offset}")
    return "\n".join(lines)


def _claim(before: Claim, after: Claim) -> str:
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(after).__name__).lower()
    values = [(part.name, getattr(before, part.name), getattr(after, part.name)) for part in fields(after)]
    changes = [f"{name} {_shown(new)} instead of {_shown(old)}" for name, old, new in values if new != old]
    return f"claim {kind} of {after.view}: {joined(changes)}"


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def effect_words(findings: Sequence[Finding], views: Mapping[str, View]) -> str:
    """Return what a mistake does: one clause per kind of finding, with elements and bytes."""
    clauses = []
    for kind in KINDS:
        mine = [finding for finding in findings if finding.kind == kind]
        clauses += [_CLAUSES[kind](mine, views) if kind in _CLAUSES else KINDS[kind].meaning] if mine else []
    return ". ".join(clause[0].upper() + clause[1:] for clause in clauses) + "." if clauses else ""


def _bytes(findings: Sequence[Finding]) -> int:
    return sum(finding.bytes or 0 for finding in findings)


def _elements(findings: Sequence[Finding]) -> int:
    return sum(finding.elements or 0 for finding in findings)


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def _collision(findings: Sequence[Finding], views: Mapping[str, View]) -> str:
    sizes = {len(finding.views) for finding in findings}
    groups = "" if len(findings) == 1 else f"{len(findings):,} groups of {'up to ' if len(sizes) > 1 else ''}"
    size = _bytes(findings)
    return f"{groups}{max(sizes)} views share bytes that they must not share: {counted(size, 'byte')}"


def _misplaced(findings: Sequence[Finding], views: Mapping[str, View]) -> str:
    wrong = _elements(findings)
    names = {finding.views[0] for finding in findings}
    total = sum(views[name].num_elements for name in names)
    if len(findings) > len(names) or wrong > total:  # a copy with other steps is counted in blocks
        return f"{counted(wrong, 'element')} {_be(wrong)} misplaced"
    if wrong == total > 1:
        return f"all {total:,} elements are misplaced"
    return f"{wrong:,} of {counted(total, 'element')} ({_percent(wrong, total)}) {_be(wrong)} misplaced"


def _percent(part: int, whole: int) -> str:
    number = round(100 * part / whole)
    return "less than 1 %" if number == 0 else "more than 99 %" if number == 100 else f"{number} %"


def _counts(singular: str, plural: str, size: str = "byte"):
    """Return a function that counts bytes or elements of findings: ``1 byte`` + singular, ``2 bytes`` + plural."""

    def clause(findings: Sequence[Finding], views: Mapping[str, View]) -> str:
        number = _bytes(findings) if size == "byte" else _elements(findings)
        return f"{counted(number, size)} {singular if number == 1 else plural}" if number else f"some {size}s {plural}"

    return clause


_CLAUSES = {  # the clause of any other kind is the meaning in its record
    "collision": _collision,
    "misplaced": _misplaced,
    "permuted": _counts("lies at the place of another one", "have the right bytes in another order", "element"),
    "out_of_bounds": _counts("lies outside the storage", "lie outside the storage"),
    "truncated": _counts("of a block is left out", "of blocks are left out"),
    "oversized": _counts("of another block is taken", "of other blocks are taken"),
    "self_overlap": _counts("stands for two elements of one view", "stand for two elements of one view"),
    "ambiguous": lambda findings, views: "readings of one shape lie on different bytes",
    "unaligned": _counts("starts off the boundary", "start off the boundary", "row"),
    "index_space": lambda findings, views: (
        f"{_elements(findings):,} {'id or address does' if _elements(findings) == 1 else 'ids or addresses do'} not fit"
    ),
}
