"""Pages for all readers: axe finds no fault, Tab reaches every control, and no page is wider than a phone.

The pages hold every kind of content that a report has.
"""

import re
from base64 import b64encode
from pathlib import Path

import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from kvviz.audit.audit import audit_scales, audit_views
from kvviz.audit.claims import Covers, Disjoint, Follows
from kvviz.audit.view import View
from kvviz.cache.buffers import KVCache, allocate
from kvviz.cache.spec import CacheSpec
from kvviz.report import search
from kvviz.report.documents import Document, render
from kvviz.report.page import Doors, Entry, Frame, Link, render_index, render_search
from kvviz.show.audit_page import render_html
from kvviz.show.byte_map import ByteMap, byte_map
from kvviz.show.figures import byte_map_figure
from kvviz.show.live_map import MapView
from kvviz.show.opening import opening
from tests.conftest import browser_missing
from tests.test_report import MACHINE, page, shown, with_outputs

PROSE = """
## Every kind of prose

Words, `code`, **strong**, <kbd>Tab</kbd>, <mark>marked</mark>, [a link](https://example.org), $s = a / 448$.

> A quotation with a [link](#A-page).

| a head of a table that is wide | `kv_cache_dtype` | a third one | and a fourth, wide as well |
|---|---|---|---|
| 1 | `int8_per_token_head` | `a_name_that_is_rather_long` | words, words, words, words |

$$""" + " + ".join(f"x_{{{n}}}" for n in range(60)) + """$$

```
a line of code in prose that is so long that it must scroll on every screen """ + "on and " * 30 + """
```

### A third level

<details><summary>A hint</summary>

Hidden words, and `hidden code`.

```
hidden code """ + "that is long " * 30 + """
```

</details>
"""  # fmt: skip
CODE = (
    '''import torch  # a comment
@decorated
class Named(Exception):
    """Words of a class."""
def add(a: int = 1, b=2.5, **more) -> float:
    assert a != b and not None, f"{a!r} is no \\n number"
    return lambda: print(a + 0x1F, True, len("text"))  '''
    + "# long " * 40
)
COLOURS = "".join(f"\x1b[{code}mcolour {code}\x1b[0m " for code in (31, 32, 33, 34, 35, 36, 37, 90, 91, 1, 4, 7))


def cache() -> tuple[KVCache, ByteMap]:
    """Return a small cache with misplaced scales, and its map."""
    held = allocate(CacheSpec(3, 3, 2, 2, 16, "int8_per_token_head"), "cross-layer NHD", "cpu")
    held.storages[0].copy_(torch.arange(held.storages[0].numel(), dtype=torch.uint8))
    writers = held.writers(held.carve_scales("shape"))
    return held, byte_map(held.owners(), writers, values=held.storages[0], kv_cache_dtype="int8_per_token_head")


def lesson() -> str:
    held, record = cache()
    found = audit_scales(held.owners(), held.writers(held.carve_scales("shape")))
    part = byte_map(held.owners(), held.writers(held.carve_scales("shape")), window=(0, 480))
    maps = MapView({"one": record, "another": record}, row_bytes=96, finding=found.findings[0], beside=True)
    steps = MapView(record, row_bytes=96, frames=[("a write", bytes(len(record.values)))])
    png, metadata = byte_map_figure.figure({"A figure": record}, row_bytes=96)._repr_mimebundle_()
    png["image/png"] = b64encode(png["image/png"]).decode()
    return page(
        new_markdown_cell("# A page\n\nYou will *see*."),
        new_markdown_cell(PROSE),
        new_code_cell(
            CODE,
            execution_count=1,
            outputs=[
                new_output("stream", name="stdout", text=COLOURS + "\n" + "\n".join("line " * 60 for _ in range(90))),
                new_output("stream", name="stderr", text="a warning"),
                new_output("error", ename="E", evalue="e", traceback=["\x1b[31mE\x1b[39m: e " + "long " * 60]),
                new_output("display_data", data=png, metadata=metadata),
                shown(**{"image__svg+xml": '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'}),
                shown(text__html=maps.html),
                shown(text__html=steps.html),
                shown(text__html=MapView(part, row_bytes=96).html),
                shown(**{"application__vnd.jupyter.widget-view+json": {"model_id": "f00"}}),
                shown(
                    text__html="<table><tr><th>kind</th><th>count</th></tr><tr><td>collision</td><td>3</td></tr></table>"
                ),
                shown(text__plain=str(found)),
            ],
        ),
        with_outputs(shown(text__markdown="A **note**.\n\n## A heading of an output")),
        before=Link("index.html", "Before"),
    )


