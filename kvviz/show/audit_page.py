"""Renders an audit as one HTML page: the verdict, then cause, picture, repair and proof of each mistake.

At the end is a folded list of all findings. The page needs no network, and works without JavaScript. If the page leaves
something out, it says how much.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from kvviz.audit.budget import limited
from kvviz.audit.causes import CAUSES, UNKNOWN, Diagnosis, diagnose
from kvviz.audit.claims import Claim
from kvviz.audit.diagnosis_text import EMPTY, first_place, in_order, proof_of, verdict
from kvviz.audit.findings import KINDS, Audit, Finding
from kvviz.audit.guesses import natural
from kvviz.audit.repair_words import counted, effect_words, repair_code
from kvviz.audit.view import View
from kvviz.show.live_map import clipped
from kvviz.show.place_picture import STYLE, picture
from kvviz.show.place_window import place_window

MOST_CAUSES, MOST_FINDINGS, MOST_NAMES, MOST_OTHERS = 8, 400, 400, 4
"""The page shows at most this many causes, findings, names of views, and lines of a repair."""

MOST_TEXT = 2_000
"""Largest number of letters of one finding, repair or note."""


def render_html(
    result: Audit,
    views: Sequence[View],
    claims: Sequence[Claim] = (),
    title: str = "",
    diagnoses: Sequence[Diagnosis] | None = None,
    lessons: Mapping[str, str] | None = None,
) -> str:
    """Return the page for an audit of ``views`` and ``claims``. The same audit gives the same page.

    Args:
        diagnoses: the result of ``diagnose`` for this audit. If it is None, this function calls ``diagnose``. If it is
            empty, the page has no causes.
        lessons: addresses of the lessons, by the number of the notebook: ``{"04": "reports/04_root_cause.html"}``. If a
            lesson has no address, the page has its name but no link.
    """
    diagnoses = diagnose(views, claims, result) if diagnoses is None else diagnoses
    with limited():
        return _page(result, views, claims, title, diagnoses, lessons or {})


def _page(
    result: Audit,
    views: Sequence[View],
    claims: Sequence[Claim],
    title: str,
    diagnoses: Sequence[Diagnosis],
    lessons: Mapping[str, str],
) -> str:
    """Return the page. If a picture would exceed the work limit, the page has a sentence instead of this picture."""
    name = clipped(f"kvviz audit{': ' + title if title else ''}")
    shown = diagnoses or _undiagnosed(result, views)
    repaired = {view.name: view for one in diagnoses for view in one.repaired}
    proof = proof_of(diagnoses)
    parts = [_head(result, views, diagnoses, name)]
    for number, one in enumerate(shown[:MOST_CAUSES], 1):
        figure = _figure(one, views, claims, repaired)
        parts.append(_section(number if len(shown) > 1 else 0, one, figure, proof, lessons))
    parts.append(_more(len(shown) - MOST_CAUSES, "more cause"))
    parts += [_findings(result.findings)] if result.findings else []
    parts.append(_judged(result, views, claims))
    body = "\n".join(filter(None, parts))
    script = f"<script>{_asset('copy.js')}</script>\n" if "<button" in body else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(name)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE if '<figure' in body else ''}{_asset('audit_page.css')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{script}</body>\n</html>\n"
    )


def _undiagnosed(result: Audit, views: Sequence[View]) -> list[Diagnosis]:
    """Return one diagnosis with all findings, and without a cause. If there are no findings, return no diagnosis."""
    if not result.findings:
        return []
    effect = effect_words(result.findings, {view.name: view for view in views})
    return [Diagnosis(UNKNOWN, "These findings were not diagnosed.", effect, (), result.findings, "None is known.")]


@cache
def _asset(name: str) -> str:
    return files("kvviz.show").joinpath("assets", name).read_text(encoding="utf-8")


def _head(result: Audit, views: Sequence[View], diagnoses: Sequence[Diagnosis], name: str) -> str:
    text = verdict(result, diagnoses) if views else EMPTY
    mood = "good" if result.clean and views else "bad"
    first, _, rest = text.partition(". ")
    lines = [f"<h1>{escape(name)}</h1>", f'<p class="verdict {mood}">{escape(first.rstrip(".").capitalize())}.</p>']
    return "\n".join([*lines, *([f"<p>{escape(rest)}</p>"] if rest else [])])


def _figure(one: Diagnosis, views: Sequence[View], claims: Sequence[Claim], repaired: Mapping[str, View]) -> str:
    """Return the picture of a diagnosis, or the reason why there is none."""
    try:
        window = place_window(one, views, claims, repaired)
    except ValueError as error:
        return f'<p class="soft">No picture: {escape(clipped(str(error), 400))}.</p>'
    if window is None:
        return '<p class="soft">No picture: this mistake is about numbers, not about a place in a storage.</p>'
    return picture(window, alone=len({view.storage.name for view in views}) == 1)


def _section(number: int, one: Diagnosis, figure: str, proof: str, lessons: Mapping[str, str]) -> str:
    """Return the section of one diagnosis. If there is only one diagnosis, ``number`` is 0."""
    cause = CAUSES.get(one.cause)
    meaning = cause.meaning if cause else one.text
    lines = [
        f"<section>\n<h2>{f'Cause {number}: ' if number else ''}{escape(meaning)}</h2>",
        f"<p>{escape(clipped(one.text, MOST_TEXT))}</p>" if cause else "",
        f"<p>{escape(clipped(one.effect, MOST_TEXT))}</p>",
        f'<p class="first"><b>First place:</b> {escape(clipped(first_place(one.findings), MOST_TEXT))}</p>',
        figure,
        _repair(one, proof),
        _others(one.others),
        _lesson(cause.lesson, cause.like, lessons) if cause else "",
        _names(one.views),
    ]
    return "\n".join(line for line in lines if line) + "\n</section>"


def _repair(one: Diagnosis, proof: str) -> str:
    """Return the repair. Repaired numbers stand in a box with a button that copies them."""
    lines = one.repair.split("; ")
    if not one.proved:
        return f"<h3>Repair</h3>\n{_paragraphs(lines)}"
    claims = [line for line in lines if line.startswith("claim ")]
    code = repair_code(one.repaired) if one.repaired else "\n".join(lines)
    return (
        f'<h3>Repair</h3>\n<div class="copy"><pre tabindex="0">{escape(_cut(code, 4 * MOST_TEXT))}</pre>'
        f'<button type="button" hidden>Copy</button></div>{_paragraphs(claims) if one.repaired else ""}\n'
        f'<p class="good"><b>Proof:</b> {escape(proof)}</p>'
    )


def _paragraphs(lines: Sequence[str]) -> str:
    shown = "".join(f"<p>{escape(clipped(line, MOST_TEXT))}</p>" for line in lines[:MOST_OTHERS])
    return shown + _more(len(lines) - MOST_OTHERS, "more repair")


def _cut(text: str, most: int) -> str:
    """Return a text of several lines. If it has more than ``most`` letters, cut it, and say how many are left out."""
    return text if len(text) <= most else f"{text[:most]}\n# {len(text) - most:,} more letters: see the option --json"


def _others(others: Sequence[str]) -> str:
    if not others:
        return ""
    items = "".join(f"<li>{escape(clipped(other, MOST_TEXT))}</li>" for other in others)
    return f"<p>Another cause fits the same numbers. How to find the right cause:</p>\n<ul>{items}</ul>"


def _lesson(number: str, like: str, lessons: Mapping[str, str]) -> str:
    address = lessons.get(number)
    name = f"notebook {number}"
    link = f'<a href="{escape(address)}">{name}</a>' if address else name
    more = f" Public report of the same kind of mistake: {escape(like)}." if like else ""
    return f'<p class="lesson"><b>Lesson:</b> {link} explains this kind of mistake.{more}</p>'


def _names(names: Sequence[str]) -> str:
    """Return a folded list of view names."""
    if len(names) < 2:
        return ""
    ordered = sorted(names, key=natural)
    shown = "".join(f"<li>{escape(clipped(name))}</li>" for name in ordered[:MOST_NAMES])
    left = len(names) - MOST_NAMES
    more = f"<p>{left:,} more: <code>kvviz audit --json</code> lists all.</p>" if left > 0 else ""
    return f'<details><summary>The {len(names):,} views</summary>\n<ul class="names">{shown}</ul>{more}</details>'


def _findings(findings: Sequence[Finding]) -> str:
    """Return all findings as a folded list, numbered as ``kvviz audit -v`` numbers them."""
    ordered, kinds = in_order(findings), Counter(finding.kind for finding in findings)
    items = "".join(
        f'<li value="{number}"><pre tabindex="0">{escape(_cut(str(finding), MOST_TEXT))}</pre></li>'
        for number, finding in enumerate(ordered[:MOST_FINDINGS], 1)
    )
    more = _more(len(ordered) - MOST_FINDINGS, "more finding")
    meanings = "".join(
        f"<li>{number:,} x <b>{kind}</b>: {escape(KINDS[kind].meaning)}.</li>"
        for kind, number in sorted(kinds.items(), key=lambda one: list(KINDS).index(one[0]))
    )
    one_by_one = f"<summary>{counted(len(ordered), 'finding')}, one by one</summary>\n<ol>{items}</ol>{more}"
    return f"<section>\n<h2>All findings</h2>\n<ul>{meanings}</ul>\n<details>{one_by_one}</details>\n</section>"


def _judged(result: Audit, views: Sequence[View], claims: Sequence[Claim]) -> str:
    """Return the section about what was judged: numbers of views and claims, all checks, and the notes."""
    storages = len({view.storage for view in views})
    what = f"{counted(len(views), 'view')} in {counted(storages, 'storage')}, {counted(len(claims), 'claim')}."
    notes = f"<h3>Notes</h3>\n{_listed(result.notes)}" if result.notes else ""
    return f"<section>\n<h2>What was judged</h2>\n<p>{what}</p>\n{_listed(result.checked)}\n{notes}</section>"


def _listed(lines: Sequence[str]) -> str:
    shown = "".join(f"<li>{escape(clipped(line, MOST_TEXT))}</li>" for line in lines[:MOST_NAMES])
    return f"<ul>{shown}</ul>" + _more(len(lines) - MOST_NAMES, "more line")


def _more(number: int, what: str) -> str:
    """Return the sentence that says how much a page leaves out. If ``number`` is not positive, return ""."""
    return f"<p>{counted(number, what)}: <code>kvviz audit -v</code> prints all.</p>" if number > 0 else ""
