"""Runs every notebook of a folder and writes a report: one HTML page per notebook, and a front page.

Documents of the project become pages too, and one page searches all pages. The pages need neither Python nor a
network. If a cell raises an error, its notebook gets no page, and the report fails. So every page of a notebook comes
from a notebook that ran from top to bottom.
"""

import datetime
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from nbformat import NotebookNode

from kvviz.files import write_whole
from kvviz.report import documents as document_pages
from kvviz.report import search
from kvviz.report.archive import check_archive, write_archive
from kvviz.report.documents import Document
from kvviz.report.interrupt import Ended, ended_by_signals
from kvviz.report.notebook import TAKEN, Failure, Notebook, execute, read
from kvviz.report.page import CUSTOMARY, Doors, Entry, Frame, Link, relink, render_index, render_page, render_search
from kvviz.report.paths import shortener
from kvviz.report.prose import about, counted
from kvviz.report.thumbnail import thumbnail

CELL_TIMEOUT_S = 900
"""Seconds that one cell may take. The longest notebook of the project takes about 150 s on two CPU cores."""
PLAIN_EVERY_S = 10.0
"""Shortest time in seconds between two printed lines about cells. On a terminal there is no such limit."""
INTERRUPTED = 130
"""Exit status after Ctrl-C. After another signal, the status is 128 plus the number of the signal."""


@dataclass(frozen=True)
class Run:
    """The result of one notebook.

    Args:
        seconds: wall time of the run.
        executed: the notebook with its outputs, or None if it did not run to the end.
        failure: why the notebook did not run to the end, or None.
        page_error: why the notebook has no page although it ran, or "".
    """

    notebook: Notebook
    seconds: float
    executed: NotebookNode | None
    failure: Failure | None
    page_error: str = ""

    @property
    def has_page(self) -> bool:
        """Return True if the notebook ran and its page was written."""
        return self.failure is None and not self.page_error


