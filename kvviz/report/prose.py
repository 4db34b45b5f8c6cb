"""Converts markdown to HTML that needs no script and no network.

- Formulas become MathML.
- Each heading gets an id that is unique on the page.
- Pictures are stored inside the page.
- HTML tags that are not on a short list of harmless tags are shown as text.
"""

import html
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote
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
"""A placeholder is a number between these two characters. Both are private characters of Unicode, so no text needs
them."""
_HELD = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_LINK_TAG = re.compile(r"</?a\b[^>]*>")
_START_OF_LINK = re.compile(r"""<a((?: [\w-]+=(?:"[^"]*"|'[^']*'))*)>""")
_HREF = re.compile(r""" href=(?:"([^"]*)"|'([^']*)')""")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|[#/]", re.IGNORECASE)
"""Beginning of a link that does not lead to a file of the notebooks' folder: a scheme such as ``https:``, an id after
``#``, or a path from the root."""
_PAGE_LINK = re.compile(r'<a class="kvr-to" (?:href|data-to)="([^"]*)">')
"""Link to another file of the notebooks' folder. If the link is shown as plain text, ``data-to`` keeps its target."""

WORDS_PER_MINUTE = 150
"""Assumed reading speed for prose with code. Silent reading of easy prose is at about 240 words per minute."""
_TO_READ = re.compile(r"(\d+)\s(?:min(?:utes?)?\s)?to\sread\b")
_FIRST_PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)


@dataclass(frozen=True)
class Heading:
    """A heading of a page: the level (1 to 6), the id, and the text as harmless inline HTML."""

    level: int
    anchor: str
    html: str


class Prose:
    """Converts the markdown of one page, and collects the headings of the page in order.

    Args:
        folder: the folder of local pictures. A picture outside this folder is named, but not shown.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.headings: list[Heading] = []
        self._anchors: set[str] = set()

    def render(self, source: str, attachments: Mapping | None = None, listed: bool = True) -> str:
        """Return ``source`` as HTML. If ``listed`` is True, add its headings to :attr:`headings`."""
        renderer = _Renderer(self._anchor, path=str(self.folder), attachments=dict(attachments or {}))
        source = source.replace(_OPEN, "").replace(_CLOSE, "")
        cleaned = _clean(MarkdownWithMath(renderer=renderer, block=_Blocks()).render(source))
        body = renderer.fill(_mark_page_links(cleaned))
        if listed:
            self.headings += [Heading(level, anchor, renderer.inline(text)) for level, anchor, text in renderer.seen]
        return body

    def _anchor(self, text: str) -> str:
        """Return an id for a heading. As in Jupyter, spaces become dashes. If the id exists already, append ``-2``."""
        base = quote(text.strip().replace(" ", "-"), safe="?/:@!$()*+,;=") or "section"
        anchor, count = base, 1
        while anchor in self._anchors:
            count += 1
            anchor = f"{base}-{count}"
        self._anchors.add(anchor)
        return anchor


def plain(fragment: str) -> str:
    """Return the text of an HTML fragment, on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", fragment)).split())


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 page``, ``2 pages``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def about(minutes: float) -> str:
    """Return a time in whole minutes, in words."""
    return f"about {round(minutes)} min" if minutes >= 1 else "less than 1 min"


def reading_minutes(sources: Sequence[str]) -> int:
    """Return how many whole minutes it takes to read the cells of a notebook, at least 1.

    If the first cell states the minutes ("20 to read"), return this number. Otherwise, count the words of prose and
    code, but not of outputs.
    """
    stated = _TO_READ.search(sources[0]) if sources else None
    counted = sum(len(source.split()) for source in sources) / WORDS_PER_MINUTE
    return max(1, int(stated.group(1)) if stated else round(counted))


def first_paragraph(body: str) -> str:
    """Return the inner HTML of the first paragraph without links, or "" if ``body`` has no paragraph."""
    found = _FIRST_PARAGRAPH.search(body)
    return _LINK_TAG.sub("", found.group(1)) if found else ""


def link_pages(body: str, pages: Collection[str]) -> str:
    """Return HTML in which links to other files of the notebooks' folder work if ``pages`` contains the file.

    If ``pages`` does not contain the file, the link becomes plain text. The text keeps the target of the link, so a
    later call can make it a link again. Links to the web and links within the page do not change.
    """

    def link(found: re.Match) -> str:
        name = unquote(found[1].partition("#")[0])
        return f'<a class="kvr-to" {"href" if name in pages else "data-to"}="{found[1]}">'

    return _PAGE_LINK.sub(link, body)


