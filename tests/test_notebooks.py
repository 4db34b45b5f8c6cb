"""Tests of every notebook: no outputs in git, the style of the project, and a run from top to bottom."""

import ast
import re
import statistics
from pathlib import Path

import nbformat
import pytest

from kvviz.report.notebook import execute, read
from kvviz.report.workshop import participants

CELL_TIMEOUT_S = 600
"""Seconds that one cell of a notebook may take in any test. The longest notebook takes 150 s on two quiet cores."""

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
EVERY = pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)


def counts(line: str) -> bool:
    return bool(line.strip()) and not re.match(r"(from \S+ )?import ", line)


def shows(source: str) -> bool:
    """Return True if a cell shows something: a call or a value stands alone, outside of functions."""
    inner = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(source).body if not isinstance(node, inner)]
    return any(isinstance(part, ast.Expr) for node in nodes for part in ast.walk(node))


def sections(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Map each heading to the (kind, source) pairs below the heading. A markdown cell is split at its headings."""
    found, here = {}, []
    for cell in nbformat.read(path, 4).cells:
        parts = (
            re.split(r"^(?=## )", cell.source, flags=re.MULTILINE) if cell.cell_type == "markdown" else [cell.source]
        )
        for part in filter(None, parts):
            if cell.cell_type == "markdown" and part.startswith("## "):
                here = found[part.partition("\n")[0].removeprefix("## ")] = []
            here.append((cell.cell_type, part))
    return found


def cells(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == kind]


def test_the_notebooks_are_here():
    assert NAMES == [
        "00_check_your_machine",
        "01_anatomy_of_a_cell",
        "02_two_layouts_one_cache",
        "03_reproduce_the_corruption",
        "04_root_cause",
        "05_patch_and_gate",
        "06_verify_like_the_reviewer",
        "07_the_fast_path_regained",
        "08_the_transfer_width",
        "09_the_case_book",
        "10_how_fast_can_a_scale_be_written",
        "11_the_challenge",
        "12_the_engine_itself",
        "13_an_open_case",
    ]


@EVERY
def test_no_outputs_in_git(path):
    for cell in nbformat.read(path, 4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@EVERY
def test_first_cell_makes_its_promise(path):
    first = cells(path, "markdown")[0]
    assert first.startswith("# ") and "**" in first
    for words in ("Prerequisite", "minute", "GPU"):
        assert words in first, f"the first cell of {path.name} does not contain {words!r}"


@EVERY
def test_cells_are_short(path):
    """Check the cells of the participants' copy that are not folded. Imports and blank lines do not count."""
    code = [cell for cell in participants(nbformat.read(path, 4)).cells if cell.cell_type == "code"]
    sources = [cell.source for cell in code if not cell.metadata.get("jupyter", {}).get("source_hidden")]
    lengths = [len([line for line in source.splitlines() if counts(line)]) for source in sources]
    assert statistics.median(lengths) <= 5 and max(lengths) <= 20


@EVERY
def test_every_section_asks_before_it_shows(path):
    """Check that each section asks for a prediction, except exercises and the line about GPU memory at the end."""
    for title, parts in sections(path).items():
        asked = [at for at, (kind, source) in enumerate(parts) if kind == "markdown" and "**Predict" in source]
        shown = [at for at, (kind, source) in enumerate(parts) if kind == "code" and shows(source)]
        if shown and not title.startswith("Exercise "):
            assert asked and asked[0] < shown[-1], f"{path.name}: no prediction in section {title!r}"


@EVERY
def test_a_gpu_is_shared(path):
    """A notebook that uses a device keeps a budget from the first cell on, and frees the memory in the last cell."""
    promise, code = cells(path, "markdown")[0], cells(path, "code")
    if not any(word in source for source in code for word in ("kvviz.engine", "gpu_budget", "cuda")):
        assert "GPU: none is used." in promise
        return
    assert "GPU: used if there is one" in promise and "at most 1 GiB" in promise and "the CUDA context" in promise
    assert "print(gpu_budget.keep())" in code[0] and code[-1].endswith("print(gpu_budget.release())")
    assert ("model.release()" in code[-1]) == any("model = load_model(" in source for source in code)


@EVERY
def test_it_ends_in_questions(path):
    """Check that the last cell has three to eight questions, and the same number of answers."""
    asked, _, answered = cells(path, "markdown")[-1].partition("**Recall**")[2].partition("<details>")
    numbers = [re.findall(r"^(\d)\. ", part, re.MULTILINE) for part in (asked, answered)]
    assert numbers[0] == numbers[1] == [str(n + 1) for n in range(len(numbers[0]))] and 3 <= len(numbers[0]) <= 8


@EVERY
def test_links_lead_somewhere(path):
    for source in cells(path, "markdown"):
        for target in re.findall(r"\]\(([\w./-]+\.ipynb)\)", source):
            assert (FOLDER / target).is_file(), f"{path.name} links to {target}"


@EVERY
def test_every_notebook_asserts_its_claims(path):
    assert any("assert " in source for source in cells(path, "code"))


@pytest.mark.notebook
@pytest.mark.slow
@EVERY
def test_runs_from_top_to_bottom(path, model_path):
    _, failure = execute(read(path), lambda number, total, seconds: None, CELL_TIMEOUT_S)
    assert failure is None, f"{failure}"