class Progress:
    """Prints lines about notebooks and cells. On a terminal, each line about a cell overwrites the line before it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line that stays on the terminal."""
        self._write(("\r\x1b[K" if self._terminal else "") + text + "\n")

    def cell(self, name: str, number: int, total: int, seconds: float | None) -> None:
        """Print that a cell has started (``seconds`` is None) or is done."""
        text = f"{name} cell {number}/{total} ..." + ("" if seconds is None else f" {seconds:.1f} s")
        if self._terminal:
            self._write(f"\r\x1b[K{text}")
        elif seconds is not None and time.monotonic() - self._last >= PLAIN_EVERY_S:
            self._write(text + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
        self._last = time.monotonic()


@dataclass(frozen=True)
class Around:
    """What a front page has besides the notebooks.

    Args:
        opening: trusted HTML that stands first on the front page, with a heading of level 1, or "".
        documents: documents that become pages.
        teach: names of documents (without ending) for a person who teaches, with the words of their links.
        sick: name of the document for a person with a broken cache, or "".
    """

    opening: str = ""
    documents: tuple[Document, ...] = ()
    teach: Mapping[str, str] = field(default_factory=dict)
    sick: str = ""

    def doors(self) -> Doors:
        """Return links to the documents that exist."""
        pages = {document.path.stem: document.page for document in self.documents}
        teach = (Link(pages[name], words) for name, words in self.teach.items() if name in pages)
        return Doors(tuple(teach), pages.get(self.sick, ""))


@dataclass(frozen=True)
class Report:
    """What all steps of one report share.

    Args:
        everything: all notebooks of the folder, in name order.
        out: the folder of the pages.
        runs: results by name of the notebook. Each notebook is added when it is done.
        around: what the front page has besides the notebooks.
    """

    everything: Sequence[Notebook]
    out: Path
    frame: Frame
    progress: Progress
    runs: dict[str, Run]
    around: Around

    def with_page(self) -> list[Notebook]:
        """Return the notebooks that have a page now. A page may come from an earlier report."""
        return [one for one in self.everything if not one.name_is_taken and (self.out / one.page).is_file()]


def main(
    notebooks: Path,
    out: Path,
    only: Sequence[str] = (),
    machine: Mapping[str, str] = MappingProxyType({}),
    cell_timeout_s: int = CELL_TIMEOUT_S,
    archive: Path | None = None,
    around: Around = Around(),
) -> int:
    """Run the notebooks of a folder in name order. Write a page ``out/NAME.html`` for each, and ``out/index.html``.

    The documents of ``around`` become pages too, and ``out/search.html`` searches all pages.

    Args:
        notebooks: the folder. It is only read.
        out: the folder of the pages. It is made if it does not exist.
        only: names of notebooks, or beginnings of names ("03"). Empty for all notebooks.
        machine: facts about the machine: values by label. The report prints them first, and every page shows them. The
            label "kernels" says where Triton kernels run. If its value contains "gpu" and does not begin with
            "interpreter", the report announces the authors' times for a GPU. The other usual labels are "machine",
            "torch", "triton", "python" and "kvviz". See :func:`kvviz.doctor.machine`.
        cell_timeout_s: seconds that one cell may take.
        archive: path of a zip file with all pages. It is written if all notebooks have a page. None means that no zip
            file is wanted.
        around: what the front page has besides the notebooks.

    Returns:
        The exit status. Standard error gives the reason for 1 and 2.

        - 0: every notebook has a page.
        - 1: a notebook has no page, or the list of pages or the archive could not be written.
        - 2: there was nothing to run, or the folder of the pages cannot be written to.
        - 130: Ctrl-C ended the report. After another signal, the status is 128 plus the number of the signal.
    """
    progress = Progress(sys.stdout)
    try:
        everything = _notebooks(Path(notebooks))
        chosen = _chosen(everything, only)
        _check_names(everything, around.documents)
        _check_writable(Path(out))
        if archive is not None:
            check_archive(Path(archive))
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    links = document_pages.references(around.documents)
    frame = Frame(Path(notebooks), machine, datetime.date.today().isoformat(), links, search.PAGE)
    report = Report(everything, Path(out), frame, progress, {}, around)
    _announce(chosen, machine, progress)
    try:
        with ended_by_signals():
            for notebook in chosen:
                _run_and_publish(notebook, report, cell_timeout_s)
    except KeyboardInterrupt as interrupt:
        _conclude(report, len(chosen), "Interrupted. ")
        return 128 + interrupt.number if isinstance(interrupt, Ended) else INTERRUPTED
    status = _conclude(report, len(chosen))
    return status if archive is None else _pack(Path(archive), status, report)


def _check_names(everything: Sequence[Notebook], documents: Sequence[Document]) -> None:
    """Raise ValueError if two files would become the same page."""
    pages = {notebook.page: notebook.path for notebook in everything}
    for document in documents:
        other = pages.setdefault(document.page, document.path)
        if other != document.path or document.path.stem in TAKEN:
            other = f"{other} and {document.path} are" if other != document.path else f"{document.path} is"
            raise ValueError(f"{other} the page {document.page}, which exists once: rename the document")


def _check_writable(out: Path) -> None:
    """Make the folder of the pages, and test that files can be written to it. This happens before any notebook runs.

    Raises:
        ValueError: pages cannot be written there.
    """
    probe = out / f".probe.{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write(probe, "kvviz")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{out} cannot be written to ({error.strerror or error}): choose another folder") from error
    if (out / "index.html").is_dir():
        raise ValueError(f"{out / 'index.html'} is a folder, but the list of pages needs this name: remove the folder")


def _notebooks(folder: Path) -> list[Notebook]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the folder that contains the notebooks")
    paths = sorted(path for path in folder.glob("*.ipynb") if not path.name.startswith("."))
    if not paths:
        raise ValueError(f"{folder} contains no .ipynb file: give the folder that contains the notebooks")
    return [read(path) for path in paths]


def _chosen(everything: Sequence[Notebook], only: Sequence[str]) -> list[Notebook]:
    """Return the notebooks that ``only`` names, in the order of ``everything``.

    If a word in ``only`` is the full name of a notebook, the word means this notebook alone. Otherwise the word means
    all notebooks whose names begin with the word.
    """
    names = [notebook.name for notebook in everything]
    wanted: set[str] = set(() if only else names)
    for word in only:
        stem = word.removesuffix(".ipynb")
        found = [stem] if stem in names else [name for name in names if stem and name.startswith(stem)]
        if not found:
            raise ValueError(f"no notebook has a name that begins with {word!r}: the names are {', '.join(names)}")
        wanted.update(found)
    return [notebook for notebook in everything if notebook.name in wanted]


