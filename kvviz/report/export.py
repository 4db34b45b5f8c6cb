"""Report: every notebook of a folder is run and becomes a page that needs neither Python nor a network.

A notebook with a cell that raised gets no page and fails the report: a page that lies in the folder afterwards
ran from top to bottom.
"""

import datetime
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from nbformat import NotebookNode

from kvviz.report.archive import check_archive, write_archive
from kvviz.report.notebook import Failure, Notebook, execute, read
from kvviz.report.page import CUSTOMARY, Entry, Frame, Link, relink, render_index, render_page
from kvviz.report.paths import shortener, write_whole

CELL_TIMEOUT_S = 900
PLAIN_EVERY_S = 10.0
"""Without a terminal to rewrite a line on, a line about cells comes at most this often."""

Neighbours = tuple[Link | None, Link | None]


@dataclass(frozen=True)
class Run:
    """What became of a notebook: its outputs, or the failure that stopped it, and the wall time in seconds."""

    notebook: Notebook
    seconds: float
    executed: NotebookNode | None
    failure: Failure | None


class Progress:
    """Lines about notebooks and cells: one that rewrites itself on a terminal, a few plain ones elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        self._write(("\r\x1b[K" if self._terminal else "") + text + "\n")

    def cell(self, name: str, number: int, total: int, seconds: float | None) -> None:
        """A cell has started (``seconds`` None) or is done."""
        text = f"{name} cell {number}/{total} ..." + ("" if seconds is None else f" {seconds:.1f} s")
        if self._terminal:
            self._write(f"\r\x1b[K{text}")
        elif seconds is not None and time.monotonic() - self._last >= PLAIN_EVERY_S:
            self._write(text + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
        self._last = time.monotonic()


def main(
    notebooks: Path,
    out: Path,
    only: Sequence[str] = (),
    machine: Mapping[str, str] = MappingProxyType({}),
    cell_timeout_s: int = CELL_TIMEOUT_S,
    archive: Path | None = None,
) -> int:
    """Run the notebooks of a folder in name order; write ``out/NAME.html`` for each, and ``out/index.html``.

    Args:
        notebooks: the folder; only read.
        out: the folder of the pages; made if need be.
        only: names of notebooks, or beginnings of names ("03"); empty for all.
        machine: label to value, shown in the header of every page and in the first lines printed. Customary
            labels: "kernels" (where kernels run: a value with "gpu" in it that does not begin with "interpreter"
            means a GPU, "interpreter on the CPU" means none), "machine" (GPU or CPU by name, cores; no host
            name), "torch", "triton", "python", "kvviz" (versions).
        cell_timeout_s: seconds that one cell may take.
        archive: a zip of the index and all its pages, written if no notebook failed; None for none.

    Returns:
        0; 1 if a notebook has no page, or there is no archive, which standard error explains; 2 if there was
        nothing to run, or nowhere to write; 130 if
        interrupted.
    """
    progress = Progress(sys.stdout)
    try:
        everything = _notebooks(Path(notebooks))
        chosen = _chosen(everything, only)
        _check_writable(Path(out))
        if archive is not None:
            check_archive(Path(archive))
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    frame = Frame(Path(notebooks), machine, datetime.date.today().isoformat())
    _announce(chosen, machine, progress)
    try:
        runs = _run_all(chosen, everything, Path(out), frame, progress, cell_timeout_s)
    except KeyboardInterrupt:
        progress.say(f"Interrupted: the pages written so far are in {out}, index.html is as it was before.")
        return 130
    status = _conclude(runs, everything, Path(out), frame, progress)
    return status if archive is None else _pack(Path(archive), status, everything, Path(out), progress)


def _check_writable(out: Path) -> None:
    """Make the folder of the pages and write to it, before any notebook spends its minutes.

    Raises:
        ValueError: pages cannot be written there.
    """
    probe = out / f".probe.{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write(probe, "kvviz")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{out} cannot be written to ({error.strerror or error}): name another folder") from error
    if (out / "index.html").is_dir():
        raise ValueError(f"{out / 'index.html'} is a folder: take it away, the list of pages goes there")


def _notebooks(folder: Path) -> list[Notebook]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name the folder that holds the notebooks")
    paths = sorted(path for path in folder.glob("*.ipynb") if not path.name.startswith("."))
    if not paths:
        raise ValueError(f"{folder} holds no .ipynb file: name the folder that holds the notebooks")
    return [read(path) for path in paths]


def _chosen(everything: Sequence[Notebook], only: Sequence[str]) -> list[Notebook]:
    """Those that ``only`` names, in the order of ``everything``; a full name wins over the beginning of others."""
    names = [notebook.name for notebook in everything]
    wanted: set[str] = set(() if only else names)
    for asked in only:
        stem = asked.removesuffix(".ipynb")
        found = [stem] if stem in names else [name for name in names if stem and name.startswith(stem)]
        if not found:
            raise ValueError(f"no notebook is called {asked!r}, nor begins so: there are {', '.join(names)}")
        wanted.update(found)
    return [notebook for notebook in everything if notebook.name in wanted]


def _announce(chosen: Sequence[Notebook], machine: Mapping[str, str], progress: Progress) -> None:
    progress.say(f"Kernels run on: {machine.get('kernels', 'not said')}")
    facts = [f"{label} {machine[label]}" for label in CUSTOMARY[1:] if label in machine]
    if facts:
        progress.say(", ".join(facts))
    silent = [notebook.name for notebook in chosen if _minutes(notebook, machine) is None]
    total = sum(_minutes(notebook, machine) or 0 for notebook in chosen)
    known = f"about {total:g} min by their own word" if len(silent) < len(chosen) else "no time stated"
    unknown = f" ({', '.join(silent)}: none stated)" if 0 < len(silent) < len(chosen) else ""
    progress.say(f"{_count(len(chosen), 'notebook')}, {known}{unknown}")


def _minutes(notebook: Notebook, machine: Mapping[str, str]) -> float | None:
    kernels = machine.get("kernels", "").lower()
    on_gpu = "gpu" in kernels and not kernels.startswith("interpreter")
    return notebook.minutes_gpu if on_gpu else notebook.minutes_cpu


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _run_all(
    chosen: Sequence[Notebook],
    everything: Sequence[Notebook],
    out: Path,
    frame: Frame,
    progress: Progress,
    cell_timeout_s: int,
) -> dict[str, Run]:
    """Run and write one after the other; at the end every page, of earlier runs too, leads to those that are there."""
    runs: dict[str, Run] = {}
    promised: dict[str, Neighbours] = {}
    for notebook in chosen:
        run = _run(notebook, progress, cell_timeout_s)
        expected = {one.name for one in chosen if one.name not in runs}
        links = _neighbours(notebook, everything, _standing(everything, runs, expected, out))
        run = _publish(run, out, frame, links, progress)
        runs[notebook.name], promised[notebook.name] = run, links
    standing = _standing(everything, runs, set(), out)
    for name, run in runs.items():
        links = _neighbours(run.notebook, everything, standing)
        if run.executed is not None and links != promised[name]:
            _write(out / run.notebook.page, render_page(run.executed, run.notebook.title, frame, *links))
    for notebook in everything:
        if notebook.name in standing and notebook.name not in runs:
            _relink(out / notebook.page, _neighbours(notebook, everything, standing))
    return runs


def _relink(page: Path, links: Neighbours) -> None:
    """Tie a page of an earlier run to the pages that are there now; one that cannot be changed stays as it is."""
    try:
        old = page.read_text(encoding="utf-8")
        if (new := relink(old, *links)) != old:
            _write(page, new)
    except (OSError, UnicodeDecodeError) as error:
        print(f"report: {page} keeps its links to other pages ({error})", file=sys.stderr)


def _has_page(notebook: Notebook, out: Path) -> bool:
    return not notebook.is_index and (out / notebook.page).is_file()


def _standing(everything: Sequence[Notebook], runs: Mapping[str, Run], expected: set[str], out: Path) -> set[str]:
    """Names of notebooks that have a page, or will: run well, still to come, or left from an earlier run."""
    ran = {name for name, run in runs.items() if run.executed is not None}
    earlier = {one.name for one in everything if one.name not in runs and _has_page(one, out)}
    return ran | expected | earlier


def _neighbours(notebook: Notebook, everything: Sequence[Notebook], standing: set[str]) -> Neighbours:
    row = [one for one in everything if one.name in standing or one is notebook]
    at = row.index(notebook)
    around = (row[at - 1] if at else None, row[at + 1] if at + 1 < len(row) else None)
    before, after = (one and Link(one.page, one.title) for one in around)
    return before, after


def _run(notebook: Notebook, progress: Progress, cell_timeout_s: int) -> Run:
    if notebook.node is None:
        return Run(notebook, 0.0, None, Failure(0, "", notebook.problem))
    start = time.perf_counter()
    executed, failure = execute(notebook, lambda *cell: progress.cell(notebook.name, *cell), cell_timeout_s)
    return Run(notebook, time.perf_counter() - start, None if failure else executed, failure)


def _publish(run: Run, out: Path, frame: Frame, links: Neighbours, progress: Progress) -> Run:
    """Write the page of a run, or take an older one away and say why; returns the run as it turned out."""
    notebook, target = run.notebook, out / run.notebook.page
    if run.failure is None:
        try:
            size = _write(target, render_page(run.executed, notebook.title, frame, *links))
            progress.say(f"{notebook.name} done in {run.seconds:.1f} s, page of {size / 1024:,.0f} KiB")
            return run
        except Exception as error:  # the other notebooks still get their pages
            run = Run(notebook, run.seconds, None, Failure(0, "", f"ran, but no page could be made of it: {error!r}"))
    if not notebook.is_index:
        _take_away(target)
    progress.say(f"{notebook.name} FAILED after {run.seconds:.1f} s, no page")
    _explain(run)
    return run


def _take_away(page: Path) -> None:
    """Remove a page of an earlier run; one that cannot be removed is named, and stops nothing."""
    try:
        page.unlink(missing_ok=True)
    except OSError as error:
        print(f"report: {page} could not be taken away ({error.strerror or error})", file=sys.stderr)


def _explain(run: Run) -> None:
    failure = run.failure
    print(f"report: {run.notebook.path.name}, {failure.where}: {failure.error}", file=sys.stderr)
    if failure.line:
        print(f"    {failure.line}", file=sys.stderr)
    for line in failure.traceback.splitlines():
        print(f"    | {line}", file=sys.stderr)
    sys.stderr.flush()


def _conclude(
    runs: Mapping[str, Run], everything: Sequence[Notebook], out: Path, frame: Frame, progress: Progress
) -> int:
    failed = [name for name, run in runs.items() if run.failure]
    seconds = sum(run.seconds for run in runs.values())
    ran = f"{len(runs) - len(failed)} of {_count(len(runs), 'notebook')} ran, in {seconds:.0f} s"
    total = f"{ran}; no page for {', '.join(failed)}." if failed else f"{ran}."
    entries = [_entry(notebook, runs.get(notebook.name), out, frame) for notebook in everything]
    _write(out / "index.html", render_index(entries, frame, total, _together(everything, frame.machine)))
    progress.say(f"{total} Open {out / 'index.html'}")
    return 1 if failed else 0


def _together(everything: Sequence[Notebook], machine: Mapping[str, str]) -> str:
    reading = sum(notebook.minutes_read or 0 for notebook in everything)
    running = sum(_minutes(notebook, machine) or 0 for notebook in everything)
    ran = f", and about {running:g} min to run" if running else ""
    return f"{_count(len(everything), 'notebook')}: about {reading} min to read{ran}."


def _pack(archive: Path, status: int, everything: Sequence[Notebook], out: Path, progress: Progress) -> int:
    """Write the archive after a report with no failure; returns the status of both."""
    if status:
        print(f"report: {archive} is not written: some notebooks have no page", file=sys.stderr)
        return status
    pages = [notebook.page for notebook in everything if _has_page(notebook, out)]
    try:
        size = write_archive(archive, out, ["index.html", *pages])
    except OSError as error:
        print(f"report: {archive} cannot be written ({error.strerror or error})", file=sys.stderr)
        return 1
    progress.say(f"{_count(len(pages), 'page')} and their list in {archive}, {size / 1024:,.0f} KiB")
    return 0


def _entry(notebook: Notebook, run: Run | None, out: Path, frame: Frame) -> Entry:
    minutes = _minutes(notebook, frame.machine)
    page = Link(notebook.page, notebook.title) if _has_page(notebook, out) else None
    if run is None:
        status = "not part of this run" + ("; its page is of an earlier one" if page else "")
    elif run.failure:
        status = shortener(frame.folder)(f"no page: {run.failure.where}: {run.failure.error}")
    else:
        status = "ran"
    return Entry(
        name=notebook.name,
        title=notebook.title,
        promise=notebook.promise,
        minutes="no time stated" if minutes is None else f"about {minutes:g} min",
        reading=f"about {notebook.minutes_read} min" if notebook.minutes_read else "",
        seconds=f"measured {run.seconds:.1f} s" if run else "",
        ran=bool(run and not run.failure),
        status=status,
        link=page,
    )


def _write(path: Path, text: str) -> int:
    """Write ``text`` so that ``path`` is never seen half-written; returns its size in bytes."""
    return write_whole(path, text.encode("utf-8"))
