"""Tests of the report: this Python runs the notebooks, and each becomes a page that needs no network."""

import http.server
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from kvviz.report import export
from kvviz.report.export import main
from kvviz.report.notebook import read
from kvviz.report.page import Frame, Link, render_page
from kvviz.report.paths import PACKAGE, shortener
from kvviz.report.prose import Prose, link_pages, mathml
from tests.test_notebooks import CELL_TIMEOUT_S

MACHINE = {"python": "3.x", "kernels": "interpreter on the CPU", "seat <b>": "a & b"}
SCRIPT = "<script>alert(1)</script>"
OPENING = f"# Cells {SCRIPT}\n\nYou will *see* that $s = \\frac{{a}}{{448}}$, and `$no$ math`.\n\nIt takes 2 minutes."
CHUNK = "import sys\nprint(sys.executable)"


HEAD = '{"nbformat": 4, "nbformat_minor": 5'
NOT_NOTEBOOKS = (
    "{",
    "[]",
    "[" * 100_000,
    '{"nbformat": 3}',
    HEAD + ', "metadata": {}, "cells": [{}]}',
    HEAD + ', "metadata": {}, "cells": [5]}',
    HEAD + ', "metadata": {}, "cells": {"a": 1}}',
    HEAD + ', "metadata": {}, "cells": [{"id": [], "cell_type": "markdown", "metadata": {}, "source": "x"}]}',
    HEAD + ', "metadata": {}, "cells": [{"cell_type": "markdown", "metadata": {}, "source": "![](attachment:b)"}]}',
    HEAD + ', "metadata": [], "cells": []}',
    HEAD + ', "cells": []}',
    HEAD + ', "metadata": {"kvviz": "text"}, "cells": []}',
    HEAD + ', "metadata": {"kvviz": null}, "cells": []}',
)


def write(folder: Path, name: str, *cells: nbformat.NotebookNode, **metadata: object) -> Path:
    """Write a notebook of ``cells`` and return its path. A plain string is a code cell."""
    made = [new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    for number, cell in enumerate(made):
        cell.id = f"c{number}"
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=made, metadata={"kvviz": metadata}), path)
    return path


def page(*cells: nbformat.NotebookNode, folder: Path = Path("."), title: str = "T", before: Link | None = None) -> str:
    """Return the page of ``cells`` with the outputs that they already have."""
    for number, cell in enumerate(cells):
        cell.id = f"c{number}"
    frame = Frame(folder, MACHINE, "2001-02-03")
    return render_page(new_notebook(cells=list(cells)), title, frame, before, Link("03_z a.html", "<Z>"))


def with_outputs(*outputs: nbformat.NotebookNode) -> nbformat.NotebookNode:
    return new_code_cell("1", outputs=list(outputs), execution_count=1)


def shown(**data: object) -> nbformat.NotebookNode:
    """Return a displayed output. In the names of kinds, ``__`` stands for the slash."""
    return new_output("display_data", data={kind.replace("__", "/"): value for kind, value in data.items()})


def without_style(html: str) -> str:
    return re.sub(r"<style.*?</style>", "", html, flags=re.DOTALL)


