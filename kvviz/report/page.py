"""Makes one HTML page from an executed notebook, and the list of all pages. The pages need no network.

This module runs no code cell and reads no clock. The same outputs and the same :class:`Frame` give the same bytes.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from nbconvert import HTMLExporter
from nbconvert.filters import strip_ansi
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from kvviz.report.folding import parts_of
from kvviz.report.paths import shortener
from kvviz.report.prose import Heading, Prose, link_pages, plain, reading_minutes
from kvviz.report.workshop import SOLUTION, hole, solved, tagged

TEMPLATE = Path(__file__).resolve().parent / "template"
CUSTOMARY = ("kernels", "machine", "torch", "triton", "python", "kvviz")
"""Labels of a machine in the order in which a page shows them. Other labels follow."""

LIVE = "In JupyterLab, an interactive control stands here. Open the notebook to use it."
_WIDGET = "application/vnd.jupyter.widget-view+json"
_SHOWN = ("text/html", "text/markdown", "text/latex", "image/svg+xml", "image/png", "image/jpeg", "text/plain")
_META_OR_BASE = re.compile(r"<(?:meta|base)(?=[\s/>\x00])[^>]*>?", re.IGNORECASE)
"""HTML tags that are removed from outputs, because they could send the reader to another page or change all links."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}(?=>)")
"""Address in Python's default text of an object. The address differs in every run."""
_HEADING = re.compile(r"<h1[^>]*>(.*?)</h1>", re.DOTALL)
_STEPS = re.compile(r'<nav aria-label="([^"]*)" class="kvr-steps">.*?</nav>', re.DOTALL)


@dataclass(frozen=True)
class Link:
    """A link to a page. ``name`` is the file name of the page, relative to the page with the link."""

    name: str
    title: str

    @property
    def href(self) -> str:
        """Return the file name as a URL."""
        return quote(self.name)


@dataclass(frozen=True)
class Frame:
    """What all pages of one report show around their text.

    Args:
        folder: the folder of the notebooks. Local pictures come from this folder. Its path is shortened in the pages.
        machine: facts about the machine: values by label. :data:`CUSTOMARY` lists the usual labels.
        date: the day of the report, ISO 8601. A page shows no other date or time.
        references: links that every page shows, for example to a glossary.
        search: the file name of the page that searches all pages, or "".
    """

    folder: Path
    machine: Mapping[str, str]
    date: str
    references: tuple[Link, ...] = ()
    search: str = ""

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return the labels and values of ``machine`` in the order in which a page shows them. Paths are
        shortened."""
        short = shortener(self.folder)
        labels = [label for label in CUSTOMARY if label in self.machine]
        labels += [label for label in self.machine if label not in CUSTOMARY]
        return tuple((label, short(str(self.machine[label]))) for label in labels)


@dataclass(frozen=True)
class Entry:
    """One entry in the list of pages. ``promise`` is harmless inline HTML. All other fields are plain text.

    Args:
        promise: the first paragraph of the notebook.
        minutes: how long a run takes according to the author.
        reading: how long reading takes.
        seconds: how long the run of this report took.
        ran: True if the notebook ran in this report and has a page.
        status: the result in words.
        link: the page, or None if there is no page.
        picture: a small picture of the page as a URL that holds all of its bytes, or "".
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
    picture: str = ""


