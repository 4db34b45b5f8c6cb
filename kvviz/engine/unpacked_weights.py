"""Keep the language model unpacked in float32, in a second file that all processes share.

Reading and dequantising the GGUF takes seconds, and 540 MB of memory in each process. The unpacked file is mapped into
memory instead: the system keeps one copy, however many processes read it.

The unpacked file is a safetensors file. Its metadata say which format and which GGUF it was made from, and contain the
GGUF's fields and a sha256. If one of them is wrong, the file is made again.
"""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvviz.engine import weights
from kvviz.files import remove_stale

FORMAT = "kvviz float32 2"
WAIT_SECONDS = 300
"""Limit of waiting for another process that unpacks, in seconds. Unpacking takes about 10 s on two CPU cores."""


@dataclass(frozen=True)
class Unpacked:
    """Content of a GGUF: its ``fields`` by name, and its ``tensors``, float32 arrays by name.

    A process that writes into such an array changes only its own copy.
    """

    fields: dict
    tensors: dict[str, np.ndarray]


def path_beside(gguf_path: Path) -> Path:
    """Return the path of the unpacked file (540 MB), also if there is no such file."""
    return gguf_path.with_suffix(".float32-2.safetensors")


def unpack(gguf_path: Path) -> Unpacked:
    """Return the fields and tensors of the model, mapped from the unpacked file. Make this file if it is missing.

    If several processes start at the same time, one of them unpacks and the others wait. If the file cannot be written,
    each process unpacks in its own memory, and prints a sentence on stderr.

    Args:
        gguf_path: a file that :func:`kvviz.engine.weights.find` returned.

    Raises:
        TimeoutError: another process has been unpacking for :data:`WAIT_SECONDS`.
    """
    target = path_beside(gguf_path)
    found = opened(target)
    if found:
        return found
    with _only_one(gguf_path.parent):
        return opened(target) or _made(gguf_path, target)


def opened(target: Path) -> Unpacked | None:
    """Map an unpacked file. Return None if the file is absent, incomplete, changed, or made from another GGUF.

    safetensors maps a file only for torch. For numpy it copies all tensors, 540 MB in each process.
    """
    try:
        with safe_open(target, framework="pt") as file:
            about = json.loads(file.metadata()["kvviz"])
            tensors = {name: file.get_tensor(name).numpy() for name in sorted(file.keys())}  # noqa: SIM118
        expected = _description(about["fields"], tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):  # not a file that kvviz wrote
        return None
    return Unpacked(about["fields"], tensors) if about == expected else None


def _made(gguf_path: Path, target: Path) -> Unpacked:
    """Unpack a GGUF, keep the result in the file ``target`` if possible, and return it."""
    import gguf

    reader = gguf.GGUFReader(gguf_path)
    fields = {name: value.contents() for name, value in reader.fields.items()}
    tensors = {t.name: np.array(gguf.dequantize(t.data, t.tensor_type), np.float32, order="C") for t in reader.tensors}
    try:
        _write(target, fields, tensors)
        found, why = opened(target), "the file has another content than what was written"
    except (OSError, SafetensorError) as error:
        found, why = opened(target), getattr(error, "strerror", None) or str(error)
    if found:
        return found
    print(
        f"The unpacked weights could not be stored in {target} ({why}). This process keeps its own copy of 540 MB. "
        "To share one copy, make the folder writable with 600 MB of free space, or set KVVIZ_CACHE to another folder.",
        file=sys.stderr,
    )
    return Unpacked(fields, tensors)


def _write(target: Path, fields: dict, tensors: dict[str, np.ndarray]) -> None:
    """Write the unpacked file in a temporary folder, because safetensors writes a temporary file beside it."""
    remove_stale(target.parent, "unpack-*")
    about = {"kvviz": json.dumps(_description(fields, tensors))}  # one entry: safetensors writes several in any order
    with tempfile.TemporaryDirectory(prefix="unpack-", dir=target.parent, ignore_cleanup_errors=True) as folder:
        part = Path(folder) / target.name
        part.touch()
        usual = part.stat().st_mode
        save_file(tensors, part, about)
        part.chmod(usual)  # safetensors gives a file to its owner alone, but other users read this file too
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, target)


def _description(fields: dict, tensors: dict[str, np.ndarray]) -> dict:
    """Describe what an unpacked file must contain, with a sha256 over the fields, names, shapes and numbers."""
    shapes = {name: list(tensors[name].shape) for name in sorted(tensors)}
    digest = hashlib.sha256(json.dumps([fields, shapes]).encode())
    for name in shapes:
        digest.update(tensors[name].data)
    return {"format": FORMAT, "source": weights.MODEL.gguf_sha256, "sha256": digest.hexdigest(), "fields": fields}


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Let only one process at a time run the ``with`` block. A waiting process prints which process it waits for.

    Nobody waits if the folder cannot be written, or if its file system has no locks: then each process unpacks.
    """
    if not os.access(folder, os.W_OK):
        yield
        return
    path = folder / "unpack.lock"
    try:
        lock = _locked(path)
    except filelock.Timeout:
        raise TimeoutError(
            f"{_holder(path)} has been unpacking the model for more than {WAIT_SECONDS} s. "
            "Wait until it ends, or end it; then try again."
        ) from None
    except (OSError, NotImplementedError):
        lock = None
    try:
        yield
    finally:
        if lock:
            lock.release()


def _locked(path: Path) -> filelock.BaseFileLock:
    """Return a lock that this process holds. The lock file contains the process id of the holder."""
    lock, holder = filelock.FileLock(path), _holder(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + WAIT_SECONDS))
        print(f"Waiting for {holder}, which unpacks the model, until {until} at the latest.", file=sys.stderr)
        lock.acquire(timeout=WAIT_SECONDS)
    path.write_text(str(os.getpid()))
    return lock


def _holder(path: Path) -> str:
    """Return words for the process that holds the lock: ``process 1234`` or ``another process``."""
    try:
        return f"process {int(path.read_text())}"
    except (OSError, ValueError):
        return "another process"
