"""Workshop: notebooks that hold solutions become the participants' copies, with holes, and the instructor's.

A code cell tagged ``solution`` holds what a reader is to write, once, between two comments::

    def third(byte):
        # solution
        return byte // 3
        # end of solution

In place of these lines a participant finds a hole: how many lines they were, and ``return ...``. A cell tagged
``check`` says in one sentence that ``...`` is no solution, or what is wrong with one. Markdown cells tagged
``solution`` tell what a solution shows; the others, hints among them, are in both copies.
"""

import ast
import json
import re
import shutil
import sys
import textwrap
from copy import deepcopy
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from kvviz.report.notebook import read

SOLUTION, CHECK, MAY_RAISE = "solution", "check", "raises-exception"

_SOLVED = re.compile(r"^([ \t]*)# solution\n(.*?)^[ \t]*# end of solution$", re.MULTILINE | re.DOTALL)
_MARKS = re.compile(r"^[ \t]*# (?:end of )?solution\n?", re.MULTILINE)


def tagged(cell: NotebookNode, tag: str) -> bool:
    """Whether a cell has a tag."""
    return tag in cell.metadata.get("tags", [])


def hole(source: str) -> str:
    """The source of a ``solution`` cell as a participant gets it.

    Raises:
        ValueError: the marking comments do not come in pairs, or a solution does not end in ``name = value`` or
            ``return value``, so that nothing could stay open.
    """
    made, count = _SOLVED.subn(_hole, source)
    if not count or _MARKS.search(made):
        raise ValueError(f"'# solution' and '# end of solution' do not come in pairs: {source!r}")
    return made


def solved(source: str) -> str:
    """The source of a ``solution`` cell without the marking comments."""
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
        raise ValueError(f"a solution ends in 'name = value' or 'return value', not so: {body.strip()!r}")
    size = f"{len(lines)} line{'s' * (len(lines) > 1)}"
    return f"{indent}# your code here (about {size})\n{indent}{start} {_open(last.value)}"


def _open(value: ast.expr | None) -> str:
    """Three dots; for a dict, three dots for each of its values."""
    if isinstance(value, ast.Dict):
        return "{" + ", ".join(f"{json.dumps(ast.literal_eval(key))}: ..." for key in value.keys) + "}"
    return "..."


def participants(node: NotebookNode) -> NotebookNode:
    """The copy with holes. What were ``check`` cells may raise, so that "run all" goes on behind them."""
    made = deepcopy(node)
    made.cells = [cell for cell in made.cells if cell.cell_type == "code" or not tagged(cell, SOLUTION)]
    for cell in made.cells:
        if tagged(cell, SOLUTION):
            cell.source = hole(cell.source)
        if tagged(cell, CHECK):
            cell.metadata.tags.append(MAY_RAISE)
    return _plain(made)


def instructor(node: NotebookNode) -> NotebookNode:
    """The copy with solutions, without the marking comments."""
    made = deepcopy(node)
    for cell in made.cells:
        if cell.cell_type == "code" and tagged(cell, SOLUTION):
            cell.source = solved(cell.source)
    return _plain(made)


def _plain(copy: NotebookNode) -> NotebookNode:
    """A copy without the tags from which it was derived: it is a notebook like any other."""
    for cell in copy.cells:
        if "tags" in cell.metadata:
            cell.metadata.tags = [tag for tag in cell.metadata.tags if tag not in (SOLUTION, CHECK)]
    return copy


def main(notebooks: Path, out: Path) -> int:
    """Write ``out/participants`` and ``out/instructor``: a copy of each notebook of a folder, and its data files.

    Files that are there already and say something else are somebody's work: then nothing is written.

    Returns:
        0; 2 if nothing was written for that reason, which standard error explains.

    Raises:
        ValueError: a notebook cannot be read, or has a solution without marks.
        OSError: a file cannot be read or written.
    """
    made = _copies(notebooks)
    changed = [name for name, text in made.items() if (out / name).exists() and (out / name).read_text("utf-8") != text]
    if changed:
        print(
            f"workshop: {len(changed)} of {len(made)} copies are there already and differ, {out / changed[0]} first. "
            f"Nothing was written, since that may be work: move {out} away, or name another folder with --out.",
            file=sys.stderr,
        )
        return 2
    for name, text in made.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    for path in sorted(notebooks.glob("*.json")):
        for kind in ("participants", "instructor"):
            shutil.copyfile(path, out / kind / path.name)
    holes = sum(text.count("# your code here (about ") for text in made.values())
    told = f"{out / 'participants'} with {holes} holes, {out / 'instructor'} with the solutions"
    print(f"{len(made) // 2} notebooks: {told}")
    return 0


def _copies(notebooks: Path) -> dict[str, str]:
    """Path below the folder of copies to content, for every notebook of a folder."""
    made = {}
    for path in sorted(notebooks.glob("*.ipynb")):
        lesson = read(path)
        if lesson.node is None:
            raise ValueError(f"{path.name} {lesson.problem}")
        try:
            for kind, copy in (("participants", participants), ("instructor", instructor)):
                made[f"{kind}/{path.name}"] = nbformat.writes(copy(lesson.node)) + "\n"
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
    if not made:
        raise ValueError(f"{notebooks} holds no .ipynb file: name the folder that holds the notebooks")
    return made