def render_page(
    executed: NotebookNode,
    title: str,
    frame: Frame,
    before: Link | None,
    after: Link | None,
    pages: Collection[str] = (),
) -> str:
    """Return the HTML page of an executed notebook.

    The page shows an exercise with its hole. The solution and the output of its check are folded: a click opens them.

    Args:
        before, after: the pages of the notebooks before and after this one.
        pages: file names of the pages that exist. A link in prose to any other file becomes plain text.

    Raises:
        ValueError: a solution is not marked as :mod:`kvviz.report.workshop` requires.
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
            cell.metadata.kvviz_parts = parts_of(cell)
    reading = f"about {reading_minutes([cell.source for cell in executed.cells])} min"
    facts = (("to read", reading), *frame.facts)
    around = {"before": before, "after": after, "headings": prose.headings, "facts": facts, "date": frame.date}
    around |= {"references": frame.references, "search": frame.search}
    body, _ = _exporter().from_notebook_node(notebook, resources={"inlining": {"css": []}, "kvviz": around})
    return link_pages(body, pages)


def relink(page: str, before: Link | None, after: Link | None, pages: Collection[str] = ()) -> str:
    """Return a page of :func:`render_page` with other values of ``before``, ``after`` and ``pages``."""
    parts = Environment(loader=FileSystemLoader(TEMPLATE)).get_template("parts.html.j2").module
    steps = _STEPS.sub(lambda found: _quotes(str(parts.steps(before, after, found[1]))), page)
    return link_pages(steps, pages)


def _quotes(html: str) -> str:
    """Return ``html`` with plain quotes in its text, as nbconvert writes them. Links contain no quotes."""
    return html.replace("&#39;", "'").replace("&#34;", '"')


@dataclass(frozen=True)
class Doors:
    """Links of the front page.

    Args:
        teach: pages for a person who teaches.
        sick: address of the page for a person with a broken cache, or "".
    """

    teach: tuple[Link, ...] = ()
    sick: str = ""


def render_index(
    entries: Sequence[Entry],
    frame: Frame,
    total: str,
    together: str,
    opening: str = "",
    doors: Doors = Doors(),
    failed: bool = False,
) -> str:
    """Return the front page: the opening, a card for each notebook, and the result of the report.

    Args:
        total: sentences about the result of the report.
        together: a sentence about the minutes of all notebooks.
        opening: trusted HTML that stands first. It contains the heading of level 1. If "", there is a plain heading.
        doors: links to pages for other readers.
        failed: True if a notebook of this report has no page. Then ``total`` stands in front of the cards too.
    """
    return _template("pages.html.j2").render(
        title=plain(heading[1]) if (heading := _HEADING.search(opening)) else "kvviz report",
        entries=entries,
        frame=frame,
        total=total,
        together=together,
        failed=failed,
        first=next((entry.link for entry in entries if entry.link), None),
        css=_css(),
        promise=Markup,
        opening=Markup(opening),
        doors=doors,
    )


def render_document(
    title: str, body: str, headings: Sequence[Heading], frame: Frame, pages: Collection[str] = ()
) -> str:
    """Return the page of a text. ``body`` is HTML of :class:`~kvviz.report.prose.Prose`, with these headings."""
    shown = [Heading(one.level, one.anchor, Markup(one.html)) for one in headings]
    page = _template("document.html.j2").render(title=title, body=Markup(body), headings=shown, frame=frame, css=_css())
    return link_pages(page, pages)


def render_search(index: str, frame: Frame) -> str:
    """Return the page that searches all pages. ``index`` is JSON of :func:`kvviz.report.search.index`."""
    return _template("search.html.j2").render(index=Markup(index), frame=frame, css=_css())


def _template(name: str) -> Template:
    loader = FileSystemLoader(TEMPLATE)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(name)


def _css() -> Markup:
    return Markup((TEMPLATE / "report.css").read_text(encoding="utf-8"))


def _exporter() -> HTMLExporter:
    quiet = logging.getLogger(__name__)
    quiet.setLevel(logging.ERROR)  # nbconvert warns about each picture without a description in an output
    return HTMLExporter(
        template_name=TEMPLATE.name,
        extra_template_basedirs=[str(TEMPLATE.parent)],
        exclude_output_prompt=True,
        log=quiet,
    )


def _with_holes(cell: NotebookNode) -> list[NotebookNode]:
    """Return a list of cells. A ``solution`` cell becomes two cells: the code with a hole, and the folded solution.

    Any other cell stays as it is.
    """
    if cell.cell_type != "code" or not tagged(cell, SOLUTION):
        return [cell]
    folded = f"<details><summary>A solution</summary>\n\n```python\n{solved(cell.source)}\n```\n\n</details>"
    cell.source = hole(cell.source)
    return [cell, new_markdown_cell(folded, id=f"{cell.id}-solution"[-64:])]


def _presentable(outputs: Sequence, prose: Prose, short: Callable[[str], str]) -> list[NotebookNode]:
    """Return ``outputs`` without private paths and without what a page cannot show.

    If a cell has interactive controls, one note replaces all of them.
    """
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
        if kind in data:  # a space, so that the text before and after cannot join into a new <meta> or <base> tag
            data[kind] = _META_OR_BASE.sub(" ", data[kind])
    return NotebookNode({**output, "data": NotebookNode(data)})


def _note(text: str) -> NotebookNode:
    data = NotebookNode({"text/html": f'<p class="kvr-note">{text}</p>'})
    return NotebookNode({"output_type": "display_data", "metadata": NotebookNode(), "data": data})
