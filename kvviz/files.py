"""Writes files as a whole: another process sees the old file or the new file, and never a half-written file.

The data first go into a *part file* in the same folder. When the part file is complete, it gets the name of the file.
If a process is killed, its part file remains. :func:`remove_stale` removes such part files later.
"""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

STALE_SECONDS = 24 * 3600
"""Age at which a part file or a temporary folder counts as left behind, because no process of kvviz runs for a whole
day."""


def write_whole(path: Path, data: bytes) -> int:
    """Write ``data`` to the file ``path`` and return the number of bytes.

    Raises:
        OSError: the file cannot be written. If ``path`` existed before, it is unchanged.
    """
    with part_file(path) as part:
        part.write_bytes(data)
    return len(data)


@contextlib.contextmanager
def part_file(path: Path) -> Iterator[Path]:
    """Yield the path of a part file for a ``with`` statement. When the statement ends, rename the part file to
    ``path``.

    If the code in the ``with`` statement raises an error, the part file is removed. ``path`` is then unchanged.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        if path.exists():
            shutil.copymode(path, part)  # a file that only its owner may read stays so
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def remove_stale(folder: Path, pattern: str, older_than_seconds: float = STALE_SECONDS) -> None:
    """Remove the files and folders in ``folder`` that match ``pattern`` and were last changed more than
    ``older_than_seconds`` ago.

    If a file or folder cannot be removed, it stays, and no error is raised.
    """
    for left in folder.glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime <= older_than_seconds:
                continue
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
