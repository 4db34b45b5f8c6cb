"""Every notebook: clean in git, in the kit's style, and running from top to bottom."""

import re
import statistics
from pathlib import Path

import nbformat
import pytest

from kvviz.report.notebook import execute, read
from kvviz.report.workshop import participants

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
EVERY = pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)


def counts(line: str) -> bool:
    return bool(line.strip()) and not re.match(r"(from \S+ )?import ", line)


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
        "11_the_challenge",
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
        assert words in first, f"{path.name} does not state: {words}"


@EVERY
def test_cells_are_short(path):
    """As a participant gets them, imports and blank lines apart."""
    sources = [cell.source for cell in participants(nbformat.read(path, 4)).cells if cell.cell_type == "code"]
    lengths = [len([line for line in source.splitlines() if counts(line)]) for source in sources]
    assert statistics.median(lengths) <= 4 and max(lengths) <= 20


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
    _, failure = execute(read(path), lambda number, total, seconds: None, 600)
    assert failure is None, f"{failure}"
