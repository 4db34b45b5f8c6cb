"""Tests of a report as a course: linked pages, their minutes, and one zip of all pages for use without a network."""

import re
import zipfile
from pathlib import Path

import pytest
from nbformat.v4 import new_markdown_cell

from kvviz.report import export
from kvviz.report.export import main
from tests.test_report import MACHINE, without_style, write


def course(folder: Path) -> None:
    """Write three notebooks that take 2 minutes each. The second has more text."""
    for name, words in (("01_a", 5), ("02_b", 300), ("03_c", 5)):
        write(folder, name, new_markdown_cell(f"# {name[-1].upper()}\n\n{'word ' * words}\n\n2 minutes"), "1")


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    monkeypatch.setattr(export, "execute", lambda book, *more: (book.node, None))


def test_equal_pages_equal_archives(tmp_path, capsys):
    course(tmp_path)
    for name in ("a", "b"):
        assert main(tmp_path, tmp_path / name, archive=tmp_path / "zips" / name / "course.zip") == 0
    first, second = ((tmp_path / "zips" / name / "course.zip") for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    names = zipfile.ZipFile(first).namelist()
    assert names == [f"course/{name}.html" for name in ("index", "search", "01_a", "02_b", "03_c")]
    assert zipfile.ZipFile(first).read("course/02_b.html") == (tmp_path / "a" / "02_b.html").read_bytes()
    assert re.search(r"3 pages, the front page and the search are in .*course.zip, \d+ KiB", capsys.readouterr().out)
    assert [path.name for path in first.parent.iterdir()] == ["course.zip"]


def test_pages_of_several_runs_are_one_course(tmp_path):
    course(tmp_path)
    write(tmp_path, "02_b", new_markdown_cell('# B\'s "<&>" title'), "1")
    assert main(tmp_path, tmp_path / "whole") == 0
    for only in ("03", "01", "02"):
        assert main(tmp_path, tmp_path / "parts", [only]) == 0
    for name in ("01_a.html", "02_b.html", "03_c.html"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    (tmp_path / "02_b.ipynb").write_text("{")
    assert main(tmp_path, tmp_path / "parts", ["02"]) == 1
    assert 'href="03_c.html" rel="next"' in (tmp_path / "parts" / "01_a.html").read_text(encoding="utf-8")


def test_an_earlier_page_that_is_not_text_stays_and_is_named(tmp_path, capsys):
    course(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "02_b.html").write_bytes(b"\xff")
    assert main(tmp_path, tmp_path / "out", ["01"]) == 0
    assert "02_b.html to other pages could not be updated" in capsys.readouterr().err
    assert (tmp_path / "out" / "02_b.html").read_bytes() == b"\xff"


def test_a_bad_name_is_reported_before_anything_runs(tmp_path, capsys):
    course(tmp_path)
    (tmp_path / "folder.zip").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("course", "folder.zip", "file/course.zip"):
        assert main(tmp_path, tmp_path / "out", archive=tmp_path / name) == 2
    said = capsys.readouterr().err.splitlines()
    assert "course does not end in .zip: try" in said[0]
    assert "folder.zip is a folder" in said[1] and "cannot be written (" in said[2]
    assert list((tmp_path / "out").iterdir()) == []


def test_no_archive_of_half_a_course(tmp_path, capsys):
    course(tmp_path)
    (tmp_path / "02_b.ipynb").write_text("{")
    assert main(tmp_path, tmp_path / "out", archive=tmp_path / "course.zip") == 1
    assert "course.zip was not written, because some notebooks have no page" in capsys.readouterr().err
    assert not (tmp_path / "course.zip").exists()


def test_the_list_shows_minutes_in_order(tmp_path):
    course(tmp_path)
    main(tmp_path, tmp_path / "out", machine=MACHINE)
    index = without_style((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "3 notebooks: about 4 min to read, and about 6 min to run." in index
    assert re.findall(r'<h3><a href="(\w+)\.html">(\w+)<', index) == [("01_a", "A"), ("02_b", "B"), ("03_c", "C")]
    minutes = re.findall(r"to read: (.*?)<.*?to run: (.*?)<", index)
    assert minutes == [("about 1 min", "about 2 min"), ("about 2 min", "about 2 min"), minutes[0]]
    assert 'rel="next" href="01_a.html">Begin: A' in index
    assert "<dt>to read</dt> <dd>about 2 min</dd>" in (tmp_path / "out" / "02_b.html").read_text(encoding="utf-8")


@pytest.mark.browser
def test_an_unpacked_archive_can_be_read_without_a_network(tmp_path, chromium):
    course(tmp_path)
    assert main(tmp_path, tmp_path / "out", archive=tmp_path / "course.zip") == 0
    zipfile.ZipFile(tmp_path / "course.zip").extractall(tmp_path / "got")
    start, asked = tmp_path / "got" / "course" / "index.html", []
    context = chromium.new_context(offline=True)
    context.on("request", lambda request: asked.append(request.url))
    opened = context.new_page()
    opened.goto(start.as_uri())
    seen = ["index"]
    for direction in ("next", "prev"):
        while (step := opened.locator(f"a[rel={direction}]")).count():
            step.first.click()
            opened.wait_for_load_state()
            seen.append(Path(opened.url).stem)
    opened.get_by_role("link", name="Front page").first.click()
    opened.wait_for_load_state()
    assert seen == ["index", "01_a", "02_b", "03_c", "02_b", "01_a"] and opened.url == start.as_uri()
    asked = [url for url in asked if not url.startswith("data:")]
    assert asked == [start.with_name(f"{name}.html").as_uri() for name in (*seen, "index")]
    context.close()
