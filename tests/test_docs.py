"""Tests of the documents beside the README.

Each term of the glossary names a file that contains the term. Each figure is equal to a computed figure, or to a figure
of the README. Each link leads to something.
"""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvviz.cache.buffers import allocate, block_runs
from kvviz.cache.layout import AXES, LAYOUTS
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec
from kvviz.engine.weights import MODEL
from tests.test_report import CONTRAST

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"- \*\*([^*]+)\*\* \(`([^`]+)`\): (.+)")
ENTRIES = [match.groups() for match in map(ENTRY.fullmatch, GLOSSARY.splitlines()) if match]

RELEASED = ("bfloat16", "fp8", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
"""The modes of released vLLM, which glossary and cheat sheet explain. A new mode need not be in them."""

RELEASED_KINDS = (
    "collision", "misplaced", "permuted", "out_of_bounds", "truncated", "oversized", "self_overlap", "ambiguous",
    "unaligned", "index_space",
)  # fmt: skip
"""The finding kinds of the released kvviz, which glossary and docs/audit.md explain. A new kind is added at a release.
"""


def plain(text: str) -> str:
    """Return the words of a text in small letters, with one blank between two words."""
    return " ".join(re.findall(r"\w+", text.lower()))


class TestGlossary:
    def test_every_line_of_the_list_is_an_entry(self):
        assert len(ENTRIES) == GLOSSARY.count("\n- ") > 50

    def test_no_term_stands_twice_and_all_are_in_order(self):
        terms = [plain(term).replace("_", " ") for term, _, _ in ENTRIES]
        assert terms == sorted(set(terms))

    @pytest.mark.parametrize(("term", "path", "said"), ENTRIES, ids=[term for term, _, _ in ENTRIES])
    def test_an_entry_names_a_file_that_has_the_term_and_says_it_in_two_sentences(self, term, path, said):
        text = (ROOT / path).read_text(encoding="utf-8").replace("zero_point", "zero point")
        assert re.search(rf"\b{re.escape(plain(term))}", plain(text)), f"{path} does not speak of {term!r}"
        assert said.endswith(".") and 1 <= len(re.findall(r"\.(?= |$)", said)) <= 2

    def test_kinds_and_modes_are_terms(self):
        modes = {name for name in RELEASED if MODES[name].is_per_token_head}
        assert {*RELEASED_KINDS, *modes} <= {term for term, _, _ in ENTRIES}

    def test_kinds_have_a_row(self):
        page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
        cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
        assert {*RELEASED_KINDS} <= {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_instructor_finds_the_time_of_every_notebook():
    """Each row ends in the seconds on two CPU cores and on the H200."""
    page = (ROOT / "docs" / "instructor.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\d\d_\w+)` \| [^|]+ \| \d+ s \| (?:\d+ s[^|]*|no GPU is used|not measured) \|$", page, re.MULTILINE
    )
    assert rows == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_readme_names_every_page_of_docs():
    readme = DOCUMENTS[0].read_text(encoding="utf-8")
    assert [
        path.name
        for path in (ROOT / "docs").iterdir()
        if path.suffix in (".md", ".html") and f"docs/{path.name}" not in readme
    ] == []


def test_sections_that_an_instructor_may_skip_are_there():
    """Titles quoted in the instructor's page are headings of notebooks."""
    text = (ROOT / "docs" / "instructor.md").read_text()
    quoted = [
        "The map of the page",
        "Layer by layer",
        "The truth table",
        "Try other sizes",
        "Misplaced without a collision",
    ]
    notebooks = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert [title for title in quoted if title not in text or f"## {title}" not in notebooks] == []


def test_the_settings_name_the_wheel_of_the_model():
    assert f"`{MODEL.requirement}`" in (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def test_the_hub_page_names_what_the_configuration_reads():
    read = re.findall(r'environ\.get\("(\w+)"', (ROOT / "deploy" / "jupyterhub_config.py").read_text())
    page = (ROOT / "docs" / "hub.md").read_text()
    assert read and [name for name in read if f"`{name}`" not in page] == []


SHEET = ROOT / "docs" / "cheat_sheet.html"
SIZES = {"num_layers": 4, "num_blocks": 8, "block_size": 16, "num_kv_heads": 2, "head_size": 64}
INT8, PADDED = "int8_per_token_head", 5120


def computed() -> dict[str, int]:
    """Compute every number of the cheat sheet. Return the numbers by key."""
    found = dict(SIZES)
    for mode in RELEASED:
        spec = CacheSpec(**SIZES, kv_cache_dtype=mode)
        found |= {f"{mode} data": spec.data_bytes, f"{mode} scale": spec.scale_bytes, f"{mode} cell": spec.cell_bytes}
        found |= {f"{mode} real": spec.real_page_size_bytes, f"{mode} content": spec.content_page_size_bytes}
        packed = allocate(spec, "LBNHC", "meta").kv_caches[0]
        found |= {f"{mode} token": packed.stride(2) * spec.element_bytes}
        found |= {f"{mode} head": packed.stride(1) * spec.element_bytes}
        if spec.is_per_token_head:
            k_scale, _ = allocate(spec, "LBNHC", "meta").carve_scales()[0]
            found |= {f"{mode} scale at": spec.scale_offset_bytes}
            found |= {f"{mode} scale {axis}": step for axis, step in zip("BNH", k_scale.stride(), strict=True)}
    spec = CacheSpec(**SIZES, kv_cache_dtype=INT8)
    for name, layout in LAYOUTS.items():
        cache = allocate(spec, name, "meta", one_storage=True)
        kv = cache.kv_caches
        steps = {"L": kv[1].storage_offset() - kv[0].storage_offset(), "B": kv[0].stride(0)}
        data = dict(zip(["K data", "V data"], cache.owners()[:2], strict=True))
        steps |= {"K": data["V data"].offset - data["K data"].offset}
        steps |= {"N": data["K data"].stride[1], "H": data["K data"].stride[2], "C": data["K data"].stride[3]}
        assert steps == layout.strides_bytes(spec)
        starts, length = block_runs(kv[0])
        found |= {f"{name} {axis}": steps[axis] for axis in AXES}
        found |= {f"{name} runs": starts.shape[1], f"{name} run": length}
    cross = allocate(spec, "cross-layer NHD", "meta")
    for carve in ("strides", "shape"):
        k_scale, v_scale = cross.carve_scales(carve)[1]
        found |= {f"{carve} K": k_scale.storage_offset(), f"{carve} V": v_scale.storage_offset()}
        found |= {f"{carve} {axis}": step for axis, step in zip("BNH", k_scale.stride(), strict=True)}
    padded = CacheSpec(**SIZES, kv_cache_dtype=INT8, page_size_padded=PADDED)
    found |= {"cells": spec.cells_per_page, "layer": spec.layer_bytes, "buffer": spec.buffer_bytes}
    found |= {"padded": padded.page_size_bytes, "padded layer": padded.layer_bytes, "slots": spec.num_slots}
    return found


class Numbers(HTMLParser):
    """The ``<data>`` elements of a page, and the words outside of them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.key, self.inside, self.numbers, self.words, self.tags = None, None, [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "data":
            self.key = dict(attrs)["value"]
        if tag in ("style", "code"):
            self.inside = tag

    def handle_endtag(self, tag):
        self.key = None if tag == "data" else self.key
        self.inside = None if tag == self.inside else self.inside

    def handle_data(self, data):
        if self.key is not None:
            self.numbers.append((self.key, data))
        elif self.inside is None:
            self.words.append(data)


class TestCheatSheet:
    html = SHEET.read_text(encoding="utf-8")

    def test_every_number_is_what_is_computed(self):
        shown, known = Numbers(self.html).numbers, computed()
        wrong = {key: (said, known.get(key)) for key, said in shown if said.replace(",", "") != str(known.get(key))}
        assert wrong == {} and len(shown) > 100

    def test_no_number_escapes_the_comparison(self):
        """Apart from numbers that are compared, the words of the page contain only the number 4 and vLLM releases."""
        words = " ".join(Numbers(self.html).words)
        for name in (*RELEASED, "float32", "A4"):
            words = words.replace(name, "")
        assert set(re.findall(r"[\d.,]*\d", words)) <= {"4", "0.20", "0.25", "0.26"}

    def test_every_layout_and_every_mode_is_there(self):
        keys = {key for key, _ in Numbers(self.html).numbers}
        released = [name for name in LAYOUTS if f"{name} L" in keys]  # a layout of no release need not be there
        assert len(released) >= 10 and {f"{name} {axis}" for name in released for axis in AXES} <= keys
        assert {f"{mode} cell" for mode in RELEASED} <= keys
        orders = re.findall(r"<th scope=row>([\w -]+)</th><td><code>([LBKHNC]+)</code>", self.html)
        assert dict(orders) == {name: LAYOUTS[name].order for name in released}

    def test_bars_are_to_scale(self):
        bars = re.findall(r"<span class=data style=flex:(\d+)></span>(?:<span class=scale style=flex:(\d+)></span>)?"
                          r"<span style=flex:(\d+)></span>", self.html)  # fmt: skip
        specs = [CacheSpec(**SIZES, kv_cache_dtype=mode) for mode in RELEASED]
        widest = max(spec.cell_bytes for spec in specs)
        expected = [(spec.data_bytes, spec.scale_bytes, widest - spec.cell_bytes) for spec in specs]
        assert [tuple(int(part or 0) for part in bar) for bar in bars] == expected

    def test_it_needs_nothing_else(self):
        assert not {"script", "link", "img", "iframe", "object"} & set(Numbers(self.html).tags)
        assert not re.search(r"https?:|url\(|@import| on\w+=", self.html)


def pages_of(pdf: bytes) -> int:
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


@pytest.mark.browser
class TestCheatSheetInBrowser:
    @pytest.fixture
    def sheet(self, chromium):
        context = chromium.new_context(offline=True, java_script_enabled=True)
        page = context.new_page()
        page.goto(SHEET.as_uri())
        yield page
        context.close()

    @pytest.mark.parametrize("paper", ["A4", "Letter"])
    def test_it_prints_on_one_page(self, sheet, paper):
        assert pages_of(sheet.pdf(format=paper)) == 1
        sheet.emulate_media(media="print")
        assert sheet.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"

    def test_two_pages_would_be_counted(self, sheet):
        sheet.evaluate("document.body.append(document.querySelector('main').cloneNode(true))")
        assert pages_of(sheet.pdf(format="A4")) == 2

    def test_nothing_is_cut_off_on_paper(self, sheet):
        sheet.emulate_media(media="print")
        for width in (718, 740):  # pixels between the margins of A4 and of Letter
            sheet.set_viewport_size({"width": width, "height": 1000})
            cut = "[...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)"
            assert sheet.evaluate(f"{cut}.map(e => e.outerHTML.slice(0, 60))") == []

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast(self, sheet, scheme):
        sheet.emulate_media(color_scheme=scheme)
        contrast = {select: sheet.evaluate(CONTRAST, select) for select in ("h1", "h2", "p", "td", "th", "code", "li")}
        assert not {select: round(ratio, 2) for select, ratio in contrast.items() if ratio < 4.5}
        ground = sheet.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")

    def test_a_narrow_screen_does_not_scroll_sideways(self, sheet):
        for width in (390, 1280):
            sheet.set_viewport_size({"width": width, "height": 800})
            assert sheet.evaluate("document.documentElement.scrollWidth") <= width
