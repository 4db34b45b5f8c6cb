"""README and CONTRIBUTING are short and true: the file tree is whole, commands exist, and code blocks run."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LEFT_OUT = ("__init__.py", ".gitignore")
"""Files that the tree need not name, because the line of their folder says what they contain."""


def tracked() -> set[str]:
    """Return every file of the checkout, except files that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout: the list of files comes from git")
    return {name for name in names if name and (ROOT / name).is_file() and Path(name).name not in LEFT_OUT}


def tree() -> dict[str, str]:
    """Return the description of each path in the file tree. A file stands two blanks right of its folder."""
    (text,) = re.findall(r"^```text\n(.*?)^```", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    found, folders = {}, []
    for line in text.splitlines():
        indent, name, words = re.fullmatch(r"( *)(\S+)(?: +(.*))?", line).groups()
        folders = folders[: len(indent) // 2]
        if name.endswith("/"):
            folders.append(name)
        else:
            found["".join(folders) + name] = words or ""
    return found


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_the_tree_names_every_file_once_and_no_other():
    assert sorted(tracked() - tree().keys()) == []
    assert sorted(tree().keys() - tracked()) == []


def test_every_line_of_the_tree_says_what_is_inside():
    assert [path for path, words in tree().items() if len(words.split()) < 2] == []


def test_every_make_target_that_is_named_exists():
    documents = [README, CONTRIBUTING, *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for text in documents for name in re.findall(r"`?\bmake ([a-z-]+)", text) if f"`make {name}" in text}
    assert named and named <= targets


def test_every_notebook_is_in_the_readmes_table():
    rows = re.findall(r"^\| `(\d\d_\w+)` \|", README, re.MULTILINE)
    assert rows == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_the_readmes_python_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    room: dict = {}
    exec(block, room)
    assert capsys.readouterr().out == block.rpartition("# ")[2]
    assert {finding.kind for finding in room["result"].findings} == {"collision", "misplaced"}
