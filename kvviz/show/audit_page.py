"""An audit as one HTML page: each finding in words, what it hits, and a map of its place. Needs no network."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from kvviz.audit.claims import Claim
from kvviz.audit.findings import KINDS, Audit, Finding
from kvviz.audit.view import View
from kvviz.show.byte_map import ByteMap
from kvviz.show.live_map import MapView
from kvviz.show.nearby import ROW_BYTES, map_around
from kvviz.show.pointing import POINTED, shows

MAX_MAPS = 16
"""Findings whose place is drawn; those behind are told in words."""

MAX_TITLE = 60

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
    """The page of an audit of ``views`` and ``claims``; the same audit gives the same page."""
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
    errors = sum(finding.severity != "warning" for finding in result.findings)
    warnings = len(result.findings) - errors
    verdict = f"{errors} finding{'s' * (errors != 1)}"
    if result.clean:
        verdict = str(replace(result, findings=())).splitlines()[0]
    verdict += f", {warnings} warning{'s' * (warnings != 1)} (legal and slow)" if warnings else ""
    return f'<h1>{escape(name)}</h1>\n<p class="{"good" if result.clean else "bad"}">{escape(verdict)}</p>'


def _section(number: int, finding: Finding, maps: dict[str, ByteMap] | None) -> str:
    more = f" and {len(finding.views) - 1} more" if len(finding.views) > 1 else ""
    first = finding.views[0] if finding.views else finding.storage
    first = first if len(first) <= MAX_TITLE else f"{first[:MAX_TITLE]}..."
    lines = [
        f"<section>\n<h2>{number}. {escape(f'{finding.kind}: {first}{more}')}</h2>",
        f'<p class="kind">{escape(finding.kind)}: {escape(KINDS.get(finding.kind, ""))}.</p>',
        f"<pre>{escape(str(finding))}</pre>",
        _hits(finding),
        _figure(finding, maps) if maps else _no_map(maps),
        _all_views(finding.views),
    ]
    return "\n".join(line for line in lines if line) + "\n</section>"


def _no_map(maps: dict | None) -> str:
    if maps is None:
        return f"<p>Maps are drawn for the first {MAX_MAPS} findings.</p>"
    return "<p>No map: this finding is about numbers, not about a place in a storage.</p>"


def _hits(finding: Finding) -> str:
    if not finding.hits:
        return ""
    cells = (f'<tr><td>{escape(what)}</td><td class="count">{count}</td></tr>' for what, count in finding.hits)
    head = "<tr><th>what lies there instead</th><th>elements</th></tr>"
    return f"<table>\n{head}\n" + "\n".join(cells) + "\n</table>"


def _all_views(names: Sequence[str]) -> str:
    """The names that the text leaves out."""
    if len(names) <= 4:
        return ""
    return f"<details><summary>All {len(names)} views</summary>\n{_listed(names)}\n</details>"


def _listed(lines: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"


def _maps(finding: Finding, views: Sequence[View], claims: Sequence[Claim]) -> dict[str, ByteMap]:
    """Where it is; and where it belongs, if that is another part of the storage."""
    landed = map_around(finding, views, claims)
    if landed is None:
        return {}
    meant = map_around(finding, views, claims, end=1) if finding.kind in ("misplaced", "permuted") else None
    if meant is None or meant == landed:
        return {"The place": landed}
    return {"Where the element is": landed, "Where it belongs": meant}


def _figure(finding: Finding, maps: dict[str, ByteMap]) -> str:
    """The living maps, their text twin folded beneath."""
    pointed = replace(finding, example=finding.example if finding.kind == "collision" else finding.example[:2])
    able = finding.kind in POINTED and any(shows(record, pointed) for record in maps.values())
    view = MapView(maps, row_bytes=ROW_BYTES, finding=pointed if able else None)
    return (
        f"{view.html}\n"
        f"<details><summary>The map as text</summary>\n"
        f'<pre class="map" tabindex="0">{escape(view.text)}</pre>\n</details>'
    )
