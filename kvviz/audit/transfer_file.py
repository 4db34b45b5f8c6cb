"""Reads transfer files: JSON that says which bytes one process copies to another, for example::

    {"format": "kvviz-transfer", "version": 1,
     "senders": [{"holds": {"head": [[0, 8]]}, "blocks": [[0, 8]]}],
     "receivers": [{"file": "decode0.json", "holds": {"head": [[0, 4]]}, "blocks": [[100, 116, 2]]},
                   {"file": "decode1.json", "holds": {"head": [[4, 8]]}, "blocks": [7, 3, 5, 1, 0, 2, 4, 6]}],
     "pieces": [{"sender": 0, "receiver": 1, "from": "K", "to": "K",
                 "from_byte": 512, "to_byte": 0, "bytes": 512}]}

An entry of ``holds`` and ``blocks`` is an integer, ``[start, stop]`` or ``[start, stop, step]``. The fields are those
of ``kvviz.audit.rank_bytes.Rank`` and ``kvviz.audit.compare.Piece``. A rank without ``file`` has the views of the
file that the command names.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvviz.audit import views_file
from kvviz.audit.compare import Piece, Transfer
from kvviz.audit.rank_bytes import Rank
from kvviz.audit.view import View
from kvviz.audit.views_schema import MAX_FILE_BYTES

FORMAT, VERSION = "kvviz-transfer", 1

MAX_HELD = 1 << 20
"""A rank may hold at most this many numbers along one axis."""


def read_transfer(
    path: str | os.PathLike, sender: Sequence[View], receiver: Sequence[View]
) -> tuple[Transfer, tuple[Path, ...]]:
    """Read a transfer file. Return the transfer, and the paths of the views files that it names.

    Args:
        sender, receiver: the views of ranks without ``file``.

    Raises:
        ValueError: the file breaks the format.
        OSError: a file cannot be opened.
    """
    views_file.check_regular(Path(path))
    with Path(path).open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes; a transfer file must be smaller")
    try:
        given = json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    _check(given, "the transfer file", {"format", "version", "senders", "receivers", "pieces"})
    if given.get("format") != FORMAT or type(given.get("version")) is not int or given["version"] != VERSION:
        raise ValueError(f"{path} must have the format {FORMAT!r} and the version {VERSION}")
    sides, files = [], []
    for name, views in (("senders", sender), ("receivers", receiver)):
        records = _list(given.get(name), name)
        sides.append(tuple(_rank(one, f"{name}[{n}]", Path(path).parent, views) for n, one in enumerate(records)))
        files += [Path(path).parent / one["file"] for one in records if "file" in one]
    pieces = tuple(_piece(one, f"pieces[{n}]") for n, one in enumerate(_list(given.get("pieces"), "pieces")))
    return Transfer(*sides, pieces), tuple(files)


def _object(pairs: list[tuple[str, object]]) -> dict:
    """Return a JSON object as a dict. Refuse a field that is given twice: Python would keep the last value."""
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"the field {twice!r} is given twice")
    return dict(pairs)


def _check(record: object, where: str, known: set[str]) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be an object, not {record!r}")
    if unknown := sorted(set(record) - known):
        raise ValueError(f"{where} has the unknown field {unknown[0]!r}; the fields are {', '.join(sorted(known))}")


def _list(value: object, where: str) -> list:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, not {value!r}")
    return value


def _number(value: object, where: str) -> int:
    if type(value) is not int or abs(value) >= 1 << 48:
        raise ValueError(f"{where} must be an integer between -2**48 and 2**48, not {value!r}")
    return value


def _ranges(value: object, where: str) -> tuple[range, ...]:
    found = []
    for one in _list(value, where):
        numbers = [_number(n, where) for n in one] if isinstance(one, list) else [_number(one, where)]
        if isinstance(one, list) and (len(numbers) not in (2, 3) or (len(numbers) == 3 and numbers[2] == 0)):
            raise ValueError(f"{where} must have integers, [start, stop] or [start, stop, step], not {one!r}")
        found.append(range(*numbers) if isinstance(one, list) else range(numbers[0], numbers[0] + 1))
    return tuple(found)


def _rank(record: object, where: str, folder: Path, views: Sequence[View]) -> Rank:
    _check(record, where, {"file", "holds", "blocks", "world", "place", "interleave"})
    record = dict(record)
    if not isinstance(record.get("file", ""), str):
        raise ValueError(f"{where}.file must be the path of a views file, not {record['file']!r}")
    found = views_file.read(folder / record.pop("file")).views if "file" in record else tuple(views)
    given = record.pop("holds", {})
    _check(given, f"{where}.holds", set(given) if isinstance(given, dict) else set())
    holds = {}
    for axis, numbers in given.items():
        ranges = _ranges(numbers, f"{where}.holds.{axis}")
        if sum(map(len, ranges)) > MAX_HELD or any(r and min(r[0], r[-1]) < 0 for r in ranges):
            raise ValueError(f"{where}.holds.{axis} must have at most {MAX_HELD} numbers, each of at least 0")
        holds[axis] = tuple(n for r in ranges for n in r)
    blocks = _ranges(record.pop("blocks"), f"{where}.blocks") if "blocks" in record else None
    rest = {name: _number(value, f"{where}.{name}") for name, value in record.items()}
    return Rank(found, holds, blocks, **rest)


def _piece(record: object, where: str) -> Piece:
    names = {"from": "source", "to": "target", "bytes": "nbytes"}
    _check(record, where, {"sender", "receiver", "from_byte", "to_byte", "from_block", "to_block", *names})
    if missing := sorted({"sender", "receiver", "from", "to"} - set(record)):
        raise ValueError(f"{where} has no field {missing[0]!r}; add it")
    for name in ("from", "to"):
        if not isinstance(record[name], str):
            raise ValueError(f"{where}.{name} must be the name of a view, not {record[name]!r}")
    return Piece(**{
        names.get(name, name): value if name in ("from", "to") else _number(value, f"{where}.{name}")
        for name, value in record.items()
    })  # fmt: skip
