"""Writes an audit as text for a terminal: the verdict, and for each mistake its cause, effect, first place and repair.

A cache of 80 layers with one mistake takes at most 15 lines. ``kvviz audit -v`` adds all findings.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvviz.audit.causes import CAUSES, UNKNOWN, Cause, Diagnosis
from kvviz.audit.findings import ARROW, KINDS, Audit, Finding
from kvviz.audit.guesses import natural
from kvviz.audit.repair_words import counted

COLUMNS = 100
"""Width of the text in characters."""

MOST_DIAGNOSES, MOST_REPAIRS, MOST_FINDINGS, MOST_NOTES = 3, 4, 3, 3
"""The short text prints at most this many diagnoses, repairs per diagnosis, unexplained findings, and notes.

With ``-v``, the text prints all.
"""

PROVED, PROVED_ALL = (f"Audited with {repair}: the same claims are clean." for repair in ("this repair", "all repairs"))
PROVED_PART = "Audited with this repair: these views are clean. Other views still have findings."

EMPTY = "empty: the file has no views, so nothing was audited. Did write_views run after the cache was allocated?"


def audit_text(
    result: Audit, diagnoses: Sequence[Diagnosis] = (), verbose: bool = False, option: str = "option -v"
) -> str:
    """Return the text of an audit and its diagnoses.

    Args:
        diagnoses: what ``diagnose`` returned for this audit; empty if nothing was diagnosed.
        verbose: if True, the text also lists every finding, sorted by kind and view: layer 2 before layer 10.
        option: the option that prints everything. The text names this option if it leaves something out.
    """
    known = [one for one in diagnoses if one.cause != UNKNOWN]
    more = known and len(result.findings) > 1 and not (verbose or result.clean)
    lines = textwrap.wrap(verdict(result, diagnoses) + (f"; {option} lists them" if more else ""), COLUMNS)
    shown = known if verbose else known[:MOST_DIAGNOSES]
    proof = proof_of(diagnoses)
    for one in shown:
        lines += [*([""] if len(known) > 1 else []), *_diagnosis(one, proof, verbose, option)]
    if len(known) > len(shown):
        lines += ["", f"{counted(len(known) - len(shown), 'more cause')}: {option} prints all."]
    explained = {finding for one in known for finding in one.findings}
    rest = in_order([finding for finding in result.judged if finding not in explained])
    if verbose:
        listed = [f"{number}. {finding}" for number, finding in enumerate(in_order(result.findings), 1)]
        lines += ["", *listed, ""] if listed else []
    else:
        lines += [line for finding in rest[:MOST_FINDINGS] for line in str(finding).splitlines()]
        lines += [f"{counted(len(rest) - MOST_FINDINGS, 'more finding')}: {option} prints all."] * (
            len(rest) > MOST_FINDINGS
        )
    lines += _row("open", *_not_judged(result, verbose, option))
    lines += _checks(result) if verbose or result.clean or len(rest) else []
    notes = result.notes if verbose else result.notes[:MOST_NOTES]
    lines += [line for note in notes for line in _row("note", note + ".")]
    left = len(result.notes) - len(notes)
    return "\n".join(lines + ([f"{counted(left, 'more note')}: {option} prints all."] if left else []))


def _checks(result: Audit) -> list[str]:
    """Return what was checked: one row for each outcome."""
    lines, held = [], [one for one in result.checked if not one.startswith(_OUTCOMES)]
    for outcome in _OUTCOMES:
        mine = [one.removeprefix(outcome) for one in result.checked if one.startswith(outcome)]
        label = {"not judged: ": "unjudged", "warning: ": "not met"}.get(outcome, "failed")
        lines += _row(label, f"{'; '.join(mine)}." if mine else "")
    return lines + _row("holds", f"{'; '.join(held)}." if held else "")


_OUTCOMES = ("failed: ", "warning: ", "not judged: ")
"""Beginnings of a sentence about checks that did not hold."""


def _not_judged(result: Audit, verbose: bool, option: str) -> Iterator[str]:
    """Yield a sentence for each check that took too much work. ``-v`` lists these checks with the findings."""
    if verbose:
        return
    for finding in result.not_judged[:MOST_FINDINGS]:
        yield f"{finding.kind} of {finding.names}: {finding.text}."
    left = len(result.not_judged) - MOST_FINDINGS
    if left > 0:
        yield f"{counted(left, 'more check')} not judged: {option} prints all."


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings sorted by kind, then by the name of the first view: layer 2 before layer 10."""
    kinds = list(KINDS)
    return sorted(findings, key=lambda one: (kinds.index(one.kind), natural(one.views[0] if one.views else "")))


