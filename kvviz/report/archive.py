"""Archive: the pages of a report in one zip, to send to people who read them without a network."""

import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kvviz.report.paths import write_whole

ENDING = ".zip"
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)
"""The date of every file inside: the earliest that a zip knows, so that equal pages give equal archives."""


def check_archive(path: Path) -> None:
    """Say before any notebook runs that an archive cannot be written.

    Raises:
        ValueError: the name does not end in ``.zip``, is that of a folder, or its folder cannot be written to.
    """
    if path.suffix.lower() != ENDING:
        raise ValueError(f"{path} does not end in {ENDING}: name the archive so, as in {path.with_suffix(ENDING)}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: take it away, or name the archive otherwise")
    probe = path.with_name(f".probe.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(probe, b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror or error}): name another folder") from error


def write_archive(path: Path, folder: Path, names: Sequence[str]) -> int:
    """Pack the files ``names`` of ``folder`` into a zip and return its size in bytes.

    They lie in one folder, named like the archive, so that unpacking leaves one thing behind. The same pages give
    the same bytes, and ``path`` is never seen half-written.

    Raises:
        OSError: a page cannot be read, or the archive cannot be written.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            entry = zipfile.ZipInfo(f"{path.stem}/{name}", _FIRST_DAY)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, (folder / name).read_bytes())
    return write_whole(path, packed.getvalue())
