"""The states of a byte in a map: right, contested, misplaced, unreached or unowned. Each state has one record.

The script of the interactive map gets the records as data, see :func:`for_javascript`.
"""

from dataclasses import asdict, dataclass

from kvviz.show.colours import CONTESTED, MISPLACED, UNOWNED, UNREACHED, Style


@dataclass(frozen=True)
class State:
    """One state of bytes, and how every rendering shows it.

    Attributes:
        name: the word that records and tooltips use.
        severity: if several bytes share one pixel, the pixel shows the state with the highest severity.
        meaning: the sentence in a legend. "" for ``right``, because its entries name the layers.
        counted: the words after a number of bytes, as in "96 contested".
        letter: the letter in text maps. "" for ``right``, because the letter then depends on the owner.
        style: how the bytes look. None for ``right``, because the style then depends on the owner.
        marks: texts that may be written on the bytes, the longest first. ``{n}`` is the number of writers.
    """

    name: str
    severity: int
    meaning: str
    counted: str
    letter: str = ""
    style: Style | None = None
    marks: tuple[str, ...] = ()


_ALL = (
    State("right", 1, "", "right"),
    State(
        "contested",
        4,
        "contested: two or more write here (the number says how many)",
        "contested",
        "#",
        CONTESTED,
        ("{n} writers", "{n}"),
    ),
    State(
        "misplaced",
        3,
        "misplaced: written by somebody who is not the owner (L2: by layer 2; !: by another cell of the same layer)",
        "misplaced",
        "!",
        MISPLACED,
        ("!",),
    ),
    State(
        "unreached",
        2,
        "nobody writes here: a reader finds the old bytes",
        "written by nobody",
        "_",
        UNREACHED,
        ("nobody writes here",),
    ),
    State("unowned", 0, "padding: bytes without an owner", "padding", ".", UNOWNED, ("padding",)),
)

STATES = {state.name: state for state in _ALL}
"""Every state by name, in the order in which maps count them:

* ``right``: only the owner writes these bytes.
* ``contested``: two or more writers write these bytes.
* ``misplaced``: one writer writes these bytes, but it is not the owner.
* ``unreached``: these bytes have an owner, but nobody writes them.
* ``unowned``: these bytes are padding, which nobody owns or writes.
"""


def for_javascript() -> list[dict]:
    """Return what the script of the interactive map needs of each state, as plain data."""
    return [
        {
            "name": state.name,
            "severity": state.severity,
            "marks": state.marks,
            "colour": state.style and state.style.colour,
            "share": state.style and state.style.share,
            "hatch": state.style and state.style.hatch and asdict(state.style.hatch),
        }
        for state in _ALL
    ]
