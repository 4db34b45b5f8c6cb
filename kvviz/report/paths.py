"""Shortens the paths of this machine in text that other people will read."""

import os
import re
import site
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
KERNEL_FOLDER = "kvviz-"
"""Beginning of the name of a Jupyter kernel's private folder. :mod:`tempfile` adds eight random characters."""
KERNEL_TEMPORARY = "tmp"
"""Name of the folder for temporary files inside a Jupyter kernel's private folder."""

_KERNEL_FILE = re.compile(r"(?<![^\s'\"<>])[^\s'\"<>]*ipykernel_\d+[/\\]\d+\.py")
"""File name that Jupyter gives to a notebook cell. A match starts only at the beginning of a word. If it could start at
every character, the search in a long word would take quadratic time."""
_KERNEL_TEMPORARY = re.compile(rf"\btmp([/\\]){KERNEL_FOLDER}\w{{8}}[/\\]{KERNEL_TEMPORARY}\b")
_BEFORE = r"(^|[^\w+/.~-]|\x1b\[[\d;]*m)"
"""What may stand before a path, for example a space or a colour code of a terminal. A path that begins in the middle of
another path, or inside base64 text, is not replaced."""
_AFTER = r"(?:([/\\])|(?![\w-]|\.\w))"


def shortener(folder: Path) -> Callable[[str], str]:
    """Return a function that shortens the paths of this machine in a text.

    - The path of ``folder`` becomes the last part of this path.
    - The path of the folder that contains ``kvviz`` is left out, so that only ``kvviz/cache/spec.py`` remains.
    - The paths of the folders of Python become ``python`` and ``site-packages``.
    - The path of the folder for temporary files becomes ``tmp``.
    - The path of the home folder becomes ``~``.
    - The file name that Jupyter gives to a notebook cell becomes ``cell``, because this name contains a process id.
    """
    names = _names(folder)
    longest_first = sorted(names, key=lambda prefix: (-len(prefix), prefix))
    pattern = re.compile(f"{_BEFORE}({'|'.join(map(re.escape, longest_first))}){_AFTER}", re.MULTILINE)

    def short(found: re.Match) -> str:
        before, prefix, slash = found.groups()
        name = names[prefix]
        return before + (name + (slash or "") if name else "" if slash else ".")

    return lambda text: _KERNEL_TEMPORARY.sub("tmp", pattern.sub(short, _KERNEL_FILE.sub("cell", text)))


def _names(folder: Path) -> dict[str, str]:
    """Return a dict from paths of folders to short names. A folder in the home folder also has a path ``~/...``."""
    libraries = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    known = [(Path.home(), "~"), (Path(tempfile.gettempdir()), "tmp"), (PACKAGE.parent, "")]
    known += [(Path(os.__file__).parent, "python"), *((Path(one), "site-packages") for one in libraries)]
    known += [(folder, folder.resolve().name)]
    names = {str(form): name for path, name in known for form in (path, path.resolve()) if len(form.parts) > 1}
    home = f"{Path.home()}/"
    return names | {f"~/{path.removeprefix(home)}": name for path, name in names.items() if path.startswith(home)}