def _announce(chosen: Sequence[Notebook], machine: Mapping[str, str], progress: Progress) -> None:
    progress.say(f"Kernels run on: {machine.get('kernels', 'unknown')}")
    facts = [f"{label} {machine[label]}" for label in CUSTOMARY[1:] if label in machine]
    if facts:
        progress.say(", ".join(facts))
    without = [notebook.name for notebook in chosen if _minutes(notebook, machine) is None]
    total = sum(_minutes(notebook, machine) or 0 for notebook in chosen)
    known = f"{about(total)} according to their authors" if len(without) < len(chosen) else "no time stated"
    unknown = f" (no time stated in {', '.join(without)})" if 0 < len(without) < len(chosen) else ""
    progress.say(f"{counted(len(chosen), 'notebook')}, {known}{unknown}")


def _minutes(notebook: Notebook, machine: Mapping[str, str]) -> float | None:
    kernels = machine.get("kernels", "").lower()
    on_gpu = "gpu" in kernels and not kernels.startswith("interpreter")
    return notebook.minutes_gpu if on_gpu else notebook.minutes_cpu


def _run_and_publish(notebook: Notebook, report: Report, cell_timeout_s: int) -> None:
    """Run a notebook and write its page. If this fails, remove the page of an earlier report, and print the reason."""
    progress = report.progress
    run = _publish(_run(notebook, progress, cell_timeout_s), report)
    report.runs[notebook.name] = run
    if run.has_page:
        return
    if not notebook.name_is_taken:
        _remove(report.out / notebook.page)
    result = "FAILED" if run.failure else "ran"
    progress.say(f"{notebook.name} {result} after {run.seconds:.1f} s, no page")
    _explain(run)


def _run(notebook: Notebook, progress: Progress, cell_timeout_s: int) -> Run:
    if notebook.node is None:
        return Run(notebook, 0.0, None, Failure(0, "", notebook.problem))
    start = time.perf_counter()
    executed, failure = execute(notebook, lambda *cell: progress.cell(notebook.name, *cell), cell_timeout_s)
    return Run(notebook, time.perf_counter() - start, None if failure else executed, failure)


def _publish(run: Run, report: Report) -> Run:
    """Write the page of a notebook that ran. Return the run, with ``page_error`` if the page could not be made."""
    if run.failure is not None:
        return run
    notebook = run.notebook
    try:
        text = render_page(run.executed, notebook.title, report.frame, None, None)
        size = _write(report.out / notebook.page, text)
    except Exception as error:  # the other notebooks still get their pages
        return replace(run, page_error=f"{type(error).__name__}: {' '.join(str(error).split())}")
    report.progress.say(f"{notebook.name} done in {run.seconds:.1f} s, page of {size / 1024:,.0f} KiB")
    return run


def _remove(page: Path) -> None:
    """Remove the page of an earlier report. If the page cannot be removed, print the reason and go on."""
    try:
        page.unlink(missing_ok=True)
    except OSError as error:
        print(
            f"report: the old page {page} could not be removed ({error.strerror or error}): remove it yourself",
            file=sys.stderr,
        )


def _explain(run: Run) -> None:
    name, failure = run.notebook.path.name, run.failure
    if failure is None:
        print(f"report: {name} ran, but no page could be made of it: {run.page_error}", file=sys.stderr)
        return
    print(f"report: {name}, {failure.where}: {failure.error}", file=sys.stderr)
    if failure.line:
        print(f"    {failure.line}", file=sys.stderr)
    for line in failure.traceback.splitlines():
        print(f"    | {line}", file=sys.stderr)
    sys.stderr.flush()


def _conclude(report: Report, chosen: int, opening: str = "") -> int:
    """Link all pages to each other, write the list of pages, and print the result. Return the exit status.

    The links of pages from earlier reports are updated too. A link to a page that does not exist becomes plain text.
    """
    standing = report.with_page()
    names = [one.page for one in standing] + [document.page for document in report.around.documents]
    for before, notebook, after in zip([None, *standing], standing, [*standing[1:], None], strict=False):
        _relink(report.out / notebook.page, _link(before), _link(after), names)
    total = opening + _total(list(report.runs.values()), chosen)
    status = 0 if all(run.has_page for run in report.runs.values()) else 1
    index = report.out / "index.html"
    try:
        _write_documents(report, names)
        pages = {one.page: _text(report.out / one.page) for one in standing}
        entries = [_entry(notebook, report, pages.get(notebook.page)) for notebook in report.everything]
        together, around = _together(report.everything, report.frame.machine), report.around
        _write(index, render_index(entries, report.frame, total, together, around.opening, around.doors(), status > 0))
        _write_search(report, pages)
    except Exception as error:  # for example a full disk; the result of the runs must still be printed
        print(f"report: {index} could not be written: {error}", file=sys.stderr)
        report.progress.say(total)
        return 1
    report.progress.say(f"{total} Open {index}" if standing else f"{total} There is no page to open.")
    return status


