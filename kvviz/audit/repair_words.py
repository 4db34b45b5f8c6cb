"""Writes the texts about repaired views and claims, and about the effect of a mistake.

Example of a repair: ``layer n K scale (n = 0 to 79, in elements of 4 bytes, old -> new): offset 32 -> 8448 n + 32``.
``n`` is the first number in the name of the view.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from kvviz.audit.claims import Claim, names_in
from kvviz.audit.findings import KINDS, Finding
from kvviz.audit.guesses import family_of, natural, one_of_each
from kvviz.audit.view import View

MOST_OFFSETS = 4
"""A repair lists at most this many offsets, if the offsets do not follow a rule."""

MOST_CODE_OFFSETS = 100
"""The Python code of a repair lists at most this many offsets, if the offsets do not follow a rule."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 byte``, ``2,048 bytes``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def joined(parts: Sequence[str], word: str = "and") -> str:
    """Return parts as a list in a sentence: ``a, b and c``."""
    return f" {word} ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)


def repair_words(repaired: Sequence[View], claims: Sequence[tuple[Claim, Claim]], views: Mapping[str, View]) -> str:
    """Return the changed numbers of repaired views and claims as text. If nothing was repaired, return "".

    Args:
        claims: pairs of a claim and the repaired claim.
        views: the views before the repair, by name.
    """
    families = [_Repair.of(members, views) for members in _families(repaired)]
    common, stays = {family.common for family in families}, {family.stays for family in families}
    if len(families) > 1 and len(common) == 1 and "" not in common:
        header, alike = common.pop(), len(stays) == 1
        lines = [f"{header}{stays.pop() if alike else ''}:"]
        lines += [f"{family.who}: {family.changes}{'' if alike else family.stays}" for family in families]
    else:
        lines = [family.line for family in families]
    return "; ".join([*lines, *dict.fromkeys(filter(None, (_claim(old, new) for old, new in claims)))])


def _families(repaired: Sequence[View]) -> list[list[View]]:
    """Group views into families: names differ only in numbers; shape, stride, element size and storage are equal."""
    families: dict[tuple, list[View]] = {}
    for view in sorted(repaired, key=lambda one: natural(one.name)):
        key = (family_of(view.name), view.shape, view.stride, view.itemsize, view.storage.name)
        families.setdefault(key, []).append(view)
    return list(families.values())


@dataclass(frozen=True)
class _Repair:
    """The repair of one family of views, as parts of a line.

    Attributes:
        who: the name of the views: ``layer n K scale``.
        common: the numbers of the views, and the unit: ``n = 0 to 79, in elements of 4 bytes``.
        changes: the numbers that change: ``offset 32 -> 8448 n + 32``.
        stays: the numbers that do not change: ``, shape stays``.
    """

    who: str
    common: str
    changes: str
    stays: str = ""

    @property
    def line(self) -> str:
        """Return the repair of this family alone."""
        return f"{self.who}{f' ({self.common}{self.stays})' if self.common else ''}: {self.changes}"

    @classmethod
    def of(cls, members: Sequence[View], views: Mapping[str, View]) -> "_Repair":
        """Return the repair of a family. ``views`` are the views before the repair, by name."""
        new, old = readable(members), readable([views[view.name] for view in members])
        who = new[0].name if len(new) == 1 else one_of_each(new)
        if 0 in new[0].shape:
            return cls(who, "", "write nothing, and skip slots below 0")
        pairs = [_numbers(old, new, name) for name in ("shape", "offset", "strides")]
        unit = "in bytes" if new[0].itemsize == 1 else f"in elements of {new[0].itemsize} bytes"
        changed = [(name, before, after) for name, before, after in pairs if before != after]
        stays = [name for name, before, after in pairs if before == after]
        if {one.itemsize for one in old} != {new[0].itemsize}:  # old numbers count another unit
            size = counted(old[0].itemsize, "byte")
            changes = [f"{name} {after}" for name, _, after in pairs]
            changes.append(
                f"instead of {', '.join(f'{name} {before}' for name, before, _ in pairs)} in elements of {size}"
            )
            stays = []
        else:
            changes = [f"{name} {before} -> {after}" for name, before, after in changed]
        changes += [
            f'storage "{a.storage.name}" of {a.storage.nbytes} bytes -> "{b.storage.name}" of at least '
            f"{b.storage.nbytes} bytes"
            for a, b in [(old[0], new[0])]
            if a.storage != b.storage
        ]
        changes += ["read_only true, if nothing writes through this view"] * (new[0].read_only > old[0].read_only)
        said = [_range_of_n(new), unit, "old -> new" if any(" -> " in one for one in changes) else ""]
        kept = f", {joined(stays)} {'stays' if len(stays) == 1 else 'stay'}" if stays else ""
        return cls(who, ", ".join(filter(None, said)), ", ".join(changes), kept)