class TestProse:
    def test_math_becomes_mathml_and_code_stays(self):
        body = Prose(Path(".")).render("$x^2$ and `$x^2$`\n\n$$y$$\n\n```\n$$z$$\n```\n\nuse `$$` and `$$`, \\$5")
        assert body.count("<math") == 2 and 'display="inline"' in body and 'display="block"' in body
        assert "<code>$x^2$</code>" in body and "$$z$$" in body and body.count("<code>$$</code>") == 2
        assert "$5" in body

    @pytest.mark.parametrize("environment", ["aligned", "align", "align*", "gathered", "split", "cases"])
    def test_environments_have_rows(self, environment):
        body = mathml(rf"\begin{{{environment}}} a \\ b \end{{{environment}}}", "block")
        assert body.count("<mtr>") == 2 and "begin" not in body

    @pytest.mark.parametrize("latex", [rf"\text{{{SCRIPT}}}", "x_{", rf"\color{{{SCRIPT}}}{{x}}", rf"\frac{{{SCRIPT}"])
    def test_no_markup_comes_out_of_math(self, latex):
        assert "<script" not in mathml(latex, "inline")

    def test_underscores_in_text(self):
        assert "<mtext>page_size_bytes</mtext>" in mathml(r"\text{page\_size\_bytes}", "inline")

    def test_headings_are_unique_and_harmless(self):
        prose = Prose(Path("."))
        body = prose.render(f"# Twice {SCRIPT} $x$\n\n## Twice {SCRIPT} $x$") + prose.render("## Twice")
        anchors = [heading.anchor for heading in prose.headings]
        assert len(set(anchors)) == 3 and [heading.level for heading in prose.headings] == [1, 2, 2]
        assert all(f'id="{anchor}"' in body for anchor in anchors)
        assert "<script" not in body + prose.headings[0].html and "&lt;script&gt;" in prose.headings[0].html

    def test_html_of_a_lesson_stays_and_other_html_is_text(self):
        body = Prose(Path(".")).render(
            "<details><summary>Solution</summary>\n\n**b**\n\n</details>\n\nx <img src=http://e.org/x.png onerror=a()>"
        )
        assert "<details><summary>Solution</summary>" in body and "</details>" in body
        assert "e.org" not in body and "onerror" not in body

    def test_pictures_travel_or_are_named(self, tmp_path):
        (tmp_path / "dot.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
        body = Prose(tmp_path).render("![a dot](dot.svg) ![far](https://example.org/x.png) ![gone](gone.png)")
        assert 'alt="a dot" src="data:image/svg+xml;base64,' in body or 'src="data:image/svg+xml;base64,' in body
        assert body.count("<img") == 1 and ">picture: far</a>" in body and "<em>picture: gone</em>" in body

    def test_links_to_notebooks_lead_to_pages(self):
        body = Prose(Path(".")).render("[a](02_b.ipynb#There) [c](https://example.org/d.ipynb)")
        assert 'href="02_b.html#There"' in body and 'href="https://example.org/d.ipynb"' in body

    def test_a_link_to_a_page_that_does_not_exist_is_plain_text(self):
        source = "[a](02_b.ipynb#x) <a title='\"t' href='03 c.ipynb'>c</a> [f](data.json) [here](#x) [w](https://e.org)"
        body = Prose(Path(".")).render(source)
        assert re.findall(' href="([^"]*)"', link_pages(body, [])) == ["#x", "https://e.org"]
        both = link_pages(link_pages(body, []), ["02_b.html", "03 c.html"])
        assert re.findall(' href="([^"]*)"', both) == ["02_b.html#x", "03%20c.html", "#x", "https://e.org"]
        assert re.sub(r"<[^>]*>", "", both) == re.sub(r"<[^>]*>", "", body)

    @pytest.mark.parametrize("target", ["javascript:alert(1)", "JavaScript:x.ipynb", "/etc/x.ipynb", "data:x.html"])
    def test_a_link_elsewhere_never_becomes_a_link_to_a_page(self, target):
        body = Prose(Path(".")).render(f'[a]({target}) <a href="{target}">b</a> <a class="kvr-to" data-to="{target}">')
        assert 'href="javascript:' not in link_pages(body, [target]).lower() and 'class="kvr-to" href' not in body


class TestPaths:
    def test_paths_of_this_machine_vanish(self, tmp_path):
        short = shortener(tmp_path)
        assert short(f"{tmp_path}/x.py:1") == f"{tmp_path.name}/x.py:1"
        assert short(f"in {PACKAGE}/cache/spec.py") == "in kvviz/cache/spec.py"
        assert short(f"\x1b[32m{Path(pytest.__file__).parents[1]}/torch/a.py") == "\x1b[32msite-packages/torch/a.py"
        assert short(f"File {Path(os.__file__).parent}/json/decoder.py") == "File python/json/decoder.py"
        assert short(f"{Path.home()}/notes") == "~/notes"
        private = f"{tempfile.gettempdir()}/kvviz-a1_b2c3d"
        assert short(f"{private}/tmp/x.json, {private}/other") == "tmp/x.json, tmp/kvviz-a1_b2c3d/other"
        assert short("/somewhere/ipykernel_77/123.py:1: UserWarning") == "cell:1: UserWarning"

    def test_long_words_take_linear_time(self, tmp_path):
        short, word = shortener(tmp_path), "iVBORw0KGgo/" * 90_000
        assert short(word) == word and short(f"{word}/ipykernel_7/8.py:1") == "cell:1"  # quadratic time would be hours

    def test_cells_are_named_wherever_a_word_begins(self, tmp_path):
        text = "\"/t/ipykernel_1/2.py\", '/t/ipykernel_1/2.py' <a/ipykernel_1/2.py> ipykernel_1/2.py:3 ipykernel_x/2.py"
        assert shortener(tmp_path)(text) == "\"cell\", 'cell' <cell> cell:3 ipykernel_x/2.py"

    def test_other_text_stays(self, tmp_path):
        for text in (f"{tmp_path}-else/x", f"base64{tmp_path}/x", "a/tmp/b", "1 / 2"):
            assert shortener(tmp_path)(text) == text or "tmp" in str(tmp_path.parent) and text.endswith("-else/x")


class TestPage:
    def test_nothing_is_fetched(self):
        html = page(
            new_markdown_cell("# A\n\n$x$ ![far](http://example.org/x.png)"),
            with_outputs(shown(image__png="AAAA"), shown(**{"image__svg+xml": "<svg/>"})),
        )
        assert not re.findall(r"<(?:script|img|link|iframe|source)[^>]*(?:src|href)=.https?:", html)
        assert "url(" not in html and "@import" not in html and html.count("<script>") == html.count("<script") == 3
        assert "default-src 'none'" in html

    def test_widgets_and_scripts_leave_no_uuid_behind(self):
        widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "f00"}, "text/plain": "VBox(children=())"}
        cell = with_outputs(
            new_output("display_data", data=widget), shown(application__javascript="1", text__plain="<js>")
        )
        html = page(cell)
        assert html == page(cell) and "f00" not in html and "VBox" not in html
        assert html.count("an interactive control stands here") == 1 and "&lt;js&gt;" in html

    @pytest.mark.parametrize("kind", ["text__html", "image__svg_xml"])
    def test_an_output_does_not_lead_away(self, kind):
        tags = "<meta http-equiv=refresh content='0'><BASE href=//e.org/><me<meta x>ta http-equiv=refresh><metadata>"
        html = page(with_outputs(shown(**{kind.replace("_xml", "+xml"): f"<b>{tags}kept</b>"})))
        body = html[html.index("<body") :]
        assert not re.search(r"<(meta|base)[\s/>]", body, re.IGNORECASE)
        if kind == "text__html":
            assert "<metadata>kept</metadata>" in body

    def test_names_are_escaped(self):
        html = page(new_markdown_cell(OPENING), title=f"T {SCRIPT}", before=Link(f'{SCRIPT}".html', f"B {SCRIPT}"))
        assert SCRIPT not in html and html.count("&lt;script&gt;alert(1)") >= 5
        assert "&lt;Z&gt; →" in html and 'href="03_z%20a.html"' in html
        assert "<dt>seat &lt;b&gt;</dt> <dd>a &amp; b</dd>" in html
        assert html.index("<dt>kernels</dt>") < html.index("<dt>python</dt>") < html.index("<dt>seat")

    def test_contents_lead_to_headings(self):
        html = page(new_markdown_cell("# A b\n\n## C & d\n\n## C & d"), new_markdown_cell("### É *f* `g<h`"))
        targets = re.findall(r'<li class="kvr-level-\d"><a href="#([^"]*)"', html)
        assert len(targets) == 8  # once for wide screens, once for narrow ones
        assert all(html.count(f'id="{target}"') == 1 for target in targets)

    def test_paths_and_addresses_are_kept_out(self, tmp_path):
        error = new_output("error", ename="E", evalue="", traceback=[f"\x1b[38;5;9mFile {tmp_path}/a.py\x1b[39m", "E"])
        outputs = (
            new_output("stream", name="stderr", text=f"{PACKAGE}/x.py:3: UserWarning"),
            shown(text__plain="<Line2D at 0x7f1234567890>", text__html=f"<p>{tmp_path}/b</p>"),
            shown(text__plain="<Line2D at 0x7f1234567890>"),
        )
        html = page(with_outputs(error, *outputs), folder=tmp_path)
        assert str(tmp_path) not in html and str(PACKAGE) not in html and "0x7f" not in html and "\x1b" not in html
        assert "at 0x…" in html and "kvviz/x.py:3" in html and f"File {tmp_path.name}/a.py" in html

    def test_the_date_is_the_only_clock(self):
        cell = new_markdown_cell(OPENING)
        assert page(cell) == page(cell)
        assert page(cell).count("2001-02-03") == 2

    def test_size(self):
        assert len(page(new_markdown_cell(OPENING)).encode()) < 40_000


