"""Page: an executed notebook as one HTML file that asks the network for nothing, and the list of such pages.

Nothing is executed here and no clock is read: the same outputs and the same :class:`Frame` give the same bytes.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from nbconvert import HTMLExporter
from nbconvert.filters import strip_ansi
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from kvviz.report.paths import shortener
from kvviz.report.prose import Prose, reading_minutes
from kvviz.report.workshop import SOLUTION, hole, solved, tagged

TEMPLATE = Path(__file__).resolve().parent / "template"
CUSTOMARY = ("kernels", "machine", "torch", "triton", "python", "kvviz")
"""The labels of a machine, in the order in which a page shows them; others follow."""

LIVE = "A live control stands here in JupyterLab: open the notebook to move it."
_WIDGET = "application/vnd.jupyter.widget-view+json"
_SHOWN = ("text/html", "text/markdown", "text/latex", "image/svg+xml", "image/png", "image/jpeg", "text/plain")
_LEADING_AWAY = re.compile(r"<(?:meta|base)(?=[\s/>\x00])[^>]*>?", re.IGNORECASE)
"""Tags of an output that move the whole page elsewhere, or its links."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}(?=>)")


_STEPS = re.compile(r'<nav aria-label="([^"]*)" class="kvr-steps">.*?</nav>', re.DOTALL)


@dataclass(frozen=True)
class Link:
    """A page by file name (relative to the page that links to it) and title."""

    name: str
    title: str

    @property
    def href(self) -> str:
        return quote(self.name)


@dataclass(frozen=True)
class Frame:
    """What surrounds every page of one run.

    Args:
        folder: the notebooks' folder; local pictures come from it, and its path is kept out of the pages.
        machine: label to value, see :data:`CUSTOMARY`.
        date: the day of the run, ISO 8601: the only clock of a page.
    """

    folder: Path
    machine: Mapping[str, str]
    date: str

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """``machine`` in the order in which it is shown, paths shortened."""
        short = shortener(self.folder)
        labels = [label for label in CUSTOMARY if label in self.machine]
        labels += [label for label in self.machine if label not in CUSTOMARY]
        return tuple((label, short(str(self.machine[label]))) for label in labels)


@dataclass(frozen=True)
class Entry:
    """One line of the list of pages. ``promise`` is harmless inline HTML, everything else plain text.

    ``minutes`` and ``reading`` say how long running and reading it takes.
    """

    name: str
    title: str
    promise: str
    minutes: str
    reading: str
    seconds: str
    ran: bool
    status: str
    link: Link | None


def render_page(executed: NotebookNode, title: str, frame: Frame, before: Link | None, after: Link | None) -> str:
    """Return the page of an executed notebook, with links to the pages ``before`` and ``after`` it.

    Exercises are shown as they are given; their solutions, and what checks say of these, are folded away.

    Raises:
        ValueError: a solution is not marked as :mod:`kvviz.report.workshop` says.
        nbconvert.filters.markdown_mistune.InvalidNotebook: a picture attached to a cell is missing.
    """
    notebook, prose = deepcopy(executed), Prose(frame.folder)
    notebook.metadata.title = title
    notebook.metadata.pop("widgets", None)
    notebook.cells = [shown for cell in notebook.cells for shown in _with_holes(cell)]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.metadata.kvviz_html = prose.render(cell.source, cell.get("attachments"))
        elif cell.cell_type == "code":
            cell.outputs = _presentable(cell.outputs, prose, shortener(frame.folder))
    reading = f"about {reading_minutes([cell.source for cell in executed.cells])} min"
    facts = (("to read", reading), *frame.facts)
    around = {"before": before, "after": after, "headings": prose.headings, "facts": facts, "date": frame.date}
    body, _ = _exporter().from_notebook_node(notebook, resources={"inlining": {"css": []}, "kvviz": around})
    return body


def relink(page: str, before: Link | None, after: Link | None) -> str:
    """Return ``page``, as :func:`render_page` made it at some time, with links to other neighbours; else unchanged."""
    parts = Environment(loader=FileSystemLoader(TEMPLATE)).get_template("parts.html.j2").module
    return _STEPS.sub(lambda found: _quotes(str(parts.steps(before, after, found[1]))), page)


def _quotes(html: str) -> str:
    """Quotes in text as nbconvert leaves them; addresses have none."""
    return html.replace("&#39;", "'").replace("&#34;", '"')


def render_index(entries: Sequence[Entry], frame: Frame, total: str, together: str) -> str:
    """Return the list of pages; ``total`` is a sentence about the run, ``together`` one about the minutes of all."""
    loader = FileSystemLoader(TEMPLATE)
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("pages.html.j2")
    css = Markup((TEMPLATE / "report.css").read_text(encoding="utf-8"))
    first = next((entry.link for entry in entries if entry.link), None)
    return template.render(
        entries=entries, frame=frame, total=total, together=together, first=first, css=css, promise=Markup
    )


def _exporter() -> HTMLExporter:
    quiet = logging.getLogger(__name__)  # nbconvert grumbles about pictures in outputs that have no description
    quiet.setLevel(logging.ERROR)
    return HTMLExporter(
        template_name=TEMPLATE.name,
        extra_template_basedirs=[str(TEMPLATE.parent)],
        exclude_output_prompt=True,
        log=quiet,
    )


def _with_holes(cell: NotebookNode) -> list[NotebookNode]:
    """A cell as it is, or a solution's cell as its hole and its folded solution."""
    if cell.cell_type != "code" or not tagged(cell, SOLUTION):
        return [cell]
    folded = f"<details><summary>A solution</summary>\n\n```python\n{solved(cell.source)}\n```\n\n</details>"
    cell.source = hole(cell.source)
    return [cell, new_markdown_cell(folded, id=f"{cell.id}-solution"[-64:])]


def _presentable(outputs: Sequence, prose: Prose, short: Callable[[str], str]) -> list[NotebookNode]:
    """``outputs`` without what a page cannot show or must not tell; live controls leave one note a cell."""
    kept = [_presentable_data(output, prose, short) if "data" in output else output for output in outputs]
    for output in kept:
        if "text" in output:
            output.text = short(output.text)
        if "traceback" in output:
            output.traceback = short(strip_ansi("\n".join(output.traceback))).split("\n")
    live = any(_WIDGET in output.get("data", {}) for output in outputs)
    return [output for output in kept if output.get("data", True)] + ([_note(LIVE)] if live else [])


def _presentable_data(output: NotebookNode, prose: Prose, short: Callable[[str], str]) -> NotebookNode:
    data = {kind: output.data[kind] for kind in _SHOWN if kind in output.data}
    if _WIDGET in output.data:
        data.pop("text/plain", None)
    for kind in ("text/markdown", "text/latex"):
        if kind in data and "text/html" not in data:
            data["text/html"] = prose.render(data[kind], listed=False)
    for kind in ("text/html", "image/svg+xml", "text/plain"):
        if kind in data:
            data[kind] = _ADDRESS.sub(" at 0x…", short(data[kind]))
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:  # a space in its place, so that what is left cannot close up to such a tag
            data[kind] = _LEADING_AWAY.sub(" ", data[kind])
    return NotebookNode({**output, "data": NotebookNode(data)})


def _note(text: str) -> NotebookNode:
    data = NotebookNode({"text/html": f'<p class="kvr-note">{text}</p>'})
    return NotebookNode({"output_type": "display_data", "metadata": NotebookNode(), "data": data})
