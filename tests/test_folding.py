"""Code that a page folds: imports, asserts, and cells that JupyterLab folds. Buttons show this code."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from kvviz.report.folding import parts_of
from tests.test_notebooks import NOTEBOOKS
from tests.test_report import page

SOURCE = 'import os\n\nfrom math import (\n    pi,\n)\n\nx = 1  # kept\nassert x, (\n    "no"\n)\n\nprint(x)\nassert x'


def test_imports_and_asserts_are_folded_and_every_line_stays_in_order():
    parts = parts_of(new_code_cell(SOURCE))
    assert "\n".join(part.source for part in parts) == SOURCE
    assert [part.source.strip() for part in parts if not part.folded] == ["x = 1  # kept", "print(x)"]
    assert [part.lines for part in parts] == [4, 1, 3, 1, 1]


@pytest.mark.parametrize("source", ["import os\nassert os", "%magic", "x = 1", "if x:\n    import os", "def f(:"])
def test_cells_of_one_part(source):
    assert [part.folded for part in parts_of(new_code_cell(source))] == [False]
    hidden = new_code_cell(source, metadata={"jupyter": {"source_hidden": True}})
    assert [part.folded for part in parts_of(hidden)] == [True]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_checks_are_folded_and_no_exercise_is(path):
    for cell in nbformat.read(path, 4).cells:
        tags, hidden = cell.metadata.get("tags", []), cell.metadata.get("jupyter", {}).get("source_hidden", False)
        assert hidden or "check" not in tags
        assert not hidden or "solution" not in tags
        assert "**Reveal" not in cell.source and cell.source.count("<details>") == cell.source.count("</details>")


@pytest.fixture(scope="module")
def html() -> str:
    hidden = new_code_cell("a = 1\nb = 2", metadata={"jupyter": {"source_hidden": True}})
    return page(new_markdown_cell("# T"), new_code_cell(SOURCE), hidden, new_code_cell("y = 2"))


@pytest.fixture
def visit(chromium, html, tmp_path):
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    contexts = []

    def open_page(**more):
        contexts.append(chromium.new_context(offline=True, **more))
        opened = contexts[-1].new_page()
        opened.errors = []
        opened.on("pageerror", lambda error: opened.errors.append(str(error)))
        opened.goto((tmp_path / "page.html").as_uri())
        return opened

    yield open_page
    for context in contexts:
        context.close()


def shown(opened) -> list[bool]:
    parts = opened.locator(".kvr-part")
    return [parts.nth(n).is_visible() for n in range(parts.count())]


FOLDED = [False, True, False, True, False, False, True]


@pytest.mark.browser
def test_one_cell_can_be_shown_and_folded_with_the_keyboard(visit):
    opened = visit()
    assert shown(opened) == FOLDED
    button = opened.get_by_role("button", name="Show 8 lines of code")
    button.focus()
    opened.keyboard.press("Enter")
    assert shown(opened) == [True] * 5 + [False, True]
    opened.get_by_role("button", name="Fold code").press("Enter")
    assert shown(opened) == FOLDED and opened.errors == []


@pytest.mark.browser
def test_all_cells_of_a_page_and_of_every_page(visit):
    opened = visit()
    opened.get_by_role("button", name="Show all code").click()
    assert all(shown(opened)) and not opened.get_by_role("button", name="Show 8 lines of code").is_visible()
    opened.reload()
    assert shown(opened) == FOLDED
    opened.get_by_label("on every page").check()
    opened.reload()
    assert all(shown(opened)) and opened.get_by_label("on every page").is_checked()
    opened.get_by_label("on every page").uncheck()
    opened.reload()
    assert shown(opened) == FOLDED


@pytest.mark.browser
def test_without_scripts_all_code_is_shown(visit):
    opened = visit(java_script_enabled=False)
    assert all(shown(opened)) and opened.locator("button:visible").count() == 0


@pytest.mark.browser
def test_folding_moves_nothing(visit):
    opened = visit()
    moved = opened.evaluate(
        """() => new Promise((done) => {
            let sum = 0;
            new PerformanceObserver((list) => list.getEntries().forEach((one) => { sum += one.value; }))
                .observe({ type: "layout-shift", buffered: true });
            setTimeout(() => done(sum), 300);
        })"""
    )
    assert moved == 0