def index() -> str:
    good = Entry(
        "01_a",
        "First",
        "It <em>runs</em>.",
        "about 2 min",
        "about 3 min",
        "measured 2.0 s",
        True,
        "ran",
        Link("01_a.html", "First"),
    )
    bad = Entry("02_b", "Second", "", "no time stated", "", "", False, "no page: code cell 1: " + "E" * 90, None)
    frame = Frame(Path("."), MACHINE, "2001-02-03", (Link("glossary.html", "Glossary"),), "search.html")
    doors = Doors((Link("instructor.html", "For the instructor"),), "symptoms.html")
    told = opening(Path("notebooks", "recorded_engines.json"))
    return render_index([good, bad], frame, "1 of 2 notebooks ran.", "2 notebooks.", told, doors, failed=True)


def document() -> str:
    frame = Frame(Path("."), MACHINE, "2001-02-03", (Link("glossary.html", "Glossary"),), "search.html")
    return render(Document(Path("docs", "symptoms.md")), frame, ["audit.html"])


def searching() -> str:
    frame = Frame(Path("."), MACHINE, "2001-02-03", search=search.PAGE)
    return render_search(search.index({"document.html": document()}), frame)


def audited() -> str:
    held, _ = cache()
    writers = held.writers(held.carve_scales("shape"))
    data = [view for view in held.owners() if view.role == "data"]
    short = View("sent", data[0].storage, (3, 40), (held.spec.page_size_bytes * 3 // 2, 1))
    claims = [Disjoint(tuple(view.name for view in writers)), Covers("sent", (data[0].name,))]
    claims += [Follows(view.name, view.name.replace("scale", "data"), held.spec.data_bytes) for view in writers]
    views = [*data, *writers, short]
    lessons = {"04": "04_root_cause.html", "09": "09_the_case_book.html"}
    return render_html(audit_views(views, claims), views, claims, "some_views.json", lessons=lessons)


def clean() -> str:
    held, _ = cache()
    return render_html(audit_views(held.owners()), held.owners(), title="clean.json")


PAGES = {
    "lesson": lesson,
    "index": index,
    "document": document,
    "search": searching,
    "audit": audited,
    "clean audit": clean,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {name: folder / f"{name}.html" for name in PAGES}
    for name, path in made.items():
        path.write_text(PAGES[name](), encoding="utf-8")
    return made


@pytest.fixture
def axe():
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        browser_missing("the package axe-playwright-python is not installed")
    return Axe()


@pytest.fixture
def visit(chromium, files):
    contexts = []

    def open_page(name: str, width: int = 1280, scheme: str = "light"):
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        opened = context.new_page()
        opened.goto(files[name].as_uri())
        opened.evaluate("document.querySelectorAll('main details').forEach(part => part.open = true)")
        opened.wait_for_timeout(200)
        return opened

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(visit, axe, name, scheme, width):
    found = axe.run(visit(name, width, scheme)).response["violations"]
    faults = [(rule["id"], rule["impact"], node["html"][:120], node["any"]) for rule in found for node in rule["nodes"]]
    assert faults == []


@pytest.mark.browser
def test_axe_would_find_something(chromium, axe):
    """Check that axe can fail: picture without alt text, low contrast, heading too deep, scroll region without Tab."""
    opened = chromium.new_page()
    opened.set_content(
        "<html lang=en><title>t</title><main><h1>a</h1><h4>b</h4><img src='data:,'><p style='color:#aaa'>grey</p>"
        "<div style='overflow:auto;width:50px'><pre>a long long long line</pre></div></main>"
    )
    found = {rule["id"] for rule in axe.run(opened).response["violations"]}
    opened.close()
    assert found == {"heading-order", "image-alt", "color-contrast", "scrollable-region-focusable"}


STOPS = """() => [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')].filter(
    stop => stop.checkVisibility({visibilityProperty: true}) && !stop.closest('details:not([open]) > :not(summary)'))"""
NOW = f"""() => {{
    const looks = getComputedStyle(document.activeElement);
    return [({STOPS})().indexOf(document.activeElement), looks.outlineStyle !== 'none' && looks.outlineWidth !== '0px'];
}}"""
STUCK = """() => [...document.querySelectorAll('main *')].filter(part => {
    const {overflowX, overflowY} = getComputedStyle(part), roams = (way) => way === 'auto' || way === 'scroll';
    const wide = roams(overflowX) && part.scrollWidth > part.clientWidth;
    const high = roams(overflowY) && part.scrollHeight > part.clientHeight;
    return (wide || high) && part.tabIndex < 0 && !part.querySelector('a[href], button, input, [tabindex="0"]');
}).map(part => part.outerHTML.slice(0, 80))"""


@pytest.mark.browser
@pytest.mark.parametrize("name", PAGES)
def test_tab_reaches_every_control_in_order_and_shows_the_focus(visit, name):
    opened = visit(name, 390)
    number = opened.evaluate(f"({STOPS})().length")
    reached = []
    for _ in range(number):
        opened.keyboard.press("Tab")
        reached.append(opened.evaluate(NOW))
    assert reached == [[n, True] for n in range(number)] and (number > 3 or name == "clean audit")
    assert opened.evaluate(STUCK) == []


@pytest.mark.browser
def test_tab_skips_code_that_does_not_scroll(visit):
    opened = visit("lesson")
    stops = opened.evaluate("() => [...document.querySelectorAll('.jp-InputArea-editor')].map(part => part.tabIndex)")
    assert stops == [0, -1]  # the long code, and `1`


@pytest.mark.browser
def test_keys_skip_the_contents_scroll_code_and_open_hints(visit):
    opened = visit("lesson")
    opened.keyboard.press("Tab")
    opened.keyboard.press("Enter")
    assert opened.url.endswith("#kvr-text")
    opened.locator(".jp-InputArea-editor").first.focus()
    opened.keyboard.press("ArrowRight")
    for _ in range(50):  # the page's Content-Security-Policy forbids playwright's wait_for_function
        if opened.evaluate("document.querySelector('.jp-InputArea-editor').scrollLeft") > 0:
            break
        opened.wait_for_timeout(100)
    else:
        pytest.fail("the arrow key did not scroll the code")
    opened.get_by_text("A hint").focus()
    opened.keyboard.press("Enter")
    assert not opened.get_by_text("Hidden words").is_visible()


@pytest.mark.browser
@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_wider_than_a_phone(visit, name):
    opened = visit(name, 390)
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    cut = "() => [...document.querySelectorAll('main *')].filter(part => part.getBoundingClientRect().left < -1).length"
    assert opened.evaluate(cut) == 0


def test_every_picture_has_an_alt_text():
    pictures = [tag for name in PAGES for tag in re.findall(r"<img [^>]*>", PAGES[name]())]
    alts = [re.search(r'alt="([^"]*)"', tag)[1] for tag in pictures]
    alts += re.findall(r'<svg [^>]*role="img" aria-label="([^"]*)"', PAGES["audit"]())
    assert len(alts) >= 6 and all(len(alt) > 20 for alt in alts)