def readable(views: Sequence[View]) -> list[View]:
    """Return views with the stride that a reader expects along each axis of size 1.

    No element shows such a stride, so any number is right. A reader expects the stride of a dense tensor. If views
    differ in such a stride only, the strides stay as they are.
    """
    made = []
    for view in views:
        stride = list(view.stride)
        for axis in reversed(range(len(stride))):
            if view.shape[axis] == 1:
                stride[axis] = stride[axis + 1] * view.shape[axis + 1] if axis + 1 < len(stride) else 1
        made.append(replace(view, stride=tuple(stride)))
    return made


def _numbers(old: Sequence[View], new: Sequence[View], name: str) -> tuple[str, str, str]:
    """Return the name of some numbers of a view, and these numbers before and after the repair."""
    if name == "offset":
        return name, _offsets(old), _offsets(new)
    before, after = ({view.stride if name == "strides" else view.shape for view in views} for views in (old, new))
    return name, " or ".join(map(str, sorted(before)[:2])), str(after.pop())


def _range_of_n(members: Sequence[View]) -> str:
    """Return the numbers of several views: ``n = 0 to 79``, or one by one. For one view, return ""."""
    numbers = sorted({_number(view) for view in members})
    if len(members) == 1:
        return ""
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"n = {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"n = {numbers[0]}"
    shown = joined([str(number) for number in numbers[:MOST_OFFSETS]])
    return f"n = {shown}" if len(numbers) <= MOST_OFFSETS else f"n = {numbers[0]} to {numbers[-1]}, not all"


def _offsets(members: Sequence[View]) -> str:
    """Return the rule of the offsets, for example ``8448 n + 32``. If there is no rule, return the offsets."""
    rule, offsets = _rule(members), [view.offset for view in members]
    if rule is not None:
        slope, base = rule
        sign = f" {'+' if base > 0 else '-'} {abs(base)}" if base else ""
        return f"{slope} n{sign}" if slope else f"{base}"
    shown = joined([f"{offset}" for offset in offsets[:MOST_OFFSETS]])
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
    """Return the geometry of repaired views as Python code that a reader can paste.

    A family of views takes two lines: a comment, and an assignment. ``n`` is the first number in the name of a view. If
    more than :data:`MOST_CODE_OFFSETS` offsets follow no rule, a comment says how many offsets are left out.
    """
    lines = []
    for members in _families(repaired):
        (first,), rule = readable(members[:1]), _rule(members)
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
    """Return the changed fields of a claim as a text. If no field changes, it is empty."""
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(after).__name__).lower()
    values = [(part.name, getattr(before, part.name), getattr(after, part.name)) for part in fields(after)]
    changes = [f"{name} {_shown(old)} -> {_shown(new)}" for name, old, new in values if new != old]
    view = getattr(after, "view", "") or names_in(getattr(after, fields(after)[0].name))[0]
    return f"claim {kind} of {view} (old -> new): {joined(changes)}" if changes else ""


def _shown(value: object) -> str:
    return "none" if value in (None, ()) else str(list(value)) if isinstance(value, tuple) else str(value)


def effect_words(findings: Sequence[Finding], views: Mapping[str, View]) -> str:
    """Return sentences about what a mistake does: one sentence per kind of finding, with a number."""
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
    if len(findings) > len(names) or wrong > total:  # the claim StepAlike counts blocks, not elements
        return f"{counted(wrong, 'element')} {_be(wrong)} misplaced"
    if wrong == total > 1:
        return f"all {total:,} elements of {'this view' if len(names) == 1 else 'these views'} are misplaced"
    return f"{wrong:,} of {counted(total, 'element')} ({_percent(wrong, total)}) {_be(wrong)} misplaced"


def _percent(part: int, whole: int) -> str:
    number = round(100 * part / whole)
    return "less than 1 %" if number == 0 else "more than 99 %" if number == 100 else f"{number} %"


def _counts(singular: str, plural: str, size: str = "byte"):
    """Return a function that makes a sentence about findings: ``1 byte`` + singular, or ``2 bytes`` + plural."""

    def clause(findings: Sequence[Finding], views: Mapping[str, View]) -> str:
        number = _bytes(findings) if size == "byte" else _elements(findings)
        return f"{counted(number, size)} {singular if number == 1 else plural}" if number else f"some {size}s {plural}"

    return clause


_CLAUSES = {  # a kind that is not listed here gets the meaning from its record
    "collision": _collision,
    "misplaced": _misplaced,
    "permuted": _counts("lies at the place of another one", "have the right bytes in another order", "element"),
    "out_of_bounds": _counts("lies outside the storage", "lie outside the storage"),
    "truncated": _counts("of the content is left out", "of the content are left out"),
    "oversized": _counts("of a block with another id is taken", "of blocks with another id are taken"),
    "self_overlap": _counts("lies in several elements of one view", "lie in several elements of one view"),
    "ambiguous": lambda findings, views: "readings of one shape lie on different bytes",
    "unaligned": _counts("starts off the boundary", "start off the boundary", "row"),
    "index_space": lambda findings, views: (
        f"{_elements(findings):,} {'id or address does' if _elements(findings) == 1 else 'ids or addresses do'} not fit"
    ),
}
