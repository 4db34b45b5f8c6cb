"""Notebook: a lesson read from disk, and run from top to bottom by this very Python. Files are only read."""

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

from kvviz.report.paths import PACKAGE
from kvviz.report.prose import Prose, first_paragraph, plain, reading_minutes

OUTPUT_TIMEOUT_S = 60
"""How long a finished cell may take to deliver its outputs; nbclient's 4 s drop them under load, without a word."""

LONGEST_SOCKET_FOLDER = 80
"""In characters: the path of a Unix socket has room for about 104."""

_MINUTES = re.compile(r"(\d+(?:\.\d+)?)\s*min(?:utes?)?\b")
_NOT_FOR_KERNELS = ("MPLBACKEND", "PYTHONSTARTUP")

INDEX = "index"
"""The list of all pages has this name, so that no notebook may have it, in capitals neither."""

Watch = Callable[[int, int, float | None], None]
"""Told of each cell as (number, total, seconds): when it starts (None) and when it is done."""


@dataclass(frozen=True)
class Notebook:
    """A notebook as read from disk, outputs dropped.

    Args:
        path: the file.
        node: its content, or None if it cannot be read or run; ``problem`` then says why.
        title: plain text: the title in the metadata, else the first heading, else the file's name.
        promise: the first paragraph, as harmless inline HTML.
        minutes_cpu, minutes_gpu: what its author says that it takes, or None.
        minutes_read: what reading it takes, by its own word or counted in words; None if it cannot be read.
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
        return self.path.stem

    @property
    def page(self) -> str:
        """The file name of its page."""
        return f"{self.name}.html"

    @property
    def is_index(self) -> bool:
        """Whether its page would lie where the list of all pages does: then it can have none."""
        return self.name.lower() == INDEX


@dataclass(frozen=True)
class Failure:
    """Why a notebook has no page. ``cell`` counts executed code cells from 1 (0: none had started)."""

    cell: int
    line: str
    error: str
    traceback: str = ""

    @property
    def where(self) -> str:
        return f"code cell {self.cell}" if self.cell else "before its first cell"


def read(path: Path) -> Notebook:
    """Read a notebook; a file that is none, or has the name of the index, is returned with its ``problem`` in words."""
    if path.stem.lower() == INDEX:
        return Notebook(path, None, path.stem, problem="its page would be the list of all pages: rename the notebook")
    try:
        return _described(path, _parse(path))
    except Exception as error:  # a malformed file may raise anything, and must not stop the others
        return Notebook(path, None, path.stem, problem=f"cannot be read as a notebook: {_said(error)}")


def _described(path: Path, node: NotebookNode) -> Notebook:
    prose, said = Prose(path.parent), node.metadata.get("kvviz", {})
    bodies = [prose.render(cell.source, cell.get("attachments")) for cell in _opening(node)]
    title = said.get("title") or (plain(prose.headings[0].html) if prose.headings else path.stem)
    promise = next(filter(None, map(first_paragraph, bodies)), "")
    in_words = _MINUTES.search(plain(bodies[0])) if bodies else None
    minutes = [_number(said.get(key), in_words) for key in ("minutes_cpu", "minutes_gpu")]
    return Notebook(path, node, str(title), promise, *minutes, reading_minutes([cell.source for cell in node.cells]))


def execute(notebook: Notebook, watch: Watch, cell_timeout_s: int) -> tuple[NotebookNode, Failure | None]:
    """Run a readable notebook in its folder and return it with its outputs, and the failure that stopped it.

    A cell tagged ``raises-exception`` may raise. The kernel is ``sys.executable``, whatever kernels are installed;
    its settings and its files live in a temporary folder.
    """
    node, cell, number = deepcopy(notebook.node), None, 0
    try:
        with _kernel(node, notebook.path.parent, cell_timeout_s) as client:
            todo = [(index, cell) for index, cell in enumerate(node.cells) if _runs(cell)]
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
        return Failure(number, line, f"not done after {cell_timeout_s} s: give it less to do, or allow more time")
    if isinstance(error, DeadKernelError):
        return Failure(number, line, "the kernel died: out of memory, or a crash in native code")
    hint = f"is ipykernel installed for {sys.executable}?" if not number else "no traceback"
    return Failure(number, line, f"{_first_line(str(error))} ({hint})")


def _traceback(cell: NotebookNode) -> str:
    lines = [line for output in cell.outputs for line in output.get("traceback", [])]
    return strip_ansi("\n".join(lines))


def _parse(path: Path) -> NotebookNode:
    raw = json.loads(path.read_text(encoding="utf-8"))
    version = raw.get("nbformat") if isinstance(raw, dict) else None
    if version != 4:
        raise ValueError(f"nbformat is {version}, and 4 is needed: open it in JupyterLab and save it again")
    _check_shape(raw)
    seen: set[str] = set()
    for number, cell in enumerate(raw["cells"]):
        if cell.get("id") in seen | {None}:  # else nbformat would make up a random one
            cell["id"] = f"cell-{number}"
        seen.add(cell["id"])
        if cell.get("cell_type") == "code":
            cell.update(outputs=[], execution_count=None)
    node = nbformat.reads(json.dumps({**raw, "nbformat_minor": 5}), as_version=4)
    nbformat.validate(node)
    node.metadata.language_info = {"name": "python", "pygments_lexer": "ipython3"}
    return node


def _check_shape(raw: dict) -> None:
    """Everything on which this module relies before, and beyond, what nbformat validates."""
    cells, metadata = raw.get("cells"), raw.get("metadata")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ValueError("its cells are not a list of objects")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("kvviz", {}), dict):
        raise ValueError("its metadata, or the entry kvviz therein, is not an object")
    if not all(isinstance(cell.get("id"), str | None) for cell in cells):
        raise ValueError("a cell has an id that is no text")


def _said(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return _first_line(str(error)) or type(error).__name__


def _opening(node: NotebookNode) -> list[NotebookNode]:
    """The markdown before the first code."""
    first_code = next((at for at, cell in enumerate(node.cells) if cell.cell_type == "code"), len(node.cells))
    return [cell for cell in node.cells[:first_code] if cell.cell_type == "markdown"]


def _number(stated: object, in_words: re.Match | None) -> float | None:
    if isinstance(stated, int | float) and not isinstance(stated, bool) and stated >= 0:
        return float(stated)
    return float(in_words.group(1)) if in_words else None


def _runs(cell: NotebookNode) -> bool:
    return (
        cell.cell_type == "code" and bool(cell.source.strip()) and "skip-execution" not in cell.metadata.get("tags", [])
    )


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]


class _ThisPython(KernelSpecManager):
    """Whatever kernel is asked for, it is the Python that runs now."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, name=kernel_name, display_name="Python", language="python")


@contextlib.contextmanager
def _kernel(node: NotebookNode, folder: Path, cell_timeout_s: int) -> Iterator[NotebookClient]:
    """A client with a running kernel. It is stopped at the end, after Ctrl-C too."""
    with tempfile.TemporaryDirectory(prefix="kvviz-", ignore_cleanup_errors=True) as private:
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
            except BaseException:  # Ctrl-C too: whatever a cell is still doing, nobody waits for it
                client.shutdown_kernel = "immediate"
                raise


def _environment(private: str, outside: Mapping[str, str]) -> dict[str, str]:
    """Variables of a kernel: those outside, less what would change outputs; ``import kvviz`` finds this one."""
    inside = {name: value for name, value in outside.items() if name not in _NOT_FOR_KERNELS}
    inside |= {"IPYTHONDIR": private, "COLUMNS": "100", "PYTHONHASHSEED": outside.get("PYTHONHASHSEED", "0")}
    home = str(PACKAGE.parent)
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        inside["PYTHONPATH"] = os.pathsep.join(filter(None, [home, outside.get("PYTHONPATH")]))
    return inside
