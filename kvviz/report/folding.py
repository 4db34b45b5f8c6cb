"""Finds the parts of a code cell that a page folds: imports, asserts, and whole cells that JupyterLab folds too.

A page shows what is left: the lines that the lesson is about. A button shows the rest.
"""

import ast
from dataclasses import dataclass

from nbformat import NotebookNode

_PLUMBING = (ast.Import, ast.ImportFrom, ast.Assert)


@dataclass(frozen=True)
class Part:
    """Lines of a code cell that stand together.

    Args:
        source: the lines.
        folded: True if a page folds them.
    """

    source: str
    folded: bool

    @property
    def lines(self) -> int:
        """Return the number of lines that are not blank."""
        return sum(bool(line.strip()) for line in self.source.splitlines())


def parts_of(cell: NotebookNode) -> list[Part]:
    """Return the parts of a code cell, in order. Blank lines between two parts belong to the part before.

    A cell with the metadata ``"jupyter": {"source_hidden": true}`` is folded as a whole. JupyterLab folds it too. If a
    cell has nothing but imports and asserts, or is not plain Python, it is one part that is not folded.
    """
    source = cell.source
    if cell.metadata.get("jupyter", {}).get("source_hidden"):
        return [Part(source, True)]
    lines = source.splitlines()
    folded = _folded_lines(source, len(lines))
    if all(folded) or not any(folded):
        return [Part(source, False)]
    parts, begin = [], 0
    for at in range(1, len(lines) + 1):
        if at == len(lines) or folded[at] != folded[begin]:
            parts.append(Part("\n".join(lines[begin:at]), folded[begin]))
            begin = at
    return parts


def _folded_lines(source: str, count: int) -> list[bool]:
    """Return for each line of a cell whether it belongs to an import or an assert at the top level."""
    folded = [False] * count
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # magic commands, or code that is wrong on purpose
        return folded
    for number, statement in enumerate(statements):
        if isinstance(statement, _PLUMBING):
            following = statements[number + 1].lineno - 1 if number + 1 < len(statements) else count
            blank_after = next(
                (at for at in range(statement.end_lineno, following) if source.splitlines()[at].strip()), following
            )
            folded[statement.lineno - 1 : blank_after] = [True] * (blank_after - statement.lineno + 1)
    return folded