def verdict(result: Audit, diagnoses: Sequence[Diagnosis]) -> str:
    """Return the verdict in one sentence: clean, or how many causes explain how many findings."""
    if result.clean or not result.judged:
        return result.verdict
    if result.not_judged:
        rest = verdict(replace(result, findings=result.judged), diagnoses)
        return f"{counted(len(result.not_judged), 'check')} not judged: too much work. The rest is {rest}"
    known, total = [one for one in diagnoses if one.cause != UNKNOWN], len(result.findings)
    if not known:
        return f"not clean: {counted(total, 'finding')}, and no known cause explains {'it' if total == 1 else 'them'}"
    explained = len({finding for one in known for finding in one.findings})
    causes = "one cause explains" if len(known) == 1 else f"{len(known)} causes explain"
    share = f"{explained:,} of {total:,}" if explained < total else f"all {total:,}" if total > 1 else "the only"
    return f"not clean: {causes} {share} finding{'' if total == 1 else 's'}"


def proof_of(diagnoses: Sequence[Diagnosis]) -> str:
    """Return the sentence that the text prints after a proved repair."""
    if not all(one.proved for one in diagnoses):
        return PROVED_PART
    return PROVED_ALL if len(diagnoses) > 1 else PROVED


def _diagnosis(one: Diagnosis, proof: str, verbose: bool, option: str) -> Iterator[str]:
    warning = all(finding.severity == "warning" for finding in one.findings)
    yield from _row("warning" if warning else "cause", one.text)
    yield from _row("effect", one.effect)
    yield from _row("first", first_place(one.findings))
    repairs = one.repair.split("; ")
    left = 0 if verbose else len(repairs) - MOST_REPAIRS
    more = [f"{counted(left, 'more repair')}: {option} prints all."] if left > 0 else []
    shown = repairs if left <= 0 else repairs[:MOST_REPAIRS]
    yield from _row("repair", *(["Only if speed matters:"] if warning and one.proved else []), *shown, *more)
    yield from _row("proof", proof if one.proved else "")
    yield from _row("or", *one.others)
    yield from _row("lesson", lesson_of(CAUSES[one.cause]))


def lesson_of(cause: Cause) -> str:
    """Return the lesson about a cause, and a public report of the same mistake."""
    return f"notebook {cause.lesson}.{f' {cause.like} was the same kind of mistake.' if cause.like else ''}"


def _row(label: str, *paragraphs: str) -> list[str]:
    """Return a label and its paragraphs as wrapped lines. If there is no text, return no lines."""
    lines: list[str] = []
    for text in filter(None, paragraphs):
        before = " " * 9 if lines else f"{label:9}"
        lines += textwrap.wrap(text, COLUMNS, initial_indent=before, subsequent_indent=" " * 9, break_on_hyphens=False)
    return lines


def first_place(findings: Sequence[Finding]) -> str:
    """Return a sentence about the lowest place of some findings, for example where an element lies and belongs."""
    first = first_finding(findings)
    if first is None:
        return next((finding.text for finding in findings if finding.text), "")
    if first.drawing == ARROW and len(first.example) > 1:
        lies, belongs, *owner = first.example
        there = f" Byte {lies.start_bytes:,} belongs to {owner[0].text}." if owner else ""
        where = f"lies at byte {lies.start_bytes:,} of the storage and belongs at byte {belongs.start_bytes:,}"
        return f"{lies.text} {where}.{there}"
    if first.kind == "collision" and len(first.example) > 1:
        byte = max(place.start_bytes for place in first.example[:2])
        return f"{first.example[0].text} and {first.example[1].text} share byte {byte:,} of the storage."
    if first.kind == "oversized" and len(first.example) > 1:
        taker, owner = first.example[:2]
        byte = max(taker.start_bytes, owner.start_bytes)
        return f"{taker.text} takes byte {byte:,} of the storage, which belongs to {owner.text}."
    place = first.example[0]
    words = _PLACES.get(first.kind, "{kind}: {place} at byte {byte:,}.")
    return words.format(kind=first.kind, view=first.views[0], place=place.text, byte=place.start_bytes)


_PLACES = {  # sentences about the first place of a finding; first_place writes the sentences of the other kinds itself
    "out_of_bounds": "{place} lies outside the storage, at byte {byte:,} counted from the start of the storage.",
    "truncated": "{view} leaves out {place}, which lies at byte {byte:,} of the storage.",
    "oversized": "{place} takes byte {byte:,} of the storage, which does not belong to it.",
    "self_overlap": "{place} shares byte {byte:,} of the storage with another element of the same view.",
    "unaligned": "{place} starts at byte {byte:,} of the storage, which is not a multiple of the boundary.",
    "index_space": "{place} at byte {byte:,} of the storage has an id or an address that does not fit.",
}


def first_finding(findings: Sequence[Finding]) -> Finding | None:
    """Return the finding with the lowest place, or None if no finding has a place.

    Findings that say where an element belongs have priority. Findings about blocks of a transfer come second.
    """
    placed = [finding for finding in findings if finding.example]
    arrows = [finding for finding in placed if finding.drawing == ARROW and len(finding.example) > 1]
    blocks = [finding for finding in placed if finding.kind in ("truncated", "oversized")]
    return min(arrows or blocks or placed, key=lambda one: (_start(one), natural(one.views[0])), default=None)


def _start(finding: Finding) -> int:
    return finding.example[0].start_bytes
