"""Reads notebooks from disk and runs them with this Python. A notebook file is never changed."""

import contextlib
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert.filters import strip_ansi
from nbformat import NotebookNode

from kvviz.report.paths import KERNEL_FOLDER, KERNEL_TEMPORARY, PACKAGE
from kvviz.report.prose import Prose, first_paragraph, plain, reading_minutes

OUTPUT_TIMEOUT_S = 60
"""Seconds that the outputs of a finished cell may take to arrive. The default of nbclient is 4 s. On a busy machine,
outputs would then be lost without an error."""

LONGEST_SOCKET_FOLDER = 80
"""Longest folder path for the Unix sockets of a Jupyter kernel, in characters. The path of a socket can have about 104
characters."""

_MINUTES = re.compile(r"(\d+(?:\.\d+)?)\s*min(?:utes?)?\b")
_NOT_FOR_KERNELS = ("MPLBACKEND", "PYTHONSTARTUP")
"""Environment variables that a notebook does not get, because they would change its outputs."""

TAKEN = {"index": "the front page", "search": "the search"}
"""Names of pages that no notebook may have, in small or capital letters, and what these pages are."""

Watch = Callable[[int, int, float | None], None]
"""A function that is called twice per cell, with (number, total, seconds). When the cell starts, ``seconds`` is None.
When the cell is done, ``seconds`` is the time that the cell took."""


@dataclass(frozen=True)
class Notebook:
    """A notebook as it was read from disk, without outputs.

    Args:
        path: the file.
        node: the content, or None if the notebook cannot be read or run. ``problem`` then gives the reason.
        title: the title in the metadata, as plain text. If there is no such title, it is the first heading. If there is
            no heading, it is the name of the file.
        promise: the first paragraph, as harmless inline HTML.
        minutes_cpu, minutes_gpu: minutes that a run takes according to the author. None if the author gives no time.
        minutes_read: minutes that reading takes, as the author says or as the number of words suggests. None if the
            notebook cannot be read.
        problem: the reason why ``node`` is None, or "". It continues a sentence that begins with the name of the file.
    """

    path: Path
    node: NotebookNode | None
    title: str
    promise: str = ""
    minutes_cpu: float | None = None
    minutes_gpu: float | None = None
    minutes_read: int | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """Return the name of the file without its ending."""
        return self.path.stem

    @property
    def page(self) -> str:
        """Return the file name of the notebook's page."""
        return f"{self.name}.html"

    @property
    def name_is_taken(self) -> bool:
        """Return True if the page would have a name of :data:`TAKEN`. Such a notebook gets no page."""
        return self.name.lower() in TAKEN


@dataclass(frozen=True)
class Failure:
    """Why the run of a notebook stopped.

    Args:
        cell: number of the code cell that stopped the run, counted from 1. 0 means that no cell had started.
        line: first line of the cell.
        error: the error in one line.
        traceback: the traceback as plain text, or "".
    """

    cell: int
    line: str
    error: str
    traceback: str = ""

    @property
    def where(self) -> str:
        """Return the place of the failure in words."""
        return f"code cell {self.cell}" if self.cell else "before its first cell"


def read(path: Path) -> Notebook:
    """Read a notebook. If the file is not a notebook, or has a name of :data:`TAKEN`, ``problem`` gives the reason."""
    if taken := TAKEN.get(path.stem.lower()):
        problem = f"needs the page {path.stem.lower()}.html, which is {taken}: rename the notebook"
        return Notebook(path, None, path.stem, problem=problem)
    try:
        return _described(path, _parse(path))
    except Exception as error:  # a malformed file can raise any exception, and the other notebooks must still run
        return Notebook(path, None, path.stem, problem=f"cannot be read as a notebook: {_message(error)}")


def _described(path: Path, node: NotebookNode) -> Notebook:
    prose, stated = Prose(path.parent), node.metadata.get("kvviz", {})
    bodies = [prose.render(cell.source, cell.get("attachments")) for cell in _opening(node)]
    title = stated.get("title") or (plain(prose.headings[0].html) if prose.headings else path.stem)
    promise = next(filter(None, map(first_paragraph, bodies)), "")
    in_words = _MINUTES.search(plain(bodies[0])) if bodies else None
    minutes = [_number(stated.get(key), in_words) for key in ("minutes_cpu", "minutes_gpu")]
    return Notebook(path, node, str(title), promise, *minutes, reading_minutes([cell.source for cell in node.cells]))


def execute(notebook: Notebook, watch: Watch, cell_timeout_s: int) -> tuple[NotebookNode, Failure | None]:
    """Run a readable notebook in its folder. Return the notebook with its outputs, and the failure or None.

    An error in a cell tagged ``raises-exception`` does not stop the run. The notebook always runs with this Python
    (``sys.executable``), even if other Jupyter kernels are installed. A private folder holds the settings and temporary
    files of the kernel, and is removed at the end.
    """
    node, cell, number = deepcopy(notebook.node), None, 0
    try:
        with _kernel(node, notebook.path.parent, cell_timeout_s) as client:
            todo = [(index, cell) for index, cell in enumerate(node.cells) if _is_run(cell)]
            for number, (index, cell) in enumerate(todo, 1):  # noqa: B007
                _run_cell(client, cell, index, number, len(todo), watch)
    except (CellExecutionError, CellTimeoutError, DeadKernelError, RuntimeError) as error:
        return node, _failure(error, cell, number, cell_timeout_s)
    return node, None


def _run_cell(client: NotebookClient, cell: NotebookNode, index: int, number: int, total: int, watch: Watch) -> None:
    watch(number, total, None)
    start = time.perf_counter()
    client.execute_cell(cell, index, execution_count=number)
    watch(number, total, time.perf_counter() - start)


