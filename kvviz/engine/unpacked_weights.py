"""Keep the weights of the language model in float32, in a second file that all processes share.

Reading and dequantising the GGUF file takes seconds, and 540 MB of memory in each process. The unpacked file is mapped
into memory. So the system keeps only one copy in memory for all processes.

The unpacked file is a safetensors file. Its metadata contain the format, the sha256 of the GGUF file, the fields of the
GGUF file, and a sha256 over the content. If one of these values is wrong, the unpacked file is made again.
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
"""The most seconds that a process waits for another process to unpack. Unpacking takes about 10 s on two CPU cores."""


@dataclass(frozen=True)
class Unpacked:
    """The content of a GGUF file.

    Attributes:
        fields: for each name, the field of the GGUF file.
        tensors: for each name, the tensor as a float32 array. A process that writes into such an array changes only its
            own copy.
    """

    fields: dict
    tensors: dict[str, np.ndarray]


def path_beside(gguf_path: Path) -> Path:
    """Return the path of the unpacked file (540 MB). The file need not exist."""
    return gguf_path.with_suffix(".float32-2.safetensors")


def unpack(gguf_path: Path) -> Unpacked:
    """Map the unpacked file, and return the fields and tensors of the model. If the file is missing, make the file.

    If several processes start at the same time, one process unpacks, and the other processes wait. If the file cannot
    be written, each process unpacks in its own memory, and prints a message on stderr.

    Args:
        gguf_path: a file that :func:`kvviz.engine.weights.find` returned.

    Raises:
        TimeoutError: another process has been unpacking for more than :data:`WAIT_SECONDS`.
    """
    target = path_beside(gguf_path)
    found = opened(target)
    if found:
        return found
    with _only_one(gguf_path.parent):
        return opened(target) or _made(gguf_path, target)


def opened(target: Path) -> Unpacked | None:
    """Map an unpacked file. Return None if the file is absent, incomplete, changed, or made from another GGUF file.

    This function opens the file for torch. For numpy, safetensors would not map the file, but copy 540 MB.
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
    """Unpack a GGUF file and return the content. If possible, also write the content to the file ``target``."""
    import gguf

    reader = gguf.GGUFReader(gguf_path)
    fields = {name: value.contents() for name, value in reader.fields.items()}
    tensors = {t.name: np.array(gguf.dequantize(t.data, t.tensor_type), np.float32, order="C") for t in reader.tensors}
    try:
        _write(target, fields, tensors)
        found, why = opened(target), "the content of the file is not what was written"
    except (OSError, SafetensorError) as error:
        found, why = opened(target), getattr(error, "strerror", None) or str(error)
    if found:
        return found
    print(
        f"The unpacked weights could not be stored in {target} ({why}). So this process uses 540 MB for its own copy. "
        "To share one copy, make the folder writable and free 600 MB there, or set KVVIZ_CACHE to another folder.",
        file=sys.stderr,
    )
    return Unpacked(fields, tensors)


def _write(target: Path, fields: dict, tensors: dict[str, np.ndarray]) -> None:
    """Write the unpacked file in a temporary folder, then move it to ``target``.

    The folder is needed because safetensors writes a temporary file beside the file.
    """
    remove_stale(target.parent, "unpack-*")
    # One entry contains everything, because safetensors writes several entries in any order.
    about = {"kvviz": json.dumps(_description(fields, tensors))}
    with tempfile.TemporaryDirectory(prefix="unpack-", dir=target.parent, ignore_cleanup_errors=True) as folder:
        part = Path(folder) / target.name
        part.touch()
        usual = part.stat().st_mode
        save_file(tensors, part, about)
        part.chmod(usual)  # safetensors lets only the owner read a file, but other users must read this file too
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, target)


def _description(fields: dict, tensors: dict[str, np.ndarray]) -> dict:
    """Return the metadata of an unpacked file. The sha256 covers the fields, names, shapes and numbers."""
    shapes = {name: list(tensors[name].shape) for name in sorted(tensors)}
    digest = hashlib.sha256(json.dumps([fields, shapes]).encode())
    for name in shapes:
        digest.update(tensors[name].data)
    return {"format": FORMAT, "source": weights.MODEL.gguf_sha256, "sha256": digest.hexdigest(), "fields": fields}


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Context manager that only one process at a time can enter. Other processes wait, and print for which process.

    No process waits if the folder cannot be written, or if the file system has no locks. Each process then unpacks.
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
            "Wait until that process ends, or end that process. Then try again."
        ) from None
    except (OSError, NotImplementedError):
        lock = None
    try:
        yield
    finally:
        if lock:
            lock.release()


def _locked(path: Path) -> filelock.BaseFileLock:
    """Get the lock, and write the id of this process into the lock file. Wait if another process has the lock."""
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
    """Name the process that has the lock. The result is, for example, ``process 1234`` or ``another process``."""
    try:
        return f"process {int(path.read_text())}"
    except (OSError, ValueError):
        return "another process"
