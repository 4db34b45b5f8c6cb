"""Prose: markdown as HTML that needs no script and no network.

Math becomes MathML, headings get anchors that are unique on a page, pictures are carried inside the page, and
HTML that is not on a short list of harmless tags is shown as text. Knows no template and runs nothing.
"""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

import bleach
from bleach.css_sanitizer import CSSSanitizer
from latex2mathml.converter import convert_to_element
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath, MathBlockParser

# fmt: off
INLINE_TAGS = frozenset(["b", "code", "del", "em", "i", "kbd", "s", "small", "strong", "sub", "sup"])
TAGS = INLINE_TAGS | {
    "a", "abbr", "blockquote", "br", "caption", "center", "dd", "details", "div", "dl", "dt", "figcaption", "figure",
    "h1", "h2", "h3", "h4", "h5", "h6", "hr", "img", "input", "li", "mark", "ol", "p", "pre", "section", "span",
    "summary", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul",
}
# fmt: on
_OPEN, _CLOSE = "\ue000", "\ue001"
_HELD = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_LINK_TAG = re.compile(r"</?a\b[^>]*>")
WORDS_A_MINUTE = 150
"""How fast prose with code in it is read."""
_TO_READ = re.compile(r"(\d+)\s(?:min(?:utes?)?\s)?to\sread\b")
_FIRST_PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)


@dataclass(frozen=True)
class Heading:
    """A heading of a page: its level (1 to 6), the id that it carries, and its text as harmless inline HTML."""

    level: int
    anchor: str
    html: str


class Prose:
    """Renders the markdown of one page and remembers its headings, in order.

    Args:
        folder: where local pictures are looked up; a picture outside of it is named, not shown.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.headings: list[Heading] = []
        self._anchors: set[str] = set()

    def render(self, source: str, attachments: Mapping | None = None, listed: bool = True) -> str:
        """Return ``source`` as HTML; ``listed=False`` keeps its headings out of :attr:`headings`."""
        renderer = _Renderer(self.anchor, path=str(self.folder), attachments=dict(attachments or {}))
        source = source.replace(_OPEN, "").replace(_CLOSE, "")
        body = renderer.fill(_clean(MarkdownWithMath(renderer=renderer, block=_Blocks()).render(source)))
        if listed:
            self.headings += [Heading(level, anchor, renderer.inline(text)) for level, anchor, text in renderer.seen]
        return body

    def anchor(self, text: str) -> str:
        """An id for a heading: spaces become dashes as in Jupyter, and a second one of the same text ends in -2."""
        base = quote(text.strip().replace(" ", "-"), safe="?/:@!$()*+,;=") or "section"
        anchor, count = base, 1
        while anchor in self._anchors:
            count += 1
            anchor = f"{base}-{count}"
        self._anchors.add(anchor)
        return anchor


def plain(fragment: str) -> str:
    """The text of an HTML fragment, on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", fragment)).split())


def reading_minutes(sources: Sequence[str]) -> int:
    """Whole minutes, at least 1, that reading a notebook's cells takes.

    What its first cell says ("20 to read"), else counted in words of prose and code; outputs are not counted.
    """
    stated = _TO_READ.search(sources[0]) if sources else None
    counted = sum(len(source.split()) for source in sources) / WORDS_A_MINUTE
    return max(1, int(stated.group(1)) if stated else round(counted))


def first_paragraph(body: str) -> str:
    """The inner HTML of the first paragraph of rendered prose, without links; "" if there is none."""
    found = _FIRST_PARAGRAPH.search(body)
    return _LINK_TAG.sub("", found.group(1)) if found else ""


def mathml(latex: str, display: str) -> str:
    """``latex`` as MathML, ``display`` "inline" or "block"; what cannot be converted is shown as its source."""
    try:
        element = convert_to_element(_in_known_words(latex.strip()), display=display)
    except Exception:  # the converter has no error class of its own: unknown input ends in any of Python's
        return f"<code>{html.escape(latex.strip())}</code>"
    for part in element.iter():  # its texts are half escaped: undo that, so that serialising escapes all of it once
        part.text = html.unescape(part.text) if part.text else part.text
    return ElementTree.tostring(element, encoding="unicode")


