"""Renders an audit as one HTML page: each finding in words, and a map of its place. The page needs no network."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from kvviz.audit.claims import Claim
from kvviz.audit.findings import ARROW, FRAME, KINDS, MOST_NAMES, NO_MAP, Audit, Finding
from kvviz.audit.view import View
from kvviz.show.byte_map import ByteMap
from kvviz.show.live_map import MapView
from kvviz.show.nearby import ROW_BYTES, map_around
from kvviz.show.pointing import shows

MAX_MAPS = 16
"""Findings that get a map. More maps would make the page slow to open; later findings are text only."""

MAX_TITLE = 60
"""Characters of a view name in a heading."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --soft: #5a5a5a; --line: #c9c9c9; --bad: #a3260b;
  --good: #1d6b35; --jp-layout-color1: var(--paper); --jp-content-font-color1: var(--ink);
  --jp-content-font-color2: var(--soft); --jp-border-color1: var(--line) }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181b; --soft: #a9adb3; --line: #43474d;
  --bad: #ff9c80; --good: #7fd698 } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem; overflow-wrap: anywhere }
pre { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .9rem }
table { border-collapse: collapse } th, td { text-align: left; padding: .2rem .8rem .2rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere } td.count { text-align: right }
pre.map { white-space: pre } .kind { color: var(--soft) } .bad { color: var(--bad) }
.good { color: var(--good) }
"""


def render_html(result: Audit, views: Sequence[View], claims: Sequence[Claim] = (), title: str = "") -> str:
    """Return the page for an audit of ``views`` and ``claims``. The same audit gives the same page."""
    name = f"kvviz audit{': ' + title if title else ''}"
    parts = [_head(result, name)]
    for number, finding in enumerate(result.findings):
        maps = _maps(finding, views, claims) if number < MAX_MAPS else None
        parts.append(_section(number + 1, finding, maps))
    parts.append(f"<h2>What was checked</h2>\n{_listed(result.checked)}")
    parts += [f"<h2>Notes</h2>\n{_listed(result.notes)}"] if result.notes else []
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(name)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(result: Audit, name: str) -> str:
    return f'<h1>{escape(name)}</h1>\n<p class="{"good" if result.clean else "bad"}">{escape(result.verdict)}</p>'


def _section(number: int, finding: Finding, maps: dict[str, ByteMap] | None) -> str:
    """Return one finding. ``maps`` is empty if the finding has no place, and None if there are too many findings."""
    more = f" and {len(finding.views) - 1} more" if len(finding.views) > 1 else ""
    first = finding.views[0] if finding.views else finding.storage
    first = first if len(first) <= MAX_TITLE else f"{first[:MAX_TITLE]}..."
    lines = [
        f"<section>\n<h2>{number}. {escape(f'{finding.kind}: {first}{more}')}</h2>",
        f'<p class="kind">{escape(finding.kind)}: {escape(KINDS[finding.kind].meaning)}.</p>',
        f"<pre>{escape(str(finding))}</pre>",
        _hits(finding),
        _figure(finding, maps) if maps else _reason_for_no_map(finding, maps),
        _all_names(finding.views),
    ]
    return "\n".join(line for line in lines if line) + "\n</section>"


def _reason_for_no_map(finding: Finding, maps: dict | None) -> str:
    if finding.drawing == NO_MAP:
        return "<p>No map: a map shows only one element of a view per byte.</p>"
    if maps is None:
        return f"<p>Only the first {MAX_MAPS} findings have a map.</p>"
    return "<p>No map: this finding is about numbers, not about a place in a storage.</p>"


def _hits(finding: Finding) -> str:
    """Return a table of the owners on whose bytes the misplaced elements lie."""
    if not finding.hits:
        return ""
    rows = (f'<tr><td>{escape(owner)}</td><td class="count">{count}</td></tr>' for owner, count in finding.hits)
    head = "<tr><th>owner of the bytes</th><th>misplaced elements on them</th></tr>"
    return f"<table>\n{head}\n" + "\n".join(rows) + "\n</table>"


def _all_names(names: Sequence[str]) -> str:
    """Return a folded list of all view names, for a finding whose text shows only some of them."""
    if len(names) <= MOST_NAMES:
        return ""
    return f"<details><summary>All {len(names)} views</summary>\n{_listed(names)}\n</details>"


def _listed(lines: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"


def _maps(finding: Finding, views: Sequence[View], claims: Sequence[Claim]) -> dict[str, ByteMap]:
    """Return titles and maps: where the finding is, and where the element belongs if that is in another window."""
    landed = map_around(finding, views, claims)
    if landed is None:
        return {}
    meant = map_around(finding, views, claims, end=1) if finding.drawing == ARROW else None
    if meant is None or meant == landed:
        return {"The place": landed}
    return {"Where the element is": landed, "Where it belongs": meant}


def _figure(finding: Finding, maps: dict[str, ByteMap]) -> str:
    """Return the interactive maps, and the same maps as folded text."""
    pointed = replace(finding, example=finding.example if finding.drawing == FRAME else finding.example[:2])
    able = any(shows(record, pointed) for record in maps.values())
    view = MapView(maps, row_bytes=ROW_BYTES, finding=pointed if able else None)
    return (
        f"{view.html}\n"
        f"<details><summary>The map as text</summary>\n"
        f'<pre class="map" tabindex="0">{escape(view.text)}</pre>\n</details>'
    )