def _write_documents(report: Report, names: Sequence[str]) -> None:
    for document in report.around.documents:
        _write(report.out / document.page, document_pages.render(document, report.frame, names))


def _write_search(report: Report, pages: Mapping[str, str]) -> None:
    """Write the page that searches the pages of the notebooks and of the documents."""
    written = {one.page: _text(report.out / one.page) for one in report.around.documents}
    _write(report.out / search.PAGE, render_search(search.index({**pages, **written}), report.frame))


def _link(notebook: Notebook | None) -> Link | None:
    return notebook and Link(notebook.page, notebook.title)


def _relink(page: Path, before: Link | None, after: Link | None, pages: Sequence[str]) -> None:
    """Link a page to the pages that exist now. If the page cannot be changed, print the reason and go on."""
    try:
        old = page.read_text(encoding="utf-8")
        if (new := relink(old, before, after, pages)) != old:
            _write(page, new)
    except (OSError, UnicodeDecodeError) as error:
        print(f"report: the links of {page} to other pages could not be updated ({error})", file=sys.stderr)


def _total(runs: Sequence[Run], chosen: int) -> str:
    """Return sentences: how many of the ``chosen`` notebooks ran, which notebooks have no page, and why."""
    ran = [run for run in runs if run.failure is None]
    seconds = sum(run.seconds for run in runs)
    total = f"{len(ran)} of {counted(chosen, 'notebook')} ran, in {seconds:.0f} s."
    failed = [run.notebook.name for run in runs if run.failure]
    if failed:
        total += f" No page for {', '.join(failed)}."
    broken = [run for run in ran if run.page_error]
    if broken:
        which = "any of them" if len(broken) == len(ran) > 1 else ", ".join(run.notebook.name for run in broken)
        total += f" No page could be made of {which} ({broken[0].page_error})."
    return total


def _together(everything: Sequence[Notebook], machine: Mapping[str, str]) -> str:
    reading = sum(notebook.minutes_read or 0 for notebook in everything)
    running = sum(_minutes(notebook, machine) or 0 for notebook in everything)
    run = f", and {about(running)} to run" if running else ""
    return f"{counted(len(everything), 'notebook')}: about {reading} min to read{run}."


def _pack(archive: Path, status: int, report: Report) -> int:
    """Write the archive if ``status`` is 0. Return ``status``, or 1 if the archive cannot be written."""
    if status:
        print(
            f"report: {archive} was not written, because some notebooks have no page: correct the errors above",
            file=sys.stderr,
        )
        return status
    pages = [notebook.page for notebook in report.with_page()]
    pages += [document.page for document in report.around.documents]
    try:
        size = write_archive(archive, report.out, ["index.html", search.PAGE, *pages])
    except OSError as error:
        print(
            f"report: {archive} could not be written ({error.strerror or error}): choose another path", file=sys.stderr
        )
        return 1
    report.progress.say(
        f"{counted(len(pages), 'page')}, the front page and the search are in {archive}, {size / 1024:,.0f} KiB"
    )
    return 0


def _entry(notebook: Notebook, report: Report, page: str | None) -> Entry:
    """Return the notebook's entry on the front page. ``page`` is the HTML of its page, or None."""
    run, short = report.runs.get(notebook.name), shortener(report.frame.folder)
    minutes = _minutes(notebook, report.frame.machine)
    if run is None:
        status = "not run in this report" + ("; the page is from an earlier report" if page else "")
    elif run.failure:
        status = short(f"no page: {run.failure.where}: {run.failure.error}")
    else:
        status = short(f"ran, but no page could be made: {run.page_error}") if run.page_error else "ran"
    return Entry(
        name=notebook.name,
        title=notebook.title,
        promise=notebook.promise,
        minutes="no time stated" if minutes is None else about(minutes),
        reading=f"about {notebook.minutes_read} min" if notebook.minutes_read else "",
        seconds=f"measured {run.seconds:.1f} s" if run else "",
        ran=bool(run and run.has_page),
        status=status,
        link=_link(notebook) if page else None,
        picture=thumbnail(page) if page else "",
    )


def _text(page: Path) -> str:
    """Return a page. A page from an earlier report may be damaged, so bytes that are not text are replaced."""
    return page.read_text(encoding="utf-8", errors="replace")


def _write(path: Path, text: str) -> int:
    """Write ``text`` to a file as a whole and return the size in bytes."""
    return write_whole(path, text.encode("utf-8"))