def _in_known_words(latex: str) -> str:
    """``latex`` with environments and escapes that the converter misreads put in words that it knows."""
    latex = re.sub(r"\\(begin|end)\{align(ed|\*)?\}", r"\\\1{align*}", latex)
    latex = re.sub(r"\\(begin|end)\{gather(ed|\*)?\}", r"\\\1{matrix}", latex)
    return re.sub(r"\\text[a-z]*\{[^{}]*\}", lambda text: re.sub(r"\\([_%&#$])", r"\1", text.group()), latex)


class _Blocks(MathBlockParser):
    """Display math starts a line; `$$` further on, in a code span say, opens no block."""

    SPECIFICATION = {
        **MathBlockParser.SPECIFICATION,
        "multiline_math": rf"^ {{0,3}}(?:{MathBlockParser.MULTILINE_MATH})",
    }


class _Renderer(IPythonRenderer):
    """Mistune's renderer with MathML held back behind tokens, so that cleaning never sees it."""

    def __init__(self, anchor, **options) -> None:
        super().__init__(escape=False, embed_images=True, **options)
        self._anchor = anchor
        self._held: list[str] = []
        self.seen: list[tuple[int, str, str]] = []

    def hold(self, fragment: str) -> str:
        self._held.append(fragment)
        return f"{_OPEN}{len(self._held) - 1}{_CLOSE}"

    def fill(self, text: str) -> str:
        return _HELD.sub(lambda token: self._held[int(token.group(1))], text)

    def inline(self, text: str) -> str:
        return self.fill(bleach.clean(_LINK_TAG.sub("", text), tags=INLINE_TAGS, attributes={}))

    def inline_math(self, body: str) -> str:
        return self.hold(mathml(body, "inline"))

    def block_math(self, body: str) -> str:
        return self.hold(f'<span class="kvr-math">{mathml(body, "block")}</span>')

    def latex_environment(self, name: str, body: str) -> str:
        return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")

    def heading(self, text: str, level: int, **attrs) -> str:
        anchor = self._anchor(plain(_HELD.sub("", text)))
        self.seen.append((level, anchor, text))
        quoted = html.escape(anchor)
        return f'<h{level} id="{quoted}">{text}<a class="anchor-link" href="#{quoted}">¶</a></h{level}>\n'

    def block_html(self, html: str) -> str:
        return html + "\n"

    def inline_html(self, html: str) -> str:
        return html

    def link(self, text: str, url: str, title: str | None = None) -> str:
        """A link to another notebook of the folder leads to its page."""
        return super().link(text, re.sub(r"^([^:/?#]+)\.ipynb(?=#|$)", r"\1.html", url), title)

    def image(self, text: str, url: str, title: str | None = None) -> str:
        """A picture travels inside the page; one that cannot is named, and linked if it lies on the web."""
        data = self._embed_image_or_attachment(url)
        if data.startswith("data:image/"):
            return f'<img src="{html.escape(data)}" alt="{html.escape(plain(text))}">'
        name = f"picture: {html.escape(plain(text) or url)}"
        return self.link(name, url) if url.startswith(("http:", "https:")) else f"<em>{name}</em>"


def _clean(body: str) -> str:
    return bleach.clean(
        body,
        tags=TAGS,
        attributes={
            "*": ["align", "class", "colspan", "dir", "id", "lang", "open", "rowspan", "start", "style", "title"],
            "a": ["href"],
            "img": _harmless_image,
            "input": ["type", "checked", "disabled"],
        },
        protocols=["http", "https", "mailto", "data"],
        css_sanitizer=CSSSanitizer(),
    )


def _harmless_image(tag: str, name: str, value: str) -> bool:
    return value.startswith("data:image/") if name == "src" else name in ("alt", "width", "height")
