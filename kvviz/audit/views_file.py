"""Reads and writes views files: the views and claims of one process as JSON, for an audit in another process.

Example::

    {"format": "kvviz-views", "version": 1,
     "storages": [{"name": "cache", "nbytes": 4096}],
     "views": [{"name": "K data", "storage": "cache", "dtype": "uint8", "shape": [4, 64], "stride": [1024, 1]},
               {"name": "K scale", "storage": "cache", "dtype": "float32", "shape": [4], "stride": [256],
                "offset": 16, "axes": ["block"], "role": "scale"}],
     "claims": [{"kind": "disjoint", "views": ["K data", "K scale"]}]}

``views_file.schema.json`` in this folder is the JSON Schema of the format: every field, its type and its limits. This
module checks files with this schema. The ``kind`` of a claim stands for a class of ``kvviz.audit.claims``. Example:
``belongs_at`` stands for ``BelongsAt``.

A file holds geometry only, and no data of any tensor. Reading a file needs neither torch nor a GPU.
"""

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from kvviz.audit.audit import audit_views
from kvviz.audit.causes import Diagnosis
from kvviz.audit.claims import BelongsAt, Claim
from kvviz.audit.findings import Audit, Finding
from kvviz.audit.packed import PACKED, elements_of, values_of
from kvviz.audit.view import Storage, View
from kvviz.audit.views_schema import MAX_FILE_BYTES, SCHEMA, ViewsFileError, parsed, shown

FORMAT, VERSION = (SCHEMA["properties"][name]["const"] for name in ("format", "version"))
FINDINGS_FORMAT, FINDINGS_VERSION = "kvviz-findings", 2

MAX_VIEWS, MAX_CLAIMS = (SCHEMA["properties"][name]["maxItems"] for name in ("views", "claims"))

