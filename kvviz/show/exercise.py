"""Checks the answer to an exercise. A wrong answer gives a short box with a hint, and no traceback.

A check in a notebook looks like this::

    with exercise("08.1", hint="How many cells has a page?", proves="the copy takes whole cells"):
        width = whole(width_bytes)
        assert width == 3456, f"{width} bytes cut a cell"

The message of a failed ``assert`` is shown in the box. The notebook cell still fails, so a report sees it.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from numbers import Number
from operator import index
from typing import Any

from kvviz.show.colours import GREY, INK, RED, WHITE

_GREEN = "#1A6B33"


class WrongAnswerError(Exception):
    """An exercise is not solved. Jupyter shows the title instead of a traceback, because a box shows the rest."""

    def __init__(self, title: str, text: str) -> None:
        super().__init__(f"{title}. {text}")
        self.title = title

    def _render_traceback_(self) -> list[str]:
        return [self.title]


class Box:
    """A short message about an exercise, as HTML and as text.

    Args:
        title: the first line.
        text: what was found, in sentences.
        hint: shown when the reader asks for it, or "".
        right: True for a right answer.
    """

    def __init__(self, title: str, text: str, hint: str = "", right: bool = False) -> None:
        self.title, self.text, self.hint, self.right = title, text, hint, right

    def _repr_html_(self) -> str:
        edge = _GREEN if self.right else RED
        mark = "✓" if self.right else "✗"
        hint = (
            f'<details style="border:0;padding:0;margin:6px 0 0"><summary style="cursor:pointer;padding:6px 0">Hint'
            f"</summary>{escape(self.hint)}</details>"
            if self.hint
            else ""
        )
        return (
            f'<div style="background:{WHITE};color:{INK};border:1px solid {GREY};border-left:6px solid {edge};'
            f'border-radius:4px;padding:8px 12px;max-width:46rem;line-height:1.5"><strong>{mark} {escape(self.title)}'
            f'</strong><div style="white-space:pre-line">{escape(self.text)}</div>{hint}</div>'
        )

    def __repr__(self) -> str:
        return "\n".join(filter(None, (self.title, self.text, self.hint and f"Hint: {self.hint}")))


@contextmanager
def exercise(name: str, hint: str, proves: str) -> Iterator[None]:
    """Check an answer inside a ``with`` block.

    Args:
        name: the number of the exercise, for example "02.1".
        hint: a sentence that helps, and does not give the answer away.
        proves: what a right answer shows. It completes the sentence "This shows that ...".

    Raises:
        WrongAnswerError: the block raised an error. An AssertionError has the sentence for the box. Any other error is
            named in the box, because it comes from the code of the answer.
    """
    try:
        yield
    except AssertionError as error:
        text, title = str(error) or "The answer is not right.", f"Exercise {name}: not yet"
    except Exception as error:  # the reader's code can raise any exception
        text = f"Your code raised {type(error).__name__}: {error}"
        title = f"Exercise {name}: this answer cannot be checked"
    else:
        _show(Box(f"Exercise {name}: yes", f"This shows that {proves}.", right=True))
        return
    _show(Box(title, text, hint))
    raise WrongAnswerError(title, text) from None


def _show(box: Box) -> None:
    """Show a box in a notebook. Outside of notebooks, print it."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(box)
        return
    if get_ipython() is None:
        print(box)
    else:
        display(box)


def solved(answer: Any, task: str) -> Any:
    """Return ``answer`` if it contains no ``...``.

    Args:
        task: what to write, as the rest of the sentence "Not solved yet: ...".

    Raises:
        AssertionError: the answer is, or contains, ``...``.
    """
    parts = list(answer.values()) if isinstance(answer, dict) else answer if isinstance(answer, list | tuple) else ()
    _require(answer is not ... and not any(part is ... for part in parts), f"Not solved yet: {task}.")
    return answer


def whole(answer: Any, what: str = "the answer") -> int:
    """Return a whole number that is given in any usual form: 3, 3.0, "3", a numpy number, or a tensor of one number.

    Raises:
        AssertionError: the answer is not a whole number. The message says what it is.
    """
    number = answer
    if isinstance(answer, str):
        text = answer.strip().replace(",", "").replace("_", "")
        number = int(text) if text.removeprefix("-").isdecimal() else None
    elif hasattr(answer, "item") and getattr(answer, "size", None) is not None and not isinstance(answer, bytes):
        number = answer.item() if math.prod(getattr(answer, "shape", ())) == 1 else None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    usable = isinstance(number, Number) and not isinstance(number, bool | float | complex)
    _require(usable, f"{what} must be a whole number, but it is {_short(answer)}.")
    return index(number)


def wholes(answer: Any, what: str = "the answer") -> list[int]:
    """Return whole numbers that are given in any usual form: a list, tuple, set, range, array, tensor or one number.

    Raises:
        AssertionError: the answer does not consist of whole numbers.
    """
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, str) and any(mark in answer for mark in ", "):
        answer = answer.strip("[](){} ").replace(",", " ").split()
    several = isinstance(answer, Iterable) and not isinstance(answer, str | bytes | dict)
    return [whole(one, f"each number of {what}") for one in (answer if several else (answer,))]


def word(answer: Any, known: Iterable[str], what: str = "the answer") -> str:
    """Return a word of ``known``. Capital letters and spaces around the word do not matter.

    Raises:
        AssertionError: the answer is not one of these words.
    """
    words = {one.casefold(): one for one in known}
    found = words.get(answer.strip().casefold()) if isinstance(answer, str) else None
    _require(found is not None, f"{what} must be one of {', '.join(words.values())}, but it is {_short(answer)}.")
    return found


def yes_or_no(answer: Any, what: str = "the answer") -> bool:
    """Return True or False that is given in any usual form: a bool, 0, 1, a numpy bool, or a tensor of one of them.

    Raises:
        AssertionError: the answer is neither.
    """
    if hasattr(answer, "item") and math.prod(getattr(answer, "shape", ())) == 1:
        answer = answer.item()
    usable = isinstance(answer, Number) and answer in (0, 1)
    _require(usable, f"{what} must be True or False, but it is {_short(answer)}.")
    return bool(answer)


def _require(holds: bool, sentence: str) -> None:
    """Raise AssertionError with the sentence if something does not hold. Python's option -O does not remove this."""
    if not holds:
        raise AssertionError(sentence)


def _short(answer: Any) -> str:
    """Return an answer as short text, with its type."""
    text = repr(answer)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(answer).__name__})"
