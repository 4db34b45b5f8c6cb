"""Make the folder ``.venv`` for ``make``, and notice when the clone was moved or copied.

A Python environment contains the absolute path of its folder: in the first line of each command, and in the file that
says where the package kvviz is. If the clone is moved, these paths are wrong. A notebook then cannot import kvviz, or
imports the kvviz of another clone that is now at the old path.

``python -m kvviz.environment`` makes the environment, makes it again if the requirements changed, and corrects the
paths if the clone was moved. It needs only the standard library, because it runs before anything is installed.
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
"""File in ``.venv`` that is written last: an environment without it is incomplete, and is made again."""

WAIT_SECONDS = 3600
"""Limit of waiting for another set-up. pip takes three minutes with a full cache, and up to an hour on a slow line."""

IMPORT_SECONDS = 60
"""Limit of one ``import kvviz`` in a process of its own. It takes 0.1 s, and longer on a machine that is busy."""

_FILES_WITH_PATHS = (
    "bin/*",
    "pyvenv.cfg",
    "share/jupyter/kernels/*/kernel.json",
    "lib/python*/site-packages/*.pth",
    "lib/python*/site-packages/__editable__*",
    "lib/python*/site-packages/kvviz-*/direct_url.json",
)
"""Files of an environment, below its folder, that may contain the path of the clone."""

_INTERPRETER = re.compile(r"(/[^\n\"']*)/python[\d.]*\b")
"""The path of a Python, in the first two lines of a command. pip uses the second line if the path is long."""


def main(index: str = "") -> int:
    """Set up ``.venv`` in the folder of kvviz, and return the exit status."""
    try:
        set_up(ROOT, index)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"The environment {ROOT / '.venv'} could not be made: {error}", file=sys.stderr)
        return 2
    return 0


def set_up(root: Path, index: str = "") -> None:
    """Make ``root/.venv``, or correct its paths, or do nothing if it is complete. Other processes wait meanwhile.

    Args:
        index: the address of one more package index for pip; empty for none.

    Raises:
        TimeoutError: another process has been setting up the same folder for :data:`WAIT_SECONDS`.
        OSError, subprocess.CalledProcessError: a step failed. The next call starts from nothing.
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
    """Replace the path ``old`` by ``new`` in the commands of an environment and in the files that locate kvviz."""
    path = re.compile(re.escape(str(old)) + r"(?![\w.-])")
    for file in (file for pattern in _FILES_WITH_PATHS for file in environment.glob(pattern) if file.is_file()):
        with contextlib.suppress(UnicodeDecodeError):  # a program, which contains no path
            text = file.read_text(encoding="utf-8")
            if path.search(text):
                file.write_text(path.sub(lambda _: str(new), text), encoding="utf-8")


def wrong_paths() -> str:
    """Return one sentence if this environment was made for another folder; empty if all its paths are right.

    This function compares three folders: of the kvviz of this process, of the kvviz that a process in another folder
    imports (as a notebook does), and of the interpreter that the installed commands start.
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
        mine = (scripts, Path(sys.executable).parent)  # equal in a virtual environment, but not in Debian's own Python
        if folder and not (folder.is_dir() and any(folder.samefile(one) for one in mine)):
            return f"the command {scripts / name} starts the Python of another folder, {folder}"
    return ""


def installed_folder(python: str | Path) -> str:
    """Return the folder of the kvviz that ``python`` imports outside the clone; empty if it cannot import kvviz."""
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
    """Return the folder of the Python that a command starts; None if ``script`` is not a command in Python."""
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
    """Describe the environment that ``root`` needs: the folder, and a sha256 over the files that say what to
    install."""
    content = b"".join((root / name).read_bytes() for name in ("requirements.txt", "pyproject.toml"))
    return {"folder": str(root), "requirements": hashlib.sha256(content).hexdigest()}


def _read(stamp: Path) -> dict[str, str]:
    try:
        return json.loads(stamp.read_text())
    except (OSError, ValueError):  # ValueError: the stamp of kvviz 0.1.0 is empty
        return {}


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold a lock on the file ``lock``, which contains the process id of the holder.

    This lock is written by hand: the package filelock is not installed yet.
    """
    import fcntl  # POSIX only, as make is

    with lock.open("a+") as file:
        stop, waits = time.time() + WAIT_SECONDS, False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            holder = f"process {lock.read_text().strip() or '(unknown)'}"
            if time.time() > stop:
                raise TimeoutError(f"{holder} is still setting up the same folder. End {holder}, and try again.")
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