class TestReading:
    def test_metadata_first_then_words(self, tmp_path):
        stated = read(write(tmp_path, "a", new_markdown_cell(OPENING), title="T <b>", minutes_cpu=7))
        assert (stated.title, stated.minutes_cpu, stated.minutes_gpu) == ("T <b>", 7.0, 2.0)
        assert stated.promise.startswith("You will <em>see</em> that <math")
        bare = read(write(tmp_path, "b", new_markdown_cell("# Only *this*"), minutes_cpu="soon"))
        assert (bare.title, bare.promise, bare.minutes_cpu) == ("Only this", "", None)

    def test_outputs_on_disk_are_dropped(self, tmp_path):
        notebook = read(write(tmp_path, "a", with_outputs(new_output("stream", text="old"))))
        assert notebook.node.cells[0].outputs == []

    def test_minutes_to_read_are_counted_in_words(self, tmp_path):
        outputs = with_outputs(new_output("stream", text="word " * 5000))
        notebook = read(write(tmp_path, "a", new_markdown_cell("word " * 500), "x = 1\n" * 33, outputs))
        assert notebook.minutes_read == 4  # 500 + 99 + 1 words
        said = new_markdown_cell("# A\n\nAbout 2 minutes to run, 20\nto read." + "word " * 500)
        assert read(write(tmp_path, "c", said)).minutes_read == 20
        assert read(write(tmp_path, "b")).minutes_read == 1

    @pytest.mark.parametrize("text", NOT_NOTEBOOKS)
    def test_a_file_that_is_not_a_notebook(self, tmp_path, text):
        path = tmp_path / "a.ipynb"
        path.write_text(text)
        assert re.match(r"cannot be read as a notebook: [^\n]{8,}$", read(path).problem)

    @pytest.mark.parametrize("name", ["index", "Index", "INDEX"])
    def test_the_name_of_the_index_is_taken(self, tmp_path, name):
        assert "rename the notebook" in read(write(tmp_path, name, CHUNK)).problem

    def test_missing_ids_are_not_random(self, tmp_path):
        path = tmp_path / "a.ipynb"
        nbformat.write(nbformat.from_dict({"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": []}), path)
        path.write_text(path.read_text().replace("[]", '[{"cell_type": "markdown", "metadata": {}, "source": "x"}]'))
        assert read(path).node.cells[0].id == "cell-0"


