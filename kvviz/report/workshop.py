"""Makes copies of notebooks for a workshop: with holes for participants, and with solutions for the instructor.

A notebook of the project contains each solution once, in a code cell tagged ``solution``, between two comments::

    def third(byte):
        # solution
        return byte // 3
        # end of solution

In the participants' copy, a hole replaces these lines: a comment with the number of lines, and ``return ...``.

A code cell tagged ``check`` comes after the solution. The check raises an error with one sentence if the answer is
still ``...``, or if the answer is wrong.

A markdown cell tagged ``solution`` explains a solution, so only the instructor's copy contains this cell. All other
markdown cells, also hints, are in both copies.
"""

import ast
import json
import re
import sys
import textwrap
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType

import nbformat
from nbformat import NotebookNode

from kvviz.files import write_whole
from kvviz.report.notebook import read
from kvviz.report.prose import counted

SOLUTION, CHECK, MAY_RAISE = "solution", "check", "raises-exception"
"""Tags of cells. If a cell with the tag ``raises-exception`` raises an error, Jupyter still runs the next cell."""

_SOLVED = re.compile(r"^([ \t]*)# solution\n(.*?)^[ \t]*# end of solution$", re.MULTILINE | re.DOTALL)
_MARKS = re.compile(r"^[ \t]*# (?:end of )?solution\n?", re.MULTILINE)


def tagged(cell: NotebookNode, tag: str) -> bool:
    """Return True if a cell has the tag."""
    return tag in cell.metadata.get("tags", [])


def hole(source: str) -> str:
    """Return the source of a ``solution`` cell with a hole in place of each solution.

    Raises:
        ValueError: the comments ``# solution`` and ``# end of solution`` do not come in pairs, or a solution does not
            end in ``name = value`` or ``return value``.
    """
    made, count = _SOLVED.subn(_hole, source)
    if not count or _MARKS.search(made):
        raise ValueError(
            f"'# solution' and '# end of solution' do not come in pairs: put both comments around each solution of "
            f"the code cell {source!r}"
        )
    return made


def solved(source: str) -> str:
    """Return the source of a ``solution`` cell without the comments around its solutions."""
    return _MARKS.sub("", source).rstrip("\n")


def _hole(found: re.Match) -> str:
    indent, body = found.groups()
    lines = [line for line in body.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    last = ast.parse(textwrap.dedent(body)).body[-1] if lines else None
    if isinstance(last, ast.Return):
        start = "return"
    elif isinstance(last, ast.Assign) and isinstance(last.targets[0], ast.Name):
        start = f"{last.targets[0].id} ="
    else:
        raise ValueError(f"a solution must end in 'name = value' or 'return value', but this one is: {body.strip()!r}")
    size = f"{len(lines)} line{'s' * (len(lines) > 1)}"
    return f"{indent}# your code here (about {size})\n{indent}{start} {_open(last.value)}"


def _open(value: ast.expr | None) -> str:
    """Return three dots. For a dict, return the dict with three dots in place of each value."""
    if isinstance(value, ast.Dict):
        return "{" + ", ".join(f"{json.dumps(ast.literal_eval(key))}: ..." for key in value.keys) + "}"
    return "..."


def participants(node: NotebookNode) -> NotebookNode:
    """Return the copy with holes. If a ``check`` cell raises an error, "Run All" still runs the cells after it."""
    made = deepcopy(node)
    made.cells = [cell for cell in made.cells if cell.cell_type == "code" or not tagged(cell, SOLUTION)]
    for cell in made.cells:
        if tagged(cell, SOLUTION):
            cell.source = hole(cell.source)
        if tagged(cell, CHECK):
            cell.metadata.tags.append(MAY_RAISE)
    return _without_tags(made)


def instructor(node: NotebookNode) -> NotebookNode:
    """Return the copy with solutions, without the comments around them."""
    made = deepcopy(node)
    for cell in made.cells:
        if cell.cell_type == "code" and tagged(cell, SOLUTION):
            cell.source = solved(cell.source)
    return _without_tags(made)


def _without_tags(copy: NotebookNode) -> NotebookNode:
    """Remove the tags ``solution`` and ``check``, and return the copy."""
    for cell in copy.cells:
        if "tags" in cell.metadata:
            cell.metadata.tags = [tag for tag in cell.metadata.tags if tag not in (SOLUTION, CHECK)]
    return copy


def main(notebooks: Path, out: Path, more: Mapping[str, str] = MappingProxyType({})) -> int:
    """Write ``out/participants`` and ``out/instructor``: a copy of each notebook of a folder, and its data files.

    ``more`` has texts of further files by name. Both folders get these files.

    A file that exists already and has other content may be somebody's work. If there is such a file, this function
    writes nothing.

    Returns:
        0, or 2 if nothing was written. Standard error gives the reason for 2.

    Raises:
        ValueError: a notebook cannot be read, or a solution has no comments around it.
        OSError: a file cannot be read or written.
    """
    made = _copies(notebooks)
    for kind in ("participants", "instructor"):
        made |= {f"{kind}/{name}": text.encode("utf-8") for name, text in more.items()}
    changed = [name for name, data in made.items() if _differs(out / name, data)]
    if changed:
        number, first = len(changed), out / changed[0]
        which = f"{first} exists" if number == 1 else f"{number} files exist (the first is {first})"
        print(
            f"workshop: {which} and may contain somebody's work, so nothing was written. "
            f"Move {out} to another place, or choose another folder with --out.",
            file=sys.stderr,
        )
        return 2
    for name, data in made.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, data)
    lessons = sum(name.endswith(".ipynb") for name in made) // 2
    holes = sum(data.count(b"# your code here (about ") for data in made.values())
    print(
        f"{counted(lessons, 'notebook')}: {out / 'participants'} with {counted(holes, 'hole')}, "
        f"{out / 'instructor'} with the solutions"
    )
    return 0


def _differs(path: Path, data: bytes) -> bool:
    """Return True if something exists at ``path`` that is not a file with the content ``data``."""
    if path.is_file():
        return path.read_bytes() != data
    return path.is_symlink() or path.exists()


def _copies(notebooks: Path) -> dict[str, bytes]:
    """Return the contents of all files to write, by path. Each notebook and each ``.json`` file is written twice."""
    made = {}
    for path in sorted(notebooks.glob("*.ipynb")):
        lesson = read(path)
        if lesson.node is None:
            raise ValueError(f"{path.name} {lesson.problem}")
        try:
            for kind, copy in (("participants", participants), ("instructor", instructor)):
                made[f"{kind}/{path.name}"] = (nbformat.writes(copy(lesson.node)) + "\n").encode("utf-8")
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
    if not made:
        raise ValueError(f"{notebooks} contains no .ipynb file: give the folder that contains the notebooks")
    for path in sorted(notebooks.glob("*.json")):
        for kind in ("participants", "instructor"):
            made[f"{kind}/{path.name}"] = path.read_bytes()
    return made