def _mark_page_links(body: str) -> str:
    """Return ``body`` with the class ``kvr-to`` in each link to a file of the project.

    A link to a notebook or to a document becomes a link to its page. All pages lie in one folder.
    """

    def mark(found: re.Match) -> str:
        href = _HREF.search(found[1])
        target = html.unescape(href[1] or href[2] or "") if href else ""
        if not target or _ELSEWHERE.match(target):
            return found[0]
        url = re.sub(r"^(?:\.\./)?(?:docs|notebooks)/(?=[^/]+$)", "", unquote(target))
        url = re.sub(r"^([^/]+)\.(?:ipynb|md)(?=#|$)", r"\1.html", url)
        return f'<a class="kvr-to" href="{quote(url, safe="/#?=:@!$()*+,;")}">'

    return _START_OF_LINK.sub(mark, body)


def mathml(latex: str, display: str) -> str:
    """Return ``latex`` as MathML. ``display`` is "inline" or "block". If this fails, return ``latex`` as HTML code."""
    try:
        element = convert_to_element(_in_known_words(latex.strip()), display=display)
    except Exception:  # the converter defines no error class: bad input can raise any Python exception
        return f"<code>{html.escape(latex.strip())}</code>"
    for part in element.iter():  # some texts are escaped already, and tostring() would escape them a second time
        part.text = html.unescape(part.text) if part.text else part.text
    return ElementTree.tostring(element, encoding="unicode")


def _in_known_words(latex: str) -> str:
    """Replace LaTeX that the converter does not support by equal LaTeX that the converter supports."""
    latex = re.sub(r"\\(begin|end)\{align(ed|\*)?\}", r"\\\1{align*}", latex)
    latex = re.sub(r"\\(begin|end)\{gather(ed|\*)?\}", r"\\\1{matrix}", latex)
    return re.sub(r"\\text[a-z]*\{[^{}]*\}", lambda text: re.sub(r"\\([_%&#$])", r"\1", text.group()), latex)


class _Blocks(MathBlockParser):
    """Accepts ``$$`` as the start of a formula only at the start of a line. Inside a line, ``$$`` can be code."""

    SPECIFICATION = {
        **MathBlockParser.SPECIFICATION,
        "multiline_math": rf"^ {{0,3}}(?:{MathBlockParser.MULTILINE_MATH})",
    }


class _Renderer(IPythonRenderer):
    """Converts parsed markdown to HTML. A numbered placeholder stands for each formula.

    Formulas are MathML, which :func:`_clean` would remove. So :meth:`fill` puts them in after :func:`_clean`.

    Args:
        anchor: function that returns an id for the text of a heading.
    """

    def __init__(self, anchor: Callable[[str], str], **options) -> None:
        super().__init__(escape=False, embed_images=True, **options)
        self._anchor_of = anchor
        self._held: list[str] = []
        self.seen: list[tuple[int, str, str]] = []

    def hold(self, fragment: str) -> str:
        """Keep an HTML fragment and return a placeholder for it."""
        self._held.append(fragment)
        return f"{_OPEN}{len(self._held) - 1}{_CLOSE}"

    def fill(self, text: str) -> str:
        """Return ``text`` with each placeholder replaced by the HTML that it stands for."""
        return _HELD.sub(lambda placeholder: self._held[int(placeholder.group(1))], text)

    def inline(self, text: str) -> str:
        """Return the HTML of a heading with harmless inline tags only."""
        return self.fill(bleach.clean(_LINK_TAG.sub("", text), tags=INLINE_TAGS, attributes={}))

    def inline_math(self, body: str) -> str:
        """Return a placeholder for a formula inside a line."""
        return self.hold(mathml(body, "inline"))

    def block_math(self, body: str) -> str:
        """Return a placeholder for a formula on its own line."""
        return self.hold(f'<span class="kvr-math">{mathml(body, "block")}</span>')

    def latex_environment(self, name: str, body: str) -> str:
        """Return a placeholder for a LaTeX environment."""
        return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")

    def heading(self, text: str, level: int, **attrs) -> str:
        """Return a heading with an id and a link to itself."""
        anchor = self._anchor_of(plain(_HELD.sub("", text)))
        self.seen.append((level, anchor, text))
        quoted = html.escape(anchor)
        return f'<h{level} id="{quoted}">{text}<a class="anchor-link" href="#{quoted}">¶</a></h{level}>\n'

    def block_html(self, html: str) -> str:
        """Return HTML between paragraphs unchanged. :func:`_clean` escapes harmful tags later."""
        return html + "\n"

    def inline_html(self, html: str) -> str:
        """Return HTML inside a line unchanged. :func:`_clean` escapes harmful tags later."""
        return html

    def image(self, text: str, url: str, title: str | None = None) -> str:
        """Return a picture that is stored inside the page. If that is impossible, return the name of the picture.

        The name of a picture on the web is a link.
        """
        data = self._embed_image_or_attachment(url)
        if data.startswith("data:image/"):
            return f'<img src="{html.escape(data)}" alt="{html.escape(plain(text))}">'
        name = f"picture: {html.escape(plain(text) or url)}"
        return self.link(name, url) if url.startswith(("http:", "https:")) else f"<em>{name}</em>"


def _clean(body: str) -> str:
    """Return ``body`` with harmless tags only. Other tags are escaped, so the page shows them as text."""
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