class TestArguments:
    def test_no_folder(self, tmp_path, capsys):
        assert main(tmp_path / "none", tmp_path / "out") == 2
        assert "is not a folder" in capsys.readouterr().err

    def test_no_notebook(self, tmp_path, capsys):
        assert main(tmp_path, tmp_path / "out") == 2
        assert "contains no .ipynb file" in capsys.readouterr().err

    def test_unknown_name(self, tmp_path, capsys):
        write(tmp_path, "01_a", CHUNK)
        assert main(tmp_path, tmp_path / "out", ["02"]) == 2
        assert "no notebook has a name that begins with '02': the names are 01_a" in capsys.readouterr().err


class TestWithoutKernels:
    """Tests without kernels: a fake run returns each notebook as it is."""

    @pytest.fixture(autouse=True)
    def ran(self, monkeypatch) -> list[str]:
        names = []
        monkeypatch.setattr(export, "execute", lambda book, *more: names.append(book.name) or (book.node, None))
        return names

    def test_malformed_notebooks_do_not_stop_the_others(self, tmp_path, capsys, ran):
        for number, text in enumerate(NOT_NOTEBOOKS):
            (tmp_path / f"{number:02}.ipynb").write_text(text)
        write(tmp_path, "99_z", CHUNK)
        assert main(tmp_path, tmp_path / "out") == 1
        assert ran == ["99_z"] and f"1 of {len(NOT_NOTEBOOKS) + 1} notebooks ran" in capsys.readouterr().out
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["99_z.html", "index.html", "search.html"]

    def test_a_notebook_called_index_leaves_the_index_alone(self, tmp_path, capsys, ran):
        write(tmp_path, "01_a", CHUNK)
        write(tmp_path, "index", CHUNK)
        out = tmp_path / "out"
        for only in ([], ["01"], []):
            assert main(tmp_path, out, only) == (0 if only else 1)
            html = (out / "01_a.html").read_text(encoding="utf-8")
            assert 'rel="next"' not in html and "01_a" in (out / "index.html").read_text(encoding="utf-8")
        assert ran == ["01_a"] * 3 and "rename the notebook" in capsys.readouterr().err

    def test_a_folder_that_cannot_be_written_to_is_reported_before_anything_runs(
        self, tmp_path, capsys, ran, monkeypatch
    ):
        write(tmp_path, "01_a", CHUNK)
        (tmp_path / "file").write_text("")
        assert main(tmp_path, tmp_path / "file") == 2
        (tmp_path / "out" / "index.html").mkdir(parents=True)
        assert main(tmp_path, tmp_path / "out") == 2
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(full))
        assert main(tmp_path, tmp_path / "full") == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 3 and said[0].endswith("file cannot be written to (File exists): choose another folder")
        assert "index.html is a folder" in said[1] and "(No space left on device)" in said[2]
        assert ran == [] and not list((tmp_path / "full").iterdir())

    def test_a_folder_in_the_place_of_a_page_does_not_stop_the_report(self, tmp_path, capsys, ran):
        write(tmp_path, "01_a", CHUNK)
        write(tmp_path, "02_b", CHUNK)
        (tmp_path / "out" / "01_a.html").mkdir(parents=True)
        assert main(tmp_path, tmp_path / "out") == 1
        said = capsys.readouterr()
        assert ran == ["01_a", "02_b"] and "2 of 2 notebooks ran" in said.out
        assert "No page could be made of 01_a (IsADirectoryError: " in said.out and "index.html" in said.out
        assert "01_a.html could not be removed" in said.err and (tmp_path / "out" / "02_b.html").is_file()

    def test_if_no_page_can_be_made_the_result_is_true(self, tmp_path, capsys, ran, monkeypatch):
        write(tmp_path, "01_a", CHUNK)
        write(tmp_path, "02_b", CHUNK)
        assert main(tmp_path, tmp_path / "out") == 0

        def no_template(*given):
            raise ValueError("No template sub-directory with name 'lab' found")

        monkeypatch.setattr(export, "render_page", no_template)
        capsys.readouterr()
        assert main(tmp_path, tmp_path / "out", archive=tmp_path / "a.zip") == 1
        said = capsys.readouterr()
        last = said.out.splitlines()[-1]
        assert re.match(
            r"2 of 2 notebooks ran, in \d+ s\. No page could be made of any of them \(ValueError: No tem", last
        )
        assert last.endswith(" There is no page to open.") and "index.html" not in said.out and "FAILED" not in said.out
        assert "report: 01_a.ipynb ran, but no page could be made of it: ValueError: No template" in said.err
        index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
        assert "ran, but no page could be made: ValueError" in index and "01_a.html" not in index

    def test_an_index_that_cannot_be_written_is_not_recommended(self, tmp_path, capsys, ran, monkeypatch):
        write(tmp_path, "01_a", CHUNK)
        monkeypatch.setattr(export, "render_index", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert main(tmp_path, tmp_path / "out") == 1
        said = capsys.readouterr()
        assert "index.html could not be written: " in said.err and "No space left" in said.err
        assert "1 of 1 notebook ran" in said.out and "index.html" not in said.out

    def test_no_link_of_a_partial_report_is_dead(self, tmp_path, ran):
        for name, other in (("01_a", "02_b"), ("02_b", "03_c"), ("03_c", "01_a")):
            write(
                tmp_path, name, new_markdown_cell(f"# {name}\n\nSee [there]({other}.ipynb#x), and [data](data.json).")
            )
        out = tmp_path / "out"
        for only, links in ((["01"], []), (["02"], ["02_b"]), ([], ["02_b", "03_c", "01_a"])):
            assert main(tmp_path, out, only) == 0
            assert dead_links(out) == []
            pages = [path.read_text(encoding="utf-8") for path in sorted(out.glob("0*.html"))]
            assert [found for text in pages for found in re.findall(r'href="(\w+)\.html#x">there</a>', text)] == links
        (tmp_path / "02_b.ipynb").write_text("{")
        assert main(tmp_path, out) == 1 and dead_links(out) == []

    def test_no_link_of_an_interrupted_report_is_dead(self, tmp_path, capsys, monkeypatch):
        write(tmp_path, "01_a", new_markdown_cell("[b](02_b.ipynb)"))
        write(tmp_path, "02_b", CHUNK)

        def interrupted(book, *more):
            if book.name == "02_b":
                raise KeyboardInterrupt
            return book.node, None

        monkeypatch.setattr(export, "execute", interrupted)
        assert main(tmp_path, tmp_path / "out") == 130
        assert "Interrupted. 1 of 2 notebooks ran, in 0 s. Open " in capsys.readouterr().out
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["01_a.html", "index.html", "search.html"]
        assert dead_links(tmp_path / "out") == []


def dead_links(folder: Path) -> list[str]:
    """Return the links in all pages of ``folder`` that lead to no file and are not addresses of the web."""
    found = {link for path in folder.glob("*.html") for link in re.findall(r'<a [^>]*href="([^"#]+)', path.read_text())}
    here = [link for link in found if ":" not in link]
    return sorted(link for link in here if not (folder / urllib.parse.unquote(link)).is_file())


@pytest.mark.notebook
class TestRuns:
    def test_stated_times_are_added_before_they_are_rounded(self, tmp_path, capsys):
        write(tmp_path, "01_a", CHUNK, minutes_cpu=0.4)
        write(tmp_path, "02_b", CHUNK, minutes_cpu=1.3)
        assert main(tmp_path, tmp_path / "out", machine=MACHINE) == 0
        assert "2 notebooks, about 2 min according to their authors" in capsys.readouterr().out
        index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
        assert re.findall(r"to run: ([^<]+)<", index) == ["less than 1 min", "about 1 min"]

    def test_runs_exports_and_says_so(self, tmp_path, capsys, monkeypatch):
        home = tmp_path / "home"
        home.mkdir()
        for name in ("HOME", "USERPROFILE"):
            monkeypatch.setenv(name, str(home))
        monkeypatch.setenv("MPLBACKEND", "agg")
        monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "kernels"))
        (tmp_path / "kernels" / "kernels" / "python3").mkdir(parents=True)
        (tmp_path / "kernels" / "kernels" / "python3" / "kernel.json").write_text('{"argv": ["false"]}')
        (tmp_path / "near.txt").write_text("near")
        check = (
            "import os, kvviz\nprint(open('near.txt').read(), os.environ.get('MPLBACKEND') != 'agg', kvviz.__file__)"
        )
        write(tmp_path, "01_a", new_markdown_cell(OPENING), CHUNK, check, "print('err', file=sys.stderr)")
        before = (tmp_path / "01_a.ipynb").read_bytes()

        assert main(tmp_path, tmp_path / "out", machine=MACHINE) == 0
        said = capsys.readouterr()
        assert said.out.startswith("Kernels run on: interpreter on the CPU\n") and said.err == ""
        assert "1 notebook, about 2 min according to their authors" in said.out
        assert re.search(r"01_a done in \d+\.\d s, page of \d+ KiB", said.out)
        html = (tmp_path / "out" / "01_a.html").read_text(encoding="utf-8")
        assert shortener(tmp_path)(sys.executable) in html
        assert "near True kvviz/__init__.py" in html and "application/vnd.jupyter.stderr" in html
        assert not list(home.rglob("*")) and (tmp_path / "01_a.ipynb").read_bytes() == before
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["01_a.html", "index.html", "search.html"]

    def test_a_cell_that_raised(self, tmp_path, capsys):
        out = tmp_path / "out"
        out.mkdir()
        (out / "02_b.html").write_text("stale")
        write(tmp_path, "01_a", new_markdown_cell("# First"), "1", title="First")
        write(tmp_path, "02_b", new_markdown_cell("# B\n\nPromise."), "x = 1", "\nx / 0  # here\nx", "never")
        write(tmp_path, "03_c", "1 / 0", "print('after')", title=f"Third {SCRIPT}")
        nodes = nbformat.read(tmp_path / "03_c.ipynb", as_version=4)
        nodes.cells[0].metadata.tags = ["raises-exception"]
        nbformat.write(nodes, tmp_path / "03_c.ipynb")
        (tmp_path / "04_d.ipynb").write_text("{")

        assert main(tmp_path, out) == 1
        said = capsys.readouterr()
        assert "report: 02_b.ipynb, code cell 2: ZeroDivisionError: division by zero\n    x / 0  # here" in said.err
        assert "report: 04_d.ipynb, before its first cell: cannot be read as a notebook" in said.err
        assert "Kernels run on: unknown" in said.out and "2 of 4 notebooks ran" in said.out
        assert sorted(path.name for path in out.iterdir()) == ["01_a.html", "03_c.html", "index.html", "search.html"]
        first, third, index = (
            (out / name).read_text(encoding="utf-8") for name in ("01_a.html", "03_c.html", "index.html")
        )
        assert 'href="03_c.html" rel="next"' in first and 'href="01_a.html" rel="prev"' in third
        assert "ZeroDivisionError" in third and "after" in third
        assert "no page: code cell 2: ZeroDivisionError: division by zero" in index and "02_b.html" not in index
        assert SCRIPT not in index and "<p>Promise.</p>" in index

    def test_a_kernel_that_died_or_hung(self, tmp_path, capsys):
        write(tmp_path, "01_dies", "import os\nos._exit(3)", "1")
        write(tmp_path, "02_hangs", "import time\ntime.sleep(60)")
        write(tmp_path, "03_exits", "raise SystemExit(0)")
        assert main(tmp_path, tmp_path / "out", cell_timeout_s=2) == 1
        said = capsys.readouterr().err
        assert "01_dies.ipynb, code cell 1: the Python process of the notebook died" in said
        assert "02_hangs.ipynb, code cell 1: not done after 2 s" in said
        assert "03_exits.ipynb, code cell 1: SystemExit" in said

    def test_a_signal_leaves_no_temporary_files_behind(self, tmp_path):
        """The kernel makes temporary files too, and a cell that is still running does not delay the end."""
        cell = (
            "import os, tempfile, time\ntempfile.mkdtemp()\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(300)"
        )
        write(tmp_path, "01_a", "import tempfile\ntempfile.mkdtemp()")
        write(tmp_path, "02_b", cell)
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        code = "import sys\nfrom kvviz.report.export import main\nsys.exit(main('.', 'out'))"
        for number, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)):
            environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(PACKAGE.parent)}
            order = [sys.executable, "-c", code]
            report = subprocess.Popen(order, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
            until = time.monotonic() + CELL_TIMEOUT_S
            while not (tmp_path / "pid").is_file() and report.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
            kernel = int((tmp_path / "pid").read_text())
            report.send_signal(number)
            out, _ = report.communicate(timeout=CELL_TIMEOUT_S)
            assert report.returncode == status and "Interrupted. 1 of 2 notebooks ran" in out
            assert list(temporary.iterdir()) == []
            with pytest.raises(ProcessLookupError):
                os.kill(kernel, 0)
            (tmp_path / "pid").unlink()

    def test_a_second_report_differs_only_in_its_date(self, tmp_path):
        write(tmp_path, "01_a", new_markdown_cell(OPENING), "print({'b', 'a', 'c'})", "object()")
        write(tmp_path, "02_b", "1")
        pages = []
        for out in (tmp_path / "one", tmp_path / "two"):
            out.mkdir()
            (out / "02_b.html").write_text("earlier")
            assert main(tmp_path, out, ["01"], MACHINE) == 0
            pages.append(re.sub(r"\d{4}-\d\d-\d\d", "DATE", (out / "01_a.html").read_text(encoding="utf-8")))
        assert pages[0] == pages[1]
        assert (out / "02_b.html").read_text() == "earlier"
        assert "not run in this report; the page is from an earlier report" in (out / "index.html").read_text(
            encoding="utf-8"
        )
        assert 'href="02_b.html" rel="next"' in (out / "01_a.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    """Write a page with content that is too wide or too long, and with text of every colour."""
    wide = "<table><thead><tr>" + "<th>column</th>" * 40 + "</tr></thead></table>"
    formula = "$$" + " + ".join(f"x_{{{i}}}" for i in range(80)) + "$$\n\n"
    table = "|" + "a very long head|" * 12 + "\n" + "|" + "--|" * 12 + "\n" + "|" + "`page_size_bytes`|" * 12
    html = page(
        new_markdown_cell(f"{OPENING}\n\n{formula}{table}\n\n`{'long_name' * 20}`"),
        new_markdown_cell("## Second\n\n<details><summary>Solution</summary>\n\nhidden words\n\n</details>"),
        new_code_cell(
            "def f(x: int = 1) -> None:  # " + "long " * 80,
            execution_count=1,
            outputs=[
                new_output("stream", name="stdout", text="\n".join(f"line {i} " + "w" * 300 for i in range(120))),
                new_output("stream", name="stderr", text="a warning"),
                new_output("error", ename="E", evalue="e", traceback=["E: e"]),
                shown(text__html=wide),
            ],
        ),
    )
    path = tmp_path_factory.mktemp("page") / "sample.html"
    path.write_text(html, encoding="utf-8")
    return path


@pytest.fixture
def visit(chromium, sample) -> Iterator:
    contexts = []

    def open_page(width: int = 1280, scheme: str = "light"):
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        opened = context.new_page()
        opened.asked = []
        opened.on("request", lambda request: opened.asked.append(request.url))
        opened.on("dialog", lambda dialog: opened.asked.append("dialog") or dialog.dismiss())
        opened.goto(sample.as_uri())
        return opened

    yield open_page
    for context in contexts:
        context.close()


CONTRAST = """
selector => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = rgb => {
    const [r, g, b] = rgb.slice(0, 3).map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector);
  let ground = element;
  while (ground && (parse(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0) ground = ground.parentElement;
  const pair = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor].map(c => light(parse(c)));
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}
"""
READ = (
    ".kvr-prose p", "h1", "h2", ".kvr-facts dt", ".kvr-facts dd", ".kvr-steps a", ".kvr-prompt", "summary",
    ".kvr-prose code", ".highlight .k", ".highlight .nf", ".highlight .nb", ".highlight .mi", ".highlight .c1",
    ".jp-RenderedText pre", '[data-mime-type="application/vnd.jupyter.stderr"] pre', ".kvr-error pre", "th", "math",
)  # fmt: skip


@pytest.mark.browser
class TestInBrowser:
    def test_the_page_requests_nothing(self, visit, sample):
        opened = visit()
        opened.wait_for_timeout(200)
        assert [url for url in opened.asked if not url.startswith("data:")] == [sample.as_uri()]

    def test_an_output_cannot_use_the_network(self, chromium, tmp_path):
        heard = []

        class Listener(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                heard.append(self.path)

        with http.server.HTTPServer(("127.0.0.1", 0), Listener) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            there = f"http://127.0.0.1:{server.server_port}"
            asking = f"<img src='{there}/a'><script>window.ran = 1; fetch('{there}/b')</script><iframe src='{there}/c'>"
            (tmp_path / "a.html").write_text(page(with_outputs(shown(text__html=asking))), encoding="utf-8")
            opened = chromium.new_page()
            opened.goto((tmp_path / "a.html").as_uri())
            opened.wait_for_timeout(300)
            assert opened.evaluate("window.ran") == 1 and heard == []
            opened.close()
            server.shutdown()

    def test_an_output_does_not_lead_away(self, chromium, tmp_path):
        (tmp_path / "b.html").write_text("elsewhere")
        tag = "<meta http-equiv=refresh content='0; url=b.html'>"
        html = shown(text__html=f"<base href='https://example.org/'><p>{tag}<a id=here href='#x'>here</a></p>")
        svg = shown(**{"image__svg+xml": f"<svg><foreignObject>{tag}</foreignObject></svg>"})
        (tmp_path / "a.html").write_text(page(with_outputs(html, svg)), encoding="utf-8")
        opened = chromium.new_page()
        opened.goto((tmp_path / "a.html").as_uri())
        opened.wait_for_timeout(500)
        assert opened.url.endswith("a.html")
        assert opened.evaluate("document.getElementById('here').href") == (tmp_path / "a.html").as_uri() + "#x"
        opened.close()

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast(self, visit, scheme):
        opened = visit(scheme=scheme)
        contrast = {selector: opened.evaluate(CONTRAST, selector) for selector in READ}
        assert not {selector: round(ratio, 2) for selector, ratio in contrast.items() if ratio < 4.5}
        ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")

    def test_the_page_never_scrolls_sideways(self, visit):
        opened = visit()
        for width in (320, 390, 700, 1280):
            opened.set_viewport_size({"width": width, "height": 900})
            assert opened.evaluate("document.documentElement.scrollWidth") <= width
            assert opened.locator(".kvr-side").is_visible() == (width == 1280)
            assert opened.locator(".kvr-fold").is_visible() == (width < 1280)

    def test_long_outputs_scroll_inside_themselves(self, visit):
        height, content = visit().evaluate(
            "(e => [e.clientHeight, e.scrollHeight])(document.querySelector('.jp-RenderedText'))"
        )
        assert height < 900 < content

    def test_contents_lead_to_headings(self, visit):
        opened = visit()
        missing = opened.evaluate(
            "[...document.querySelectorAll('.kvr-side li a')].filter(a => (location.hash = a.hash,"
            " !document.querySelector(':target'))).map(a => a.hash)"
        )
        assert opened.locator(".kvr-side li a").count() == 2 and missing == []

    def test_print(self, visit):
        opened = visit(scheme="dark")
        assert opened.pdf(format="A4")[:5] == b"%PDF-"
        opened.emulate_media(media="print")
        assert not opened.locator(".kvr-side").is_visible() and not opened.locator(".kvr-steps").first.is_visible()
        assert opened.evaluate("getComputedStyle(document.body).color") == "rgb(28, 33, 39)"
        cut = "[...document.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert opened.evaluate(cut) == 0
        assert opened.get_by_text("hidden words").bounding_box()["height"] > 0
