"""The model file unpacked to float32, once a machine: a second file beside it, which every process maps.

Reading and dequantising the GGUF takes seconds and 540 MB in each process. The unpacked file takes its sha256, and its
pages lie in memory once, however many processes read them. It is laid out as a safetensors file, whose metadata state
``format`` (this module's), ``source`` (the GGUF's sha256), ``sha256`` (of all of it, with zeros in this one's place)
and ``fields`` (the GGUF's, as JSON). It is believed only if all of them are right, whatever its name.
"""

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from kvviz.engine import weights

try:
    import fcntl
except ImportError:  # Windows: two first starts at once both unpack
    fcntl = None

FORMAT = "kvviz float32 1"
ALIGNMENT_BYTES = 64
_NO_SUM = "0" * 64


@dataclass(frozen=True)
class Unpacked:
    """What a GGUF holds: its ``fields`` by name, and ``tensors``, float32 arrays by name.

    Writing into an array that is mapped changes it in this process alone.
    """

    fields: dict
    tensors: dict[str, np.ndarray]


def path_beside(gguf_path: Path) -> Path:
    """Where the unpacked file lies, or would lie (538 MB)."""
    return gguf_path.with_suffix(".float32-1.safetensors")


def unpack(gguf_path: Path) -> Unpacked:
    """The model's fields and tensors, mapped from the unpacked file, which is made first if it is not there or wrong.

    Processes that start at the same time wait for the first, where the system has locks. Where the file cannot be
    written, all is unpacked in memory, and a sentence on stderr says so.

    Args:
        gguf_path: a file that :func:`kvviz.engine.weights.find` believes.
    """
    target = path_beside(gguf_path)
    found = opened(target)
    if found:
        return found
    with _alone_in(gguf_path.parent):
        return opened(target) or _made(gguf_path, target)


def _made(gguf_path: Path, target: Path) -> Unpacked:
    import gguf

    reader = gguf.GGUFReader(gguf_path)
    fields = {name: value.contents() for name, value in reader.fields.items()}
    try:
        _write(target, fields, reader.tensors)
        found, why = opened(target), "what was written is not what is read"
    except OSError as error:
        found, why = opened(target), error.strerror or str(error)
    if found:
        return found
    print(
        f"The weights could not be kept in {target} ({why}), so that this process unpacks them for itself, in 540 MB "
        "of its own: make the folder writable (600 MB) or set KVVIZ_CACHE to another.",
        file=sys.stderr,
    )
    return Unpacked(fields, {tensor.name: _float32(tensor) for tensor in reader.tensors})


def opened(target: Path) -> Unpacked | None:
    """Map an unpacked file; None if it is absent, of another format or source, cut short or changed."""
    try:
        with target.open("rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):  # ValueError: it is empty
        return None
    start = 8 + int.from_bytes(whole[:8], "little")
    try:
        header = json.loads(whole[8:start])
        about = header.pop("__metadata__")
        right = (about["format"], about["source"]) == (FORMAT, weights.MODEL.gguf_sha256)
        if not right or about["sha256"] != _sum(whole, start, about["sha256"]):
            return None
        return Unpacked(json.loads(about["fields"]), {name: _array(whole, start, at) for name, at in header.items()})
    except (ValueError, KeyError, TypeError, AttributeError):  # it is something else
        return None


def _sum(whole: mmap.mmap, start: int, stated: str) -> str:
    digest = hashlib.sha256(whole[:start].replace(stated.encode(), _NO_SUM.encode(), 1))
    with memoryview(whole) as view, view[start:] as data:
        digest.update(data)
    return digest.hexdigest()


def _array(whole: mmap.mmap, start: int, at: dict) -> np.ndarray:
    first, stop = at["data_offsets"]
    return np.frombuffer(whole, np.float32, (stop - first) // 4, start + first).reshape(at["shape"])


def _write(target: Path, fields: dict, tensors: list) -> None:
    """Write the file under a temporary name and move it, so that it has its own name only when it is whole."""
    _remove_stale(target.parent)
    head, digest = _header(fields, tensors), hashlib.sha256()
    part = target.with_name(f"unpack-{secrets.token_hex(8)}")
    try:
        with part.open("xb") as file:
            for piece in chain([head], (_float32(tensor).data for tensor in tensors)):
                file.write(piece)
                digest.update(piece)
            file.seek(0)
            file.write(head.replace(_NO_SUM.encode(), digest.hexdigest().encode(), 1))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    """Remove what processes that were killed have left, a day after."""
    for left in folder.glob("unpack-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > weights.STALE_SECONDS:
                left.unlink()


def _header(fields: dict, tensors: list) -> bytes:
    """Length and JSON, padded with blanks so that the data behind it are aligned."""
    about = {"format": FORMAT, "source": weights.MODEL.gguf_sha256, "sha256": _NO_SUM, "fields": json.dumps(fields)}
    entries, first = {"__metadata__": about}, 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        stop = first + 4 * int(tensor.n_elements)
        entries[tensor.name] = {"dtype": "F32", "shape": shape, "data_offsets": [first, stop]}
        first = stop
    said = json.dumps(entries).encode()
    said += b" " * (-(8 + len(said)) % ALIGNMENT_BYTES)
    return len(said).to_bytes(8, "little") + said


def _float32(tensor) -> np.ndarray:
    """A tensor of a GGUF, dequantised, in memory of its own."""
    import gguf

    return np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32, order="C")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process at a time, by a lock on the folder itself.

    All at once where the system or the file system has no locks, and where nothing can be written: there each unpacks
    for itself, and none has to wait.
    """
    with contextlib.ExitStack() as stack:
        if fcntl and os.access(folder, os.W_OK):
            with contextlib.suppress(OSError):
                handle = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
