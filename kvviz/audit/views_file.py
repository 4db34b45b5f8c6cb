"""The views file: views and claims as JSON, so that a process with a sick cache writes it and anybody judges it.

Version 1, in full; whatever is not named here is refused, with the path of what is wrong (``views[3].stride``)::

    format    "kvviz-views"
    version   1
    storages  list of {name: text, nbytes: bytes of the allocation}
    views     list of {name: text, no two alike
                       storage: name of a storage
                       dtype: a torch or numpy name ("float32", "float8_e4m3fn"), or {"itemsize": bytes}
                       shape, stride: a list of integers each, strides in elements
                       offset: elements from the storage's start to element (0, ..., 0); default 0
                       axes: a name an axis, for example ["block", "token", "head"]; default none
                       role: "data", "scale" or any other word; default "data"}
    claims    list of {kind: a class of kvviz.audit.claims in small letters, for example "belongs_at"
                       and the fields of that class; views are given by name}; default none

To claim more of a file: ``dump(replace(file, claims=(*file.claims, ...)))`` with ``file = read(path)``.
Geometry only: no tensor's content is in it. Reading one needs neither torch nor a GPU.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kvviz.audit.audit import audit_views
from kvviz.audit.claims import BelongsAt, Claim
from kvviz.audit.findings import Audit
from kvviz.audit.view import MAX_ADDRESS, Storage, View

FORMAT, VERSION = "kvviz-views", 1
FINDINGS_FORMAT, FINDINGS_VERSION = "kvviz-findings", 2

MAX_FILE_BYTES = 16 << 20
MAX_VALUES = 500_000
"""Most commas, colons and brackets that are parsed; what a file means is far smaller than what it may unfold to."""

MAX_VIEWS = MAX_CLAIMS = 5_000
MAX_DIMS, MAX_NAME, MAX_ITEMSIZE = 16, 200, 1 << 20
MAX_DIGITS, SHOWN = 100, 48
"""Digits of a number that is parsed at all, and characters of a wrong value that an error repeats."""

DTYPES = {
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "float4_e2m1fn_x2"), 1),
    **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)},
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "qint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element by the name that torch or numpy gives the type."""

CLAIMS: dict[str, type] = {re.sub(r"(?<!^)(?=[A-Z])", "_", claim.__name__).lower(): claim for claim in get_args(Claim)}
"""The classes of claims by the kind that a file calls them."""

FREE_WORDS = ("name", "address_type")
"""Fields of claims that are text and no view's name."""

KEPT_WORDS = frozenset(("k", "v", "kv", "key", "value", "data", "scale", "scales", "cache", "half", "(rightful)"))
"""Last words of a name that say what a view is, and not whose."""


class ViewsFileError(ValueError):
    """What makes a views file unusable, in one sentence that begins with where: ``views[3].stride``."""


@dataclass(frozen=True)
class ViewsFile:
    """What a views file says: storages, views over them, and what is claimed of the views, by name."""

    storages: tuple[Storage, ...]
    views: tuple[View, ...]
    claims: tuple[Claim, ...] = ()

    @classmethod
    def of(cls, views: Sequence[View], claims: Sequence[Claim] = ()) -> "ViewsFile":
        """Views and claims made ready for a file: a rightful map that no view's name stands for becomes a view."""
        found, named = list(views), []
        for claim in claims:
            if isinstance(claim, BelongsAt) and isinstance(claim.rightful, View):
                home = claim.rightful
                home = home if home in found else replace(home, name=f"{home.name} (rightful)")
                found += [home] if home not in found else []
                claim = replace(claim, rightful=home.name)
            named.append(claim)
        return cls(tuple(dict.fromkeys(view.storage for view in found)), tuple(found), tuple(named))

    def audit(self) -> Audit:
        """The audit of the file; where it claims nothing, a note says how little was checked.

        Raises:
            ValueError: a claim does not fit its views, or the geometry is too much work.
        """
        try:
            result = audit_views(self.views, self.claims)
        except (MemoryError, OverflowError) as error:
            raise ValueError("the geometry is too large to be judged: too many elements meet each other") from error
        if self.claims:
            return result
        note = "the file claims nothing, so views were checked against their storages only, and not against each other"
        return replace(result, notes=(*result.notes, note))


