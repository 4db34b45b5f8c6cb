"""The search over all pages of a report. One page, ``search.html``, holds the texts of all sections.

The texts are read from the finished pages. So pages from an earlier report are found too.
"""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser

PAGE = "search.html"

_TEXTS = ("kvr-prose",)
"""Classes of the elements whose text can be found. Code and outputs are left out: they would hide the prose."""

_VOID = frozenset(("area", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"))
_SKIPPED = frozenset(("math", "script", "style", "svg"))


@dataclass
class Section:
    """A part of a page from one heading to the next: the id of the heading, its text, and the text below."""

    anchor: str
    title: str = ""
    words: list[str] = field(default_factory=list)


class _Sections(HTMLParser):
    """Collects the sections of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self.found = [Section("")]
        self._open: list[tuple[str, bool]] = []  # the open elements, and whether they begin a text
        self._heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element."""
        if tag in _VOID:
            return
        given = dict(attrs)
        self._open.append((tag, any(name in (given.get("class") or "").split() for name in _TEXTS)))
        if tag in ("h1", "h2", "h3", "h4") and given.get("id"):
            self.found.append(Section(given["id"]))
            self._heading = True

    def handle_endtag(self, tag: str) -> None:
        """End an element, and all elements inside that were not ended."""
        self._heading = self._heading and tag not in ("h1", "h2", "h3", "h4")
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Keep a text."""
        names = [tag for tag, _ in self._open]
        text = " ".join(data.replace("¶", "").split())
        if names[-1:] == ["title"]:
            self.title += text
        if not text or not any(begins for _, begins in self._open) or _SKIPPED.intersection(names):
            return
        if self._heading:
            self.found[-1].title = f"{self.found[-1].title} {text}".strip()
        else:
            self.found[-1].words.append(text)


def sections_of(page: str) -> tuple[str, list[Section]]:
    """Return the title of an HTML page, and its sections. A section without text and heading is left out."""
    parser = _Sections()
    parser.feed(page)
    return parser.title, [section for section in parser.found if section.title or section.words]


def index(pages: dict[str, str]) -> str:
    """Return what the search needs, as JSON that can stand in a script.

    Args:
        pages: HTML of the pages by file name, in the order in which they are found.

    Returns:
        A list of ``[file name, title of the page, [[id, heading, text], ...]]``.
    """
    found = []
    for name, page in pages.items():
        title, sections = sections_of(page)
        found.append([name, title, [[one.anchor, one.title, " ".join(one.words)] for one in sections]])
    return json.dumps(found, ensure_ascii=False).replace("<", "\\u003c")
