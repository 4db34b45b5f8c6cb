"""Checks arguments, so that a wrong argument raises an error with a plain sentence. Converts numpy integers."""

import difflib
from collections.abc import Iterable
from numbers import Integral
from operator import index
from typing import Any


def one_of(what: str, value: object, known: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``known``. Otherwise raise a ValueError that suggests the nearest word."""
    known = tuple(known)
    if value in known:
        return str(value)
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{what} {value!r} does not exist: it is one of {', '.join(known)}{hint}")


def is_integer(value: object, least: int = 0) -> bool:
    """Return True if ``value`` is an integer of at least ``least``. Numpy integers count, True and False do not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least


def positive_int(name: str, value: object) -> int:
    """Return ``value`` as a Python integer. Raise a ValueError if it is not an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, not {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return index(value)


_PLAIN = frozenset((int, str, bool, type(None)))
"""Types whose values :func:`plain` does not change."""


def plain(value: Any) -> Any:
    """Convert a numpy integer to a Python integer, and a list to a tuple. Return any other value unchanged.

    A numpy integer has at most 64 bits. A product of strides can need more bits, and would then be wrong.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return value if type(value) is tuple and _PLAIN.issuperset(map(type, value)) else tuple(map(plain, value))
    if isinstance(value, Integral) and not isinstance(value, bool):
        return index(value)
    return value