def read(path: str | os.PathLike) -> ViewsFile:
    """Read a views file.

    Raises:
        ViewsFileError: larger than :data:`MAX_FILE_BYTES` (it is not read then), or not what the format says.
        OSError: it cannot be opened.
    """
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(MAX_FILE_BYTES + 1) if size <= MAX_FILE_BYTES else b""
    if max(size, len(data)) > MAX_FILE_BYTES:
        raise ViewsFileError(f"a views file has at most {MAX_FILE_BYTES} bytes, and this one has more: it was not read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ViewsFileError(f"a views file is UTF-8 text, and byte {error.start} of this one is not") from None
    del data
    return load(text)


def load(text: str) -> ViewsFile:
    """The views file that a text holds.

    Raises:
        ViewsFileError: not what the format says; the sentence begins with the path of what is wrong.
    """
    top = _record(_parsed(text), "", ("format", "version", "storages", "views"), ("claims",))
    if top["format"] != FORMAT:
        raise ViewsFileError(f"format: must be {FORMAT!r}, not {_shown(top['format'])}")
    if type(top["version"]) is not int or top["version"] != VERSION:
        raise ViewsFileError(f"version: this kvviz reads version {VERSION}, not {_shown(top['version'])}")
    storages = [_storage(item, path) for item, path in _items(top["storages"], "storages", MAX_VIEWS)]
    by_name = _distinct(storages, "storages")
    views = [_view(item, path, by_name) for item, path in _items(top["views"], "views", MAX_VIEWS)]
    names = _distinct(views, "views")
    claims = [_claim(item, path, names) for item, path in _items(top.get("claims", []), "claims", MAX_CLAIMS)]
    return ViewsFile(tuple(storages), tuple(views), tuple(claims))


@dataclass(frozen=True)
class _Twice:
    """Stands for an object that gives one field twice."""

    field: str


def _object(pairs: list[tuple[str, Any]]) -> dict | _Twice:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    names = [name for name, _ in pairs]
    return _Twice(next(name for number, name in enumerate(names) if name in names[:number]))


def _parsed(text: str) -> Any:
    if len(text) > MAX_FILE_BYTES:
        raise ViewsFileError(f"a views file has at most {MAX_FILE_BYTES} bytes, and this text has {len(text)}")
    if sum(map(text.count, ",:[{")) > MAX_VALUES:
        raise ViewsFileError(f"a views file has at most {MAX_VALUES} values, and this text has more: it was not parsed")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_parsed_int)
    except json.JSONDecodeError as error:
        raise ViewsFileError(f"not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ViewsFileError("not a views file: its lists and objects are nested too deeply") from None


def _parsed_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ViewsFileError(f"not a views file: it holds a number of {len(digits)} digits")
    return int(digits)


def _shown(value: Any) -> str:
    """A value in an error: short, and without anything that a terminal would obey."""
    if isinstance(value, list | dict | _Twice):
        return "a list" if isinstance(value, list) else "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = ascii(value[:SHOWN]) if isinstance(value, str) else str(value)
    cut = len(value) > SHOWN if isinstance(value, str) else len(text) > SHOWN
    return f"{text[:SHOWN]}... ({len(value) if isinstance(value, str) else len(text)} characters)" if cut else text


def _record(value: Any, path: str, needed: Sequence[str], optional: Sequence[str]) -> dict:
    where = path or "the file"
    if isinstance(value, _Twice):
        raise ViewsFileError(f"{where}: the field {_shown(value.field)} is given twice")
    if not isinstance(value, dict):
        raise ViewsFileError(f"{where}: must be an object, not {_shown(value)}")
    known = f"known are {', '.join((*needed, *optional))}"
    for name in value:
        if name not in needed and name not in optional:
            raise ViewsFileError(f"{where}: has no field {_shown(name)}; {known}")
    for name in needed:
        if name not in value:
            raise ViewsFileError(f"{where}: the field {name!r} is missing; {known}")
    return value


def _items(value: Any, path: str, most: int) -> list[tuple[Any, str]]:
    if not isinstance(value, list):
        raise ViewsFileError(f"{path}: must be a list, not {_shown(value)}")
    if len(value) > most:
        raise ViewsFileError(f"{path}: {len(value)} entries are more than the {most} that a file may have")
    return [(item, f"{path}[{number}]") for number, item in enumerate(value)]


def _integer(value: Any, path: str, least: int = 1 - MAX_ADDRESS, most: int = MAX_ADDRESS - 1) -> int:
    if type(value) is not int:
        raise ViewsFileError(f"{path}: must be an integer, not {_shown(value)}")
    if not least <= value <= most:
        limit = f"at least {least}" if value < least else f"at most {most}"
        raise ViewsFileError(f"{path}: must be {limit}, not {_shown(value)}")
    return value


def _integers(value: Any, path: str, least: int = 1 - MAX_ADDRESS) -> tuple[int, ...]:
    return tuple(_integer(item, where, least) for item, where in _items(value, path, MAX_DIMS))


def _name(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise ViewsFileError(f"{path}: must be text, not {_shown(value)}")
    if not value or len(value) > MAX_NAME:
        raise ViewsFileError(f"{path}: must have 1 to {MAX_NAME} characters, not {_shown(value)}")
    if not value.isprintable():
        raise ViewsFileError(f"{path}: must have printable characters only, not {_shown(value)}")
    return value


def _flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise ViewsFileError(f"{path}: must be true or false, not {_shown(value)}")
    return value


def _itemsize(value: Any, path: str) -> int:
    if not isinstance(value, str):
        return _integer(_record(value, path, ("itemsize",), ())["itemsize"], f"{path}.itemsize", 1, MAX_ITEMSIZE)
    if value not in DTYPES:
        raise ViewsFileError(f'{path}: {_shown(value)} is no type known here; give {{"itemsize": bytes}} instead')
    return DTYPES[value]


def _storage(value: Any, path: str) -> Storage:
    given = _record(value, path, ("name", "nbytes"), ())
    return Storage(_name(given["name"], f"{path}.name"), _integer(given["nbytes"], f"{path}.nbytes", 0))


def _view(value: Any, path: str, storages: Mapping[str, Storage]) -> View:
    given = _record(value, path, ("name", "storage", "dtype", "shape", "stride"), ("offset", "axes", "role"))
    name, home = _name(given["name"], f"{path}.name"), _name(given["storage"], f"{path}.storage")
    if home not in storages:
        raise ViewsFileError(f"{path}.storage: no storage is named {_shown(home)}")
    shape, stride = _integers(given["shape"], f"{path}.shape", 0), _integers(given["stride"], f"{path}.stride")
    if len(stride) != len(shape):
        raise ViewsFileError(f"{path}.stride: has {len(stride)} entries and the shape {len(shape)}")
    axes = tuple(_name(item, where) for item, where in _items(given.get("axes", []), f"{path}.axes", MAX_DIMS))
    if axes and len(axes) != len(shape):
        raise ViewsFileError(f"{path}.axes: has {len(axes)} entries and the shape {len(shape)}")
    offset = _integer(given.get("offset", 0), f"{path}.offset")
    itemsize = _itemsize(given["dtype"], f"{path}.dtype")
    role = _name(given.get("role", "data"), f"{path}.role")
    try:
        return View(name, storages[home], shape, stride, offset, itemsize, axes, role)
    except ValueError:
        raise ViewsFileError(f"{path}: shape, stride and offset reach beyond 2**62 bytes") from None


def _distinct(found: Sequence[Any], path: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for number, item in enumerate(found):
        if item.name in named:
            raise ViewsFileError(f"{path}[{number}].name: {_shown(item.name)} is given before; names must differ")
        named[item.name] = item
    return named


def _names(value: Any, path: str) -> tuple[str, ...]:
    return tuple(_name(item, where) for item, where in _items(value, path, MAX_VIEWS))


_READERS = {
    str: _name,
    View | str: _name,
    tuple[str, ...]: _names,
    int: _integer,
    int | None: lambda value, path: None if value is None else _integer(value, path),
    bool: _flag,
}


def _claim(value: Any, path: str, views: Mapping[str, View]) -> Claim:
    kind = value.get("kind") if isinstance(value, dict) else None
    if isinstance(value, dict) and (not isinstance(kind, str) or kind not in CLAIMS):
        said = _shown(kind) if "kind" in value else "nothing"
        raise ViewsFileError(f"{path}.kind: must be one of {', '.join(CLAIMS)}, not {said}")
    parts = fields(CLAIMS[kind]) if kind else ()
    needed = [part.name for part in parts if part.default is MISSING]
    optional = [part.name for part in parts if part.default is not MISSING]
    given = _record(value, path, ("kind", *needed), optional)
    types = get_type_hints(CLAIMS[kind])
    read = {}
    for name in given.keys() - {"kind"}:
        where = f"{path}.{name}"
        blank = name in optional and given[name] == ""
        read[name] = "" if blank and types[name] is str else _READERS[types[name]](given[name], where)
        strangers = [given_name for given_name in _view_names(name, read[name]) if given_name not in views]
        if strangers:
            raise ViewsFileError(f"{where}: no view is named {_shown(strangers[0])}")
    return CLAIMS[kind](**read)


def _view_names(field: str, value: Any) -> tuple[str, ...]:
    """The views that a claim's field names."""
    if field in FREE_WORDS or not isinstance(value, str | tuple) or value == "":
        return ()
    return (value,) if isinstance(value, str) else value


def dump(file: ViewsFile) -> str:
    """The text of a views file, an entry a line; the same file gives the same text."""
    lists = {
        "storages": [asdict(storage) for storage in file.storages],
        "views": [_view_record(view) for view in file.views],
        "claims": [_claim_record(claim) for claim in file.claims],
    }
    head = f'{{"format": "{FORMAT}", "version": {VERSION}'
    parts = [f'"{name}": [{_lines(entries)}]' for name, entries in lists.items()]
    return ",\n".join([head, *parts]) + "}\n"


def _lines(entries: Sequence[dict]) -> str:
    return ",".join("\n  " + json.dumps(entry, default=int) for entry in entries)


def _view_record(view: View) -> dict:
    record = {"name": view.name, "storage": view.storage.name, "dtype": {"itemsize": view.itemsize}}
    record |= {"shape": view.shape, "stride": view.stride, "offset": view.offset}
    return record | ({"axes": view.axes} if view.axes else {}) | {"role": view.role}


def _claim_record(claim: Claim) -> dict:
    kind = next(kind for kind, cls in CLAIMS.items() if cls is type(claim))
    if isinstance(claim, BelongsAt) and isinstance(claim.rightful, View):
        raise ValueError(f"a file names the rightful map of {claim.view}: make it with ViewsFile.of(views, claims)")
    return {"kind": kind} | asdict(claim)


def anonymous(file: ViewsFile) -> ViewsFile:
    """The same file without anybody's names.

    A view's last words that say what it is (``K scale``, ``data``; see :data:`KEPT_WORDS`) stay. What stands before
    them is taken for the layer's name and becomes ``layer 0``, ``layer 1``, ... in order of appearance. Storages
    become ``storage 0`` ... and id spaces ``ids 0`` ...; roles and axes stay as they are. Claims follow.
    """
    layers: dict[str, int] = {}
    renamed = {view.name: _layer_name(view.name, layers) for view in file.views}
    storages = {storage: Storage(f"storage {n}", storage.nbytes) for n, storage in enumerate(file.storages)}
    views = tuple(replace(view, name=renamed[view.name], storage=storages[view.storage]) for view in file.views)
    claims = tuple(_renamed(claim, number, renamed) for number, claim in enumerate(file.claims))
    return ViewsFile(tuple(storages.values()), views, claims)


def _layer_name(name: str, layers: dict[str, int]) -> str:
    words = name.split(" ")
    kept = len(words)
    while kept and words[kept - 1].lower() in KEPT_WORDS:
        kept -= 1
    number = layers.setdefault(" ".join(words[:kept]), len(layers))
    return " ".join([f"layer {number}", *words[kept:]])


def _renamed(claim: Claim, number: int, renamed: Mapping[str, str]) -> Claim:
    changes: dict[str, Any] = {}
    for part in fields(claim):
        value = getattr(claim, part.name)
        names = tuple(renamed[name] for name in _view_names(part.name, value))
        if names:
            changes[part.name] = names if isinstance(value, tuple) else names[0]
    if hasattr(claim, "name"):
        changes["name"] = f"ids {number}"
    return replace(claim, **changes)


def findings_json(result: Audit) -> str:
    """An audit as JSON, versioned: the fields of :class:`~kvviz.audit.findings.Finding` by their own names."""
    head = {"format": FINDINGS_FORMAT, "version": FINDINGS_VERSION, "clean": result.clean}
    return json.dumps(head | asdict(result), indent=1, default=int) + "\n"
