"""Paths: those of this machine are shortened in text that travels; and files are written whole or not at all."""

import os
import re
import site
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]

_KERNEL_FILE = re.compile(r"(?<![^\s'\"<>])[^\s'\"<>]*ipykernel_\d+[/\\]\d+\.py")
"""It is looked for once a word, from the word's beginning: without that, long words take quadratic time."""
_BEFORE = r"(^|[^\w+/.~-]|\x1b\[[\d;]*m)"
"""What may stand before a path: not base64 and not the middle of another path; a colour code may."""
_AFTER = r"(?:([/\\])|(?![\w-]|\.\w))"


def shortener(folder: Path) -> Callable[[str], str]:
    """A function that takes the paths of this machine out of a text.

    ``folder`` becomes its own name, the folder that holds ``kvviz`` vanishes (``kvviz/cache/spec.py`` stays),
    Python's folders and the temporary one become their names, the home folder ``~``, and the file names that a
    kernel gives to cells (they hold a process id) become ``cell``.
    """
    names = _names(folder)
    longest_first = sorted(names, key=lambda prefix: (-len(prefix), prefix))
    pattern = re.compile(f"{_BEFORE}({'|'.join(map(re.escape, longest_first))}){_AFTER}", re.MULTILINE)

    def short(found: re.Match) -> str:
        before, prefix, slash = found.groups()
        name = names[prefix]
        return before + (name + (slash or "") if name else "" if slash else ".")

    return lambda text: pattern.sub(short, _KERNEL_FILE.sub("cell", text))


def _names(folder: Path) -> dict[str, str]:
    """What each folder of this machine is called; paths under the home folder also as ``~/...``."""
    libraries = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    known = [(Path.home(), "~"), (Path(tempfile.gettempdir()), "tmp"), (PACKAGE.parent, "")]
    known += [(Path(os.__file__).parent, "python"), *((Path(one), "site-packages") for one in libraries)]
    known += [(folder, folder.resolve().name)]
    names = {str(form): name for path, name in known for form in (path, path.resolve()) if len(form.parts) > 1}
    home = f"{Path.home()}/"
    return names | {f"~/{path.removeprefix(home)}": name for path, name in names.items() if path.startswith(home)}


def write_whole(path: Path, data: bytes) -> int:
    """Write ``data`` so that ``path`` is never seen half-written; returns its size in bytes.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return len(data)
