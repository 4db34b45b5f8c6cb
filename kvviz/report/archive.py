"""Packs the pages of a report into one zip file, for readers without a network."""

import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kvviz.files import write_whole

ENDING = ".zip"
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)
"""Date of every packed file: the earliest date of the zip format. With one date, equal pages give equal archives."""


def check_archive(path: Path) -> None:
    """Check that an archive can be written to ``path``. The report calls this before the first notebook runs.

    Raises:
        ValueError: the name does not end in ``.zip``, there is a folder with this name, or the file cannot be written.
    """
    if path.suffix.lower() != ENDING:
        raise ValueError(f"the name {path} does not end in {ENDING}: try {path.with_suffix(ENDING)}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the archive another name")
    probe = path.with_name(f".probe.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(probe, b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror or error}): choose another folder") from error


def write_archive(path: Path, folder: Path, names: Sequence[str]) -> int:
    """Pack the files ``names`` of ``folder`` into a zip and return the size of the zip in bytes.

    Inside the zip, the files lie in one folder that has the name of the archive. The same pages give the same bytes.

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
