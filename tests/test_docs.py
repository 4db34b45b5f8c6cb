"""The documents beside the README: their figures are the README's, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))


def minutes(path: Path) -> dict[str, tuple[str, str]]:
    """Name of each notebook to its last two columns: on 2 CPU cores, on the H200."""
    rows = re.findall(r"^\| `(\d\d_\w+)` \|.*\| ([^|]+) \| ([^|]+) \|$", path.read_text(), re.MULTILINE)
    return {name: (cpu, gpu) for name, cpu, gpu in rows}


def test_minutes_are_those_of_the_readme():
    told = minutes(ROOT / "docs" / "instructor.md")
    assert told == minutes(ROOT / "README.md")
    assert list(told) == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


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
    notebooks = "".join(path.read_text() for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert [title for title in quoted if title not in text or f"## {title}" not in notebooks] == []


def test_the_hub_page_names_what_the_configuration_reads():
    read = re.findall(r'environ\.get\("(\w+)"', (ROOT / "deploy" / "jupyterhub_config.py").read_text())
    page = (ROOT / "docs" / "hub.md").read_text()
    assert read and [name for name in read if f"`{name}`" not in page] == []
