"""Parses the JSON of a views file, and checks it against ``views_file.schema.json``.

A schema library would add dependencies. Also, it would not report a field that is given twice, would not limit the work
of parsing, and would not write one plain sentence about the wrong value.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

SCHEMA: dict = json.loads(files("kvviz.audit").joinpath("views_file.schema.json").read_text(encoding="utf-8"))
"""The JSON Schema of a views file."""

MAX_FILE_BYTES = 16 << 20
"""Largest size of a views file in bytes."""

MAX_VALUES = 500_000
"""Largest number of commas, colons and brackets. An empty list takes 3 bytes of a file, but 64 bytes of memory."""

MAX_DIGITS = 100
"""Largest number of digits of a number. With twice the digits, parsing a number takes four times as long."""

MAX_SHOWN = 48
"""An error message repeats at most this many characters of a wrong value."""


class ViewsFileError(ValueError):
    """A views file cannot be used. The message begins with the place in the file, for example ``views[3].stride: ``."""


def parsed(text: str) -> dict:
    """Return the JSON object of a views file, checked against the schema.

    Raises:
        ViewsFileError: the text is not JSON, breaks the schema, or could take much memory or time to parse.
    """
    if len(text) > MAX_FILE_BYTES:
        raise ViewsFileError(f"the text has {len(text)} characters, but a views file has at most {MAX_FILE_BYTES}")
    if sum(map(text.count, ",:[{")) > MAX_VALUES:
        raise ViewsFileError(f"the text has more than {MAX_VALUES} values, the limit of a views file: not parsed")
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_int=_parsed_int)
    except json.JSONDecodeError as error:
        raise ViewsFileError(f"not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ViewsFileError("not a views file: its lists and objects are nested too deeply") from None
    _check(found, SCHEMA, "")
    return found


@dataclass(frozen=True)
class _Twice:
    """Stands for a JSON object in which ``field`` is given twice. Python's parser would keep the last value only."""

    field: str


def _object(pairs: list[tuple[str, Any]]) -> dict | _Twice:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            return _Twice(name)
        found[name] = value
    return found


def _parsed_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ViewsFileError(f"not a views file: it holds a number of {len(digits)} digits")
    return int(digits)


def shown(value: Any) -> str:
    """Return a value as short text for an error message. Control characters are replaced, to protect the terminal."""
    if isinstance(value, list | dict | _Twice):
        return "a list" if isinstance(value, list) else "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    length = len(value) if isinstance(value, str) else len(str(value))
    text = ascii(value[:MAX_SHOWN]) if isinstance(value, str) else str(value)[:MAX_SHOWN]
    return f"{text[:MAX_SHOWN]}... ({length} characters)" if length > MAX_SHOWN else text


_TYPES = {
    "object": (dict, "an object"),
    "array": (list, "a list"),
    "string": (str, "text"),
    "integer": (int, "an integer"),
    "boolean": (bool, "true or false"),
    "null": (type(None), "null"),
}
"""The Python type of each type of the schema, and its name in an error message."""


def _check(value: Any, rule: dict, path: str) -> None:
    """Raise a ViewsFileError if a value breaks a rule of the schema. Only rules that the schema uses are supported.

    Args:
        path: the place of the value, for example ``views[3].stride``. It is empty for the whole file.
    """
    if isinstance(value, _Twice):
        raise ViewsFileError(f"{path or 'the file'}: the field {shown(value.field)} is given twice")
    rule = _resolved(rule)
    if "oneOf" in rule:
        rule = _alternative(value, rule, path)
    if "const" in rule:
        if type(value) is not type(rule["const"]) or value != rule["const"]:
            raise ViewsFileError(f"{path}: must be {rule['const']!r}, not {shown(value)}")
        return
    allowed = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    kind = next((kind for kind in allowed if type(value) is _TYPES[kind][0]), None)  # True is not an integer here
    if kind is None:
        expected = " or ".join(_TYPES[kind][1] for kind in allowed)
        raise ViewsFileError(f"{path or 'the file'}: must be {expected}, not {shown(value)}")
    if kind in _CHECKS:
        _CHECKS[kind](value, rule, path)


def _resolved(rule: dict) -> dict:
    while "$ref" in rule:
        rule = SCHEMA["$defs"][rule["$ref"].rpartition("/")[2]]
    return rule


def _alternative(value: Any, rule: dict, path: str) -> dict:
    """Return the rule of ``oneOf`` that fits the type of the value. For a claim, return the rule for its kind."""
    rules = [_resolved(one) for one in rule["oneOf"]]
    fitting = [one for one in rules if type(value) is _TYPES[one["type"]][0]] or rules[-1:]
    if len(fitting) == 1 or not isinstance(value, dict):
        return fitting[0]
    by_kind = {one["properties"]["kind"]["const"]: one for one in fitting}
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in by_kind:
        given = shown(kind) if "kind" in value else "missing"
        raise ViewsFileError(f"{path}.kind: must be one of {', '.join(by_kind)}, not {given}")
    return by_kind[kind]


def _check_object(value: dict, rule: dict, path: str) -> None:
    known, place = rule["properties"], path or "the file"
    for name, field_rule in known.items():
        if name in value:
            _check(value[name], field_rule, f"{path}.{name}" if path else name)
    for name in value:
        if name not in known:
            raise ViewsFileError(f"{place}: has no field {shown(name)}; known are {', '.join(known)}")
    for name in rule["required"]:
        if name not in value:
            raise ViewsFileError(f"{place}: the field {name!r} is missing; known are {', '.join(known)}")


def _check_list(value: list, rule: dict, path: str) -> None:
    if len(value) > rule["maxItems"]:
        raise ViewsFileError(f"{path}: {len(value)} entries are more than the {rule['maxItems']} allowed")
    for number, item in enumerate(value):
        _check(item, rule["items"], f"{path}[{number}]")


def _check_text(value: str, rule: dict, path: str) -> None:
    if "enum" in rule:  # only the names of types
        if value not in rule["enum"]:
            raise ViewsFileError(f'{path}: the type {shown(value)} is not known; give {{"itemsize": bytes}} instead')
        return
    least, most = rule.get("minLength", 0), rule["maxLength"]
    if not least <= len(value) <= most:
        raise ViewsFileError(f"{path}: must have {least} to {most} characters, not {shown(value)}")
    if not value.isprintable():
        raise ViewsFileError(f"{path}: must have printable characters only, not {shown(value)}")


def _check_integer(value: int, rule: dict, path: str) -> None:
    if not rule["minimum"] <= value <= rule["maximum"]:
        limit = f"at least {rule['minimum']}" if value < rule["minimum"] else f"at most {rule['maximum']}"
        raise ViewsFileError(f"{path}: must be {limit}, not {shown(value)}")


_CHECKS = {"object": _check_object, "array": _check_list, "string": _check_text, "integer": _check_integer}
