"""Makes the Python environment ``.venv``, and corrects it after the folder of kvviz was moved or copied.

The files in ``.venv`` contain the absolute path of their folder. The path stands in the first line of each command, and
in the file that says where the package kvviz is. If somebody moves the folder of kvviz, these paths become wrong. Then
a notebook cannot import kvviz, or it imports another copy of kvviz that is now at the old path.

``python -m kvviz.environment`` makes the environment. If the requirements have changed, it makes the environment again.
If the folder was moved, it corrects the paths. This module needs only the standard library, because it runs before
any package is installed.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = ".installed"
"""File in ``.venv`` that is written last. An environment without this file is incomplete, and is made again."""

WAIT_SECONDS = 3600
"""Longest time in seconds to wait for another process that sets up ``.venv``. pip takes three minutes if its cache has
all packages, and up to an hour if the network is slow."""

IMPORT_SECONDS = 60
"""Time limit in seconds of ``import kvviz`` in a new process. The import takes 0.1 s, or longer on a busy machine."""

_FILES_WITH_PATHS = (
    "bin/*",
    "pyvenv.cfg",
    "share/jupyter/kernels/*/kernel.json",
    "lib/python*/site-packages/*.pth",
    "lib/python*/site-packages/__editable__*",
    "lib/python*/site-packages/kvviz-*/direct_url.json",
)
"""Patterns of the files in ``.venv`` that may contain the path of the folder of kvviz."""

_INTERPRETER = re.compile(r"(/[^\n\"']*)/python[\d.]*\b")
"""Finds the path of a Python interpreter in the first two lines of a command. If the path is long, pip writes the path
into the second line."""


def main(index: str = "") -> int:
    """Set up ``.venv`` in the folder of kvviz, and return the exit status."""
    try:
        set_up(ROOT, index)
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"The environment {ROOT / '.venv'} could not be made: {error}. "
            f"Correct this error, and run make environment again.",
            file=sys.stderr,
        )
        return 2
    return 0


def set_up(root: Path, index: str = "") -> None:
    """Make ``root/.venv``. If only its paths are wrong, correct the paths. If it is complete, do nothing.

    If several processes call this function for the same ``root``, they run one after the other.

    Args:
        index: address of one more package index for pip, or "" for no further index.

    Raises:
        TimeoutError: another process has been setting up the same folder for :data:`WAIT_SECONDS`.
        OSError, subprocess.CalledProcessError: the environment could not be made. The next call tries again.
    """
    with _only_one(root / ".venv.lock"):
        wanted, found = _description(root), _read(root / ".venv" / STAMP)
        if found == wanted:
            return
        if found.get("requirements") == wanted["requirements"]:
            print(
                f"This folder was {found['folder']} when .venv was made. The paths in .venv are corrected.", flush=True
            )
            move(root / ".venv", Path(found["folder"]), root)
            if installed_folder(_python(root / ".venv")) != str(root / "kvviz"):
                print("The environment still imports kvviz from another folder. It is made again.", flush=True)
                _install(root, index)
        else:
            _install(root, index)
        (root / ".venv" / STAMP).write_text(json.dumps(wanted))


def move(environment: Path, old: Path, new: Path) -> None:
    """Replace the path ``old`` by ``new`` in the files of an environment that :data:`_FILES_WITH_PATHS` lists."""
    path = re.compile(re.escape(str(old)) + r"(?![\w.-])")
    for file in (file for pattern in _FILES_WITH_PATHS for file in environment.glob(pattern) if file.is_file()):
        with contextlib.suppress(UnicodeDecodeError):  # raised for a binary program, which contains no such path
            text = file.read_text(encoding="utf-8")
            if path.search(text):
                file.write_text(path.sub(lambda _: str(new), text), encoding="utf-8")


def wrong_paths() -> str:
    """Return a sentence if this environment has the paths of another folder. Return "" if all paths are right.

    Two things are checked. A process in another folder, such as a notebook, must import the kvviz that runs now. The
    installed commands must start the Python of this environment.
    """
    here = Path(__file__).resolve().parent
    elsewhere = installed_folder(sys.executable)
    if not elsewhere:
        return f"a notebook in another folder cannot import kvviz, although kvviz is here: {here}"
    if Path(elsewhere) != here:
        return f"a notebook in another folder imports kvviz from {elsewhere}, and not from {here}"
    scripts = Path(sysconfig.get_path("scripts"))
    for name in ("kvviz", "jupyter"):
        folder = _interpreter_folder(scripts / name)
        mine = (
            scripts,
            Path(sys.executable).parent,
        )  # one folder in a virtual environment, two in Debian's Python
        if folder and not (folder.is_dir() and any(folder.samefile(one) for one in mine)):
            return f"the command {scripts / name} starts the Python of another folder, {folder}"
    return ""


def installed_folder(python: str | Path) -> str:
    """Return the folder of the kvviz that ``python`` imports in an empty folder. Return "" if the import fails."""
    code = "import os, kvviz; print(os.path.dirname(os.path.realpath(kvviz.__file__)))"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [python, "-c", code], cwd=folder, capture_output=True, text=True, timeout=IMPORT_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _interpreter_folder(script: Path) -> Path | None:
    """Return the folder of the Python that a command starts. Return None if the command does not start Python."""
    try:
        first_lines = script.read_bytes()[:1024].decode("utf-8", "replace").split("\n")[:2]
    except OSError:
        return None
    found = _INTERPRETER.search("\n".join(first_lines)) if first_lines[0].startswith("#!") else None
    return Path(found[1]) if found else None


def _install(root: Path, index: str) -> None:
    """Make the environment from nothing, so that nothing of an interrupted installation remains."""
    environment = root / ".venv"
    (environment / STAMP).unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    more = ["--extra-index-url", index] if index else []
    subprocess.run(
        [_python(environment), "-m", "pip", "install", *more, "-r", "requirements.txt"], cwd=root, check=True
    )


def _python(environment: Path) -> str:
    return str(environment / "bin" / "python")


def _description(root: Path) -> dict[str, str]:
    """Return what the environment of ``root`` depends on: its folder, and a sha256 of the files with requirements."""
    content = b"".join((root / name).read_bytes() for name in ("requirements.txt", "pyproject.toml"))
    return {"folder": str(root), "requirements": hashlib.sha256(content).hexdigest()}


def _read(stamp: Path) -> dict[str, str]:
    try:
        return json.loads(stamp.read_text())
    except (OSError, ValueError):  # ValueError: the stamp of kvviz 0.1.0 is empty
        return {}


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold a lock on the file ``lock`` in a ``with`` statement. The file contains the id of the process with the lock.

    The package filelock cannot be used, because no package is installed yet.
    """
    import fcntl  # exists only on Unix systems

    with lock.open("a+") as file:
        stop, waits = time.time() + WAIT_SECONDS, False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            holder = f"process {lock.read_text().strip() or '(unknown)'}"
            if time.time() > stop:
                raise TimeoutError(f"{holder} is still setting up the same folder. End {holder} first")
            if not waits:
                until = time.strftime("%H:%M", time.localtime(stop))
                print(f"Waiting for {holder}, which sets up .venv, until {until} at the latest.", flush=True)
            waits = True
            time.sleep(0.2)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
