"""Checks on arguments: a value from a list, an integer of at least some size."""

import difflib


def one_of(what: str, value: object, known: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``known``, else raise a ValueError that suggests the nearest."""
    if value in known:
        return str(value)
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{what} {value!r} does not exist: it is one of {', '.join(known)}{hint}")


def is_integer(value: object, least: int = 0) -> bool:
    """Whether a value is an integer of at least ``least``; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