DTYPES = {
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "qint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes per element, by the name that torch or numpy gives the type. :data:`~kvviz.audit.packed.PACKED` has more names.
"""

CLAIMS: dict[str, type] = {re.sub(r"(?<!^)(?=[A-Z])", "_", claim.__name__).lower(): claim for claim in get_args(Claim)}
"""The class of each kind of claim. Example: ``belongs_at`` stands for ``BelongsAt``."""

KEPT_WORDS = frozenset(("k", "v", "kv", "key", "value", "data", "scale", "scales", "cache", "half", "(rightful)"))
"""Words at the end of a view's name that :func:`anonymous` keeps. They say nothing about the owner of the file."""


@dataclass(frozen=True)
class ViewsFile:
    """The content of a views file: storages, views in these storages, and claims that name the views."""

    storages: tuple[Storage, ...]
    views: tuple[View, ...]
    claims: tuple[Claim, ...] = ()

    @classmethod
    def of(cls, views: Sequence[View], claims: Sequence[Claim] = ()) -> "ViewsFile":
        """Return a views file of views and claims.

        A claim in a file can only name views. So if a claim has a View that is not among ``views``, this View is added.
        """
        found, named = list(views), []
        for claim in claims:
            if isinstance(claim, BelongsAt) and isinstance(claim.rightful, View):
                rightful = claim.rightful
                if rightful not in found:
                    rightful = replace(rightful, name=f"{rightful.name} (rightful)")
                found += [rightful] if rightful not in found else []
                claim = replace(claim, rightful=rightful.name)
            named.append(claim)
        return cls(tuple(dict.fromkeys(view.storage for view in found)), tuple(found), tuple(named))

    def audit(self) -> Audit:
        """Return the audit of the file. If the file has no claims, a note says what was not checked.

        Raises:
            ValueError: a claim does not fit its views, or too many elements overlap.
        """
        try:
            result = audit_views(self.views, self.claims)
        except (MemoryError, OverflowError) as error:
            raise ValueError("the geometry is too large for an audit: too many elements overlap") from error
        if self.claims:
            return result
        note = "the file has no claims: each view was checked against its storage and itself, not against other views"
        return replace(result, notes=(*result.notes, note))


def read(path: str | os.PathLike) -> ViewsFile:
    """Read a views file.

    Raises:
        ViewsFileError: the file has more than :data:`MAX_FILE_BYTES` bytes, or breaks the format.
        OSError: the file cannot be opened, or the path is a folder or a named pipe. A named pipe could wait forever.
    """
    check_regular(Path(path))
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(MAX_FILE_BYTES + 1) if size <= MAX_FILE_BYTES else b""
    if max(size, len(data)) > MAX_FILE_BYTES:
        raise ViewsFileError(
            f"the file was not read: it is larger than {MAX_FILE_BYTES} bytes, the limit of a views file"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ViewsFileError(f"the file is not UTF-8 text: see byte {error.start}") from None
    del data  # so that bytes and text of a large file do not both stay in memory
    return load(text)


def check_regular(path: Path) -> None:
    """Raise an OSError if a path is a folder or a named pipe. ``/dev/stdin`` and ``/dev/fd/63`` may be pipes."""
    mode = path.stat().st_mode if path.exists() else stat.S_IFREG  # if there is no file, the caller's open() raises
    if stat.S_ISDIR(mode):
        raise OSError(f"{path} is a folder: give the path of a views file")
    opened = path.parent == Path("/dev/fd") or path in (Path("/dev/stdin"), Path("/proc/self/fd/0"))
    if (stat.S_ISFIFO(mode) and not opened) or stat.S_ISSOCK(mode):
        raise OSError(f"{path} is not a regular file: give the path of a views file")


def load(text: str) -> ViewsFile:
    """Parse the text of a views file.

    Raises:
        ViewsFileError: the text breaks the format.
    """
    given = parsed(text)
    storages = [_storage(record, f"storages[{number}]") for number, record in enumerate(given["storages"])]
    storage_named = _by_name(storages, "storages")
    views = [_view(record, f"views[{number}]", storage_named) for number, record in enumerate(given["views"])]
    names = _by_name(views, "views")
    claims = []
    for number, record in enumerate(given.get("claims", [])):
        claim = CLAIMS[record["kind"]](**{field: value for field, value in record.items() if field != "kind"})
        for field, named in _named_views(claim).items():
            if unknown := [name for name in named if name not in names]:
                raise ViewsFileError(f"claims[{number}].{field}: no view is named {shown(unknown[0])}")
        claims.append(claim)
    return ViewsFile(tuple(storages), tuple(views), tuple(claims))


def _storage(record: dict, path: str) -> Storage:
    """Return the storage of a record. Check the address and the modulus, because the schema cannot check them."""
    try:
        return Storage(**record)
    except ValueError as error:
        reason = str(error).removeprefix(f"storage {record['name']}: ")
        raise ViewsFileError(f"{path}: {reason}") from None


def _view(record: dict, path: str, storages: Mapping[str, Storage]) -> View:
    """Return the view of a record. Check what the schema cannot check, for example the length of the stride."""
    if record["storage"] not in storages:
        raise ViewsFileError(f"{path}.storage: no storage is named {shown(record['storage'])}")
    axes = len(record["shape"])
    for field in ("stride", "axes"):
        length = len(record.get(field, ()))
        if length != axes and (length or field == "stride"):
            raise ViewsFileError(f"{path}.{field}: must have {axes} entries like the shape, not {length}")
    arguments = {field: value for field, value in record.items() if field != "dtype"}
    arguments["storage"], dtype = storages[record["storage"]], record["dtype"]
    itemsize, values = (
        PACKED.get(dtype) or (DTYPES[dtype], 1)
        if isinstance(dtype, str)
        else (dtype["itemsize"], dtype.get("values", 1))
    )
    if values > 1:
        numbers = (tuple(record["shape"]), tuple(record["stride"]), record.get("offset", 0))
        try:
            shape, stride, offset = elements_of(numbers, values)
        except ValueError as error:
            raise ViewsFileError(f"{path}: {error}") from None
        arguments |= {"shape": shape, "stride": stride, "offset": offset}
    try:
        return View(**arguments, itemsize=itemsize, values=values)
    except ValueError:
        raise ViewsFileError(f"{path}: shape, stride and offset reach beyond 2**62 bytes") from None


def _by_name(found: Sequence[Any], path: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for number, item in enumerate(found):
        if item.name in named:
            raise ViewsFileError(f"{path}[{number}].name: {shown(item.name)} is given twice; names must differ")
        named[item.name] = item
    return named


_KIND_OF = {claim: kind for kind, claim in CLAIMS.items()}


def _named_views(claim: Claim) -> dict[str, tuple[str, ...]]:
    """Return ``{field: names of views}`` for each field of a claim that holds names of views."""
    rules = SCHEMA["$defs"][_KIND_OF[type(claim)]]["properties"]
    found = {}
    for field, rule in rules.items():
        if "view_name" in rule.get("$ref", "") and (value := getattr(claim, field)):
            found[field] = (value,) if isinstance(value, str) else value
    return found


def dump(file: ViewsFile) -> str:
    """Return the text of a views file, with one entry per line. The same file gives the same text.

    To add claims to a file: ``dump(replace(file, claims=(*file.claims, ...)))`` with ``file = read(path)``.
    """
    lists = {
        "storages": [_storage_record(storage) for storage in file.storages],
        "views": [_view_record(view) for view in file.views],
        "claims": [_claim_record(claim) for claim in file.claims],
    }
    head = f'{{"format": "{FORMAT}", "version": {VERSION}'
    parts = [f'"{name}": [{_lines(entries)}]' for name, entries in lists.items()]
    return ",\n".join([head, *parts]) + "}\n"


def _lines(entries: Sequence[dict | str]) -> str:
    return ",".join("\n  " + json.dumps(entry) for entry in entries)


def _storage_record(storage: Storage) -> dict:
    """Return the record of a storage. The address is left out if it is not known."""
    record = asdict(storage)
    known = record if storage.address is not None else ("name", "nbytes")
    return {field: record[field] for field in known}


def _view_record(view: View) -> dict:
    """Return the record of a view. Optional fields are left out if they are empty or false."""
    record = {"name": view.name, "storage": view.storage.name, "dtype": {"itemsize": view.itemsize}}
    numbers = values_of((view.shape, view.stride, view.offset), view.values) if view.values > 1 else None
    if numbers:
        record["dtype"]["values"] = view.values
        record |= dict(zip(("shape", "stride", "offset"), numbers, strict=True))
    for field in SCHEMA["$defs"]["view"]["properties"]:
        if field not in record:
            record[field] = getattr(view, field)
    required = SCHEMA["$defs"]["view"]["required"]
    return {
        field: value
        for field, value in record.items()
        if field in required or (value not in ("", ()) and value is not False)
    }


def _claim_record(claim: Claim) -> dict:
    if isinstance(claim, BelongsAt) and isinstance(claim.rightful, View):
        raise ValueError(
            f"the claim about {claim.view} has a View as its rightful place, but a file needs the name of a view: make "
            f"the file with ViewsFile.of(views, claims)"
        )
    return {"kind": _KIND_OF[type(claim)]} | asdict(claim)


def anonymous(file: ViewsFile) -> ViewsFile:
    """Replace all names in a file, so that the names say nothing about the owner of the file.

    If the last words of a view's name are in :data:`KEPT_WORDS`, they stay, for example ``K scale``. The words before
    them count as the name of a layer. They become ``layer 0``, ``layer 1`` and so on, in order of appearance. Storages
    become ``storage 0``, ``storage 1`` and so on. The name of a claim "maps" becomes ``ids`` and a number. Roles and
    axes stay.
    """
    layers: dict[str, int] = {}
    renamed = {view.name: _layer_name(view.name, layers) for view in file.views}
    storages = {storage: replace(storage, name=f"storage {n}") for n, storage in enumerate(file.storages)}
    views = tuple(
        View(
            renamed[view.name], storages[view.storage], view.shape, view.stride, view.offset, view.itemsize, view.axes,
            view.role, view.values, view.read_only,
        )  # not replace(): a field that is added later could hold a name
        for view in file.views
    )  # fmt: skip
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
    changes: dict[str, Any] = {"name": f"ids {number}"} if hasattr(claim, "name") else {}
    for field, names in _named_views(claim).items():
        new = tuple(renamed[name] for name in names)
        changes[field] = new if isinstance(getattr(claim, field), tuple) else new[0]
    return replace(claim, **changes)


def findings_json(result: Audit, diagnoses: Sequence[Diagnosis] = (), empty: bool = False) -> str:
    """Return an audit as JSON. The fields have the names of the attributes of ``Finding`` and ``Diagnosis``.

    In a diagnosis, ``findings`` holds positions in the list of all findings, counted from 0. ``repaired`` holds views
    and their storages, in the form of a views file.

    Args:
        empty: True if the file has no views. Then ``clean`` is false, because nothing was audited.
    """
    positions = {finding: number for number, finding in enumerate(result.findings)}
    head = {"format": FINDINGS_FORMAT, "version": FINDINGS_VERSION, "clean": result.clean and not empty, "empty": empty}
    head["all_judged"] = not result.not_judged
    made = {"diagnoses": [_diagnosis_record(one, positions) for one in diagnoses]}
    found = {"findings": list(map(asdict, result.findings)), "checked": result.checked, "notes": result.notes}
    lists = [f"{json.dumps(name)}: [{_lines(entries)}]" for name, entries in (made | found).items()]
    return json.dumps(head)[:-1] + ",\n" + ",\n".join(lists) + "}\n"


def _diagnosis_record(one: Diagnosis, positions: Mapping[Finding, int]) -> dict:
    storages = dict.fromkeys(view.storage for view in one.repaired)
    repaired = {"storages": list(map(_storage_record, storages)), "views": list(map(_view_record, one.repaired))}
    return {
        "cause": one.cause, "text": one.text, "effect": one.effect, "views": one.views,
        "findings": [positions[finding] for finding in one.findings],
        "repair": one.repair, "repaired": repaired, "proved": one.proved, "others": one.others,
    }  # fmt: skip
