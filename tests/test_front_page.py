"""The front page of a report: picture, answers, cards, and the search. A browser opens them without a network."""

import base64
import io
import re
from pathlib import Path

import pytest
from nbformat.v4 import new_markdown_cell
from PIL import Image

from kvviz.__main__ import FOR_TEACHERS, LABELS, _around, _opening
from kvviz.audit.cause_words import CAUSES
from kvviz.report import export, search
from kvviz.report.documents import Document
from kvviz.report.export import Around, main
from kvviz.report.lab_front_page import lab_front_page
from kvviz.report.thumbnail import HEIGHT, WIDTH, thumbnail
from kvviz.show import opening
from tests.test_report import dead_links, write

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of two small notebooks with the real opening and the real documents."""
    folder = tmp_path_factory.mktemp("report")
    patch = pytest.MonkeyPatch()
    patch.setattr(export, "execute", lambda book, *more: (book.node, None))
    write(
        folder,
        "03_reproduce_the_corruption",
        new_markdown_cell("# 03 Reproduce\n\nYou will see.\n\n## A zebra\n\nStripes."),
        "1",
    )
    write(
        folder, "04_root_cause", new_markdown_cell("# 04 Cause\n\n[audit](../docs/audit.md)\n\n## Another\n\nA zebra.")
    )
    assert main(folder, folder / "out", around=_around(ROOT / "notebooks")) == 0
    yield folder / "out"
    patch.undo()


def test_every_document_is_a_page_and_no_link_is_dead(report):
    pages = {path.stem for path in report.glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "search", "cheat_sheet"} <= pages
    assert set(LABELS) | set(FOR_TEACHERS) <= pages
    assert dead_links(report) == []
    lesson = (report / "04_root_cause.html").read_text(encoding="utf-8")
    assert all(f'<a href="{name}.html">{label}</a>' in lesson for name, label in LABELS.items())
    assert 'href="audit.html">audit</a>' in lesson


def test_links_of_the_symptoms_lead_to_lessons_that_exist():
    source = (ROOT / "docs" / "symptoms.md").read_text(encoding="utf-8")
    lessons = re.findall(r"\.\./notebooks/(\w+\.ipynb)", source)
    assert lessons and all((ROOT / "notebooks" / name).is_file() for name in lessons)
    assert source.count("<summary>") == source.count("**Suspect:**") == source.count("**Check:**")
    named = {name[:2] for name in lessons}
    assert {cause.lesson for cause in CAUSES.values()} <= named


def test_two_files_of_one_page_are_refused(tmp_path, capsys):
    write(tmp_path, "01_a", "1")
    (tmp_path / "01_a.md").write_text("# A")
    around = Around(documents=(Document(tmp_path / "01_a.md"),))
    assert main(tmp_path, tmp_path / "out", around=around) == 2
    assert "are the page 01_a.html, which exists once: rename the document" in capsys.readouterr().err


def test_the_answers_are_those_of_the_record():
    html = opening.answers(ROOT / "notebooks" / "recorded_engines.json")
    words = re.sub(r"<[^>]+>", "", html)
    assert "The sky is blue because of" in words and re.search(
        r"Token \d, counted from 0, is the first wrong token", words
    )
    assert opening.answers(ROOT / "absent.json") == ""


def test_a_thumbnail_has_the_shape_of_a_card():
    def page(*sizes):
        made = []
        for size in sizes:
            packed = io.BytesIO()
            Image.new("RGBA", size, (200, 10, 10, 255)).save(packed, "PNG")
            made.append(f'<img src="data:image/png;base64,{base64.b64encode(packed.getvalue()).decode()}">')
        return "".join(made)

    url = thumbnail(page((900, 40), (1650, 700)))
    picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert picture.size == (WIDTH, HEIGHT) or picture.width / picture.height == pytest.approx(WIDTH / HEIGHT, rel=0.02)
    assert thumbnail("no picture") == "" and thumbnail('<img src="data:image/png;base64,AAAA">') == ""
    assert thumbnail(page((900, 40))) != ""


def test_sections_of_a_page():
    page = (
        "<title>T</title><nav>not this</nav><div class='kvr-prose'><h1 id='a'>One<a>¶</a></h1><p>Some <b>words</b>.</p>"
        "<h2 id='b'>Two</h2><svg><text>no</text></svg>more</div><pre>code</pre>"
    )
    title, sections = search.sections_of(page)
    assert title == "T"
    assert [(one.anchor, one.title, " ".join(one.words)) for one in sections] == [
        ("a", "One", "Some words ."), ("b", "Two", "more")
    ]  # fmt: skip
    assert "<" not in search.index({"x.html": page.replace("more", "&lt;script>")})


def test_the_front_page_in_jupyterlab_has_no_links_and_no_scripts():
    made = [lab_front_page(ROOT / "notebooks", _opening(ROOT / "notebooks", scripts=False)) for _ in range(2)]
    assert made[0] == made[1] and not re.search(r"<a\b|<script", made[0]) and "@keyframes" in made[0]
    titles = re.findall(r"<h3><span>(\d\d) ", made[0])
    assert titles == sorted(path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture
def visit(chromium, report):
    contexts = []

    def open_page(name: str, **more):
        context = chromium.new_context(offline=True, viewport={"width": 1280, "height": 900}, **more)
        contexts.append(context)
        page = context.new_page()
        page.asked, page.errors = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and page.errors.append(message.text))
        page.goto((report / name).as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


def visible(page, step: int) -> list[bool]:
    return page.evaluate(
        f"[...document.querySelectorAll('.kvviz-step-{step}')].map(it => getComputedStyle(it).visibility === 'visible')"
    )


@pytest.mark.browser
class TestBrowser:
    def test_the_button_plays_all_steps(self, visit):
        page = visit("index.html")
        assert all(visible(page, 5)) and visible(page, 5)
        page.clock.install()
        page.reload()
        page.get_by_role("button", name="Watch the layers write").click()
        assert not any(visible(page, 1))
        for step in range(1, 6):
            page.clock.run_for(1200)
            assert all(visible(page, step)) and (step == 5 or not any(visible(page, step + 1)))
            assert page.locator(".kvviz-play output").inner_text()
        assert page.get_by_role("button", name="Watch the layers write").is_visible()
        assert page.errors == [] and [url for url in page.asked if not url.startswith(("data:", "file:"))] == []

    def test_the_keyboard_moves_the_step(self, visit):
        page = visit("index.html")
        page.locator(".kvviz-play input").focus()
        page.keyboard.press("Home")
        assert not any(visible(page, 1)) and "empty" in page.locator(".kvviz-play output").inner_text()
        page.keyboard.press("ArrowRight")
        assert all(visible(page, 1)) and not any(visible(page, 2))

    def test_without_scripts_everything_can_be_read(self, visit):
        page = visit("index.html", java_script_enabled=False)
        assert page.locator("svg.kvviz-story").is_visible() and not page.locator(".kvviz-play").is_visible()
        assert page.get_by_text("Why no test saw it").is_visible()
        page.get_by_role("link", name="My cache is sick").first.click()
        page.get_by_text("Only after a restore").click()
        assert page.get_by_text("checks a whole transfer before it runs").is_visible()

    def test_doors_and_cards_lead_to_pages(self, visit):
        page = visit("index.html")
        assert page.locator(".kvr-doors a").count() == 3
        page.locator(".kvr-cards a", has_text="04").click()
        assert page.url.endswith("04_root_cause.html")

    def test_the_search_finds_sections(self, visit):
        page = visit("search.html")
        page.get_by_label("Words").fill("zebra")
        links = page.locator(".kvr-results a")
        assert links.all_inner_texts() == ["A zebra", "Another"]
        assert page.locator("#kvr-count").inner_text() == "2 sections"
        links.first.click()
        assert page.url.endswith("03_reproduce_the_corruption.html#A-zebra")
        page.go_back()
        assert page.locator(".kvr-results a").count() == 2 and page.errors == []

    def test_the_side_list_marks_the_section(self, visit):
        page = visit("audit.html")
        marked = page.locator(".kvr-side [aria-current]")
        assert marked.count() == 1
        first = marked.inner_text()
        page.mouse.move(800, 400)
        page.mouse.wheel(0, 5000)
        page.wait_for_function(
            "first => document.querySelector('.kvr-side [aria-current]').textContent !== first", arg=first
        )

    @pytest.mark.parametrize("width", [390, 768, 1920])
    def test_no_page_is_wider_than_its_window(self, visit, width):
        for name in ("index.html", "symptoms.html", "audit.html", "search.html"):
            page = visit(name)
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_only_a_failed_notebook_is_an_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "execute", lambda book, *more: (book.node, None))
    for name in ("01_a", "02_b"):
        write(tmp_path, name, "1")
    assert main(tmp_path, tmp_path / "out", ["01"]) == 0
    assert 'role="alert"' not in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    (tmp_path / "02_b.ipynb").write_text("{")
    assert main(tmp_path, tmp_path / "out") == 1
    assert '<p class="kvr-missing" role="alert">1 of 2 notebooks ran' in (tmp_path / "out" / "index.html").read_text(
        encoding="utf-8"
    )
