"""Turns the documents of a project (Markdown) into pages of its report, so that every page can link to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvviz.report.page import Frame, Link, render_document
from kvviz.report.prose import Prose, plain


@dataclass(frozen=True)
class Document:
    """A document that becomes a page.

    Args:
        path: a Markdown file, or an HTML file that is copied as it is.
        label: the words of the link to the page. If "", other pages link to the document only in their text.
    """

    path: Path
    label: str = ""

    @property
    def page(self) -> str:
        """Return the file name of the page."""
        return f"{self.path.stem}.html"


def references(documents: Sequence[Document]) -> tuple[Link, ...]:
    """Return the links that every page shows."""
    return tuple(Link(document.page, document.label) for document in documents if document.label)


def render(document: Document, frame: Frame, pages: Sequence[str]) -> str:
    """Return the page of a document.

    Args:
        pages: file names of the pages that exist. A link to any other file becomes plain text.

    Raises:
        OSError: the file cannot be read.
    """
    source = document.path.read_text(encoding="utf-8")
    if document.path.suffix == ".html":
        return source
    prose = Prose(document.path.parent)
    body = prose.render(source)
    title = plain(prose.headings[0].html) if prose.headings else document.path.stem
    return render_document(title, body, prose.headings, frame, pages)