def _failure(error: Exception, cell: NotebookNode | None, number: int, cell_timeout_s: int) -> Failure:
    line = _first_line(cell.source) if cell else ""
    if isinstance(error, CellExecutionError):
        return Failure(number, line, f"{error.ename}: {strip_ansi(error.evalue)}", _traceback(cell))
    if isinstance(error, CellTimeoutError):
        return Failure(number, line, f"not done after {cell_timeout_s} s: make the cell do less, or allow more time")
    if isinstance(error, DeadKernelError):
        return Failure(number, line, "the Python process of the notebook died: check if it had enough memory")
    hint = f"check that ipykernel is installed for {sys.executable}" if not number else "there is no traceback"
    return Failure(number, line, f"{_first_line(str(error))} ({hint})")


def _traceback(cell: NotebookNode) -> str:
    lines = [line for output in cell.outputs for line in output.get("traceback", [])]
    return strip_ansi("\n".join(lines))


def _parse(path: Path) -> NotebookNode:
    """Return the content of a notebook file, without outputs.

    Raises:
        Exception: the file is not a notebook. The class of the exception depends on what is wrong.
    """
    raw = json.loads(path.read_text(encoding="utf-8"))
    version = raw.get("nbformat") if isinstance(raw, dict) else None
    if version != 4:
        raise ValueError(f"nbformat is {version}, but must be 4: open the file in JupyterLab and save it again")
    _check_shape(raw)
    seen: set[str] = set()
    for number, cell in enumerate(raw["cells"]):
        if cell.get("id") in seen | {None}:  # without an id, nbformat would choose a random one
            cell["id"] = f"cell-{number}"
        seen.add(cell["id"])
        if cell.get("cell_type") == "code":
            cell.update(outputs=[], execution_count=None)
    node = nbformat.reads(json.dumps({**raw, "nbformat_minor": 5}), as_version=4)
    nbformat.validate(node)
    node.metadata.language_info = {"name": "python", "pygments_lexer": "ipython3"}
    return node


def _check_shape(raw: dict) -> None:
    """Check what this module needs before nbformat checks the notebook.

    Raises:
        ValueError: a part of the notebook is wrong. The message names the part.
    """
    cells, metadata = raw.get("cells"), raw.get("metadata")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ValueError("'cells' must be a list of objects")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("kvviz", {}), dict):
        raise ValueError("'metadata' and 'metadata.kvviz' must be objects")
    if not all(isinstance(cell.get("id"), str | None) for cell in cells):
        raise ValueError("the id of a cell must be text")


def _message(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the file is nested too deeply"
    return _first_line(str(error)) or type(error).__name__


def _opening(node: NotebookNode) -> list[NotebookNode]:
    """Return the markdown cells before the first code cell."""
    first_code = next((at for at, cell in enumerate(node.cells) if cell.cell_type == "code"), len(node.cells))
    return [cell for cell in node.cells[:first_code] if cell.cell_type == "markdown"]


def _number(stated: object, in_words: re.Match | None) -> float | None:
    if isinstance(stated, int | float) and not isinstance(stated, bool) and stated >= 0:
        return float(stated)
    return float(in_words.group(1)) if in_words else None


def _is_run(cell: NotebookNode) -> bool:
    """Return True for a code cell that has content and does not have the tag ``skip-execution``."""
    skipped = "skip-execution" in cell.metadata.get("tags", [])
    return cell.cell_type == "code" and bool(cell.source.strip()) and not skipped


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]


class _ThisPython(KernelSpecManager):
    """Starts this Python, whatever Jupyter kernel a notebook names."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return the command that starts a kernel in this Python."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, name=kernel_name, display_name="Python", language="python")


@contextlib.contextmanager
def _kernel(node: NotebookNode, folder: Path, cell_timeout_s: int) -> Iterator[NotebookClient]:
    """Yield a client with a running Jupyter kernel. At the end, stop the kernel and remove its files.

    This also happens after Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix=KERNEL_FOLDER, ignore_cleanup_errors=True) as private:
        (Path(private) / KERNEL_TEMPORARY).mkdir()
        manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=_ThisPython(),
            connection_file=f"{private}/kernel.json",
            transport="ipc" if os.name == "posix" and len(private) <= LONGEST_SOCKET_FOLDER else "tcp",
        )
        client = NotebookClient(
            node,
            km=manager,
            timeout=cell_timeout_s,
            iopub_timeout=OUTPUT_TIMEOUT_S,
            raise_on_iopub_timeout=True,
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )
        with client.setup_kernel(cleanup_kc=True, env=_environment(private, os.environ)):
            try:
                yield client
            except BaseException:  # do not wait for a cell that is still running, for example after Ctrl-C
                client.shutdown_kernel = "immediate"
                raise


def _environment(private: str, outside: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a Jupyter kernel.

    They are the variables ``outside`` without :data:`_NOT_FOR_KERNELS`, and some more. They make the kernel import this
    copy of kvviz, and write its temporary files into the folder ``private``.
    """
    inside = {name: value for name, value in outside.items() if name not in _NOT_FOR_KERNELS}
    inside |= {"IPYTHONDIR": private, "COLUMNS": "100", "PYTHONHASHSEED": outside.get("PYTHONHASHSEED", "0")}
    inside["TMPDIR"] = os.path.join(private, KERNEL_TEMPORARY)
    home = str(PACKAGE.parent)
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        inside["PYTHONPATH"] = os.pathsep.join(filter(None, [home, outside.get("PYTHONPATH")]))
    return inside
