"""Counts work, so that an audit stops after the same amount of work on every machine. A clock could not do this.

Example: ``with limited(): audit_views(views, claims)``. Before a step with much work, a function calls :func:`spend`.
If less work is left than the step needs, ``spend`` raises :class:`TooMuchWorkError`, and the step is not done.
``audit_views``, ``diagnose`` and ``render_html`` have the same limit, in Python and in the command.

The size of a result counts as work too. So a finding, a JSON file and a page cannot become too large.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

WORK = 40_000_000
"""Work limit of one audit, one diagnosis or one page, in units. One unit is the work of sorting one byte range.

40 million units take about 5 seconds on one core of an AMD EPYC server. A cache of 80 layers needs 1 to 15 million.
"""


class TooMuchWorkError(ValueError):
    """An exact answer would need more work than a limit allows. The message says which limit."""


class Budget:
    """A work limit, and the work that may still be done.

    Attributes:
        units: the work limit, in units of work.
        left: units of work that are not spent yet.
    """

    def __init__(self, units: int) -> None:
        self.units = self.left = units

    def spend(self, units: int) -> None:
        """Count work before it is done. If less work is left, count nothing and raise TooMuchWorkError."""
        if units > self.left:
            raise TooMuchWorkError(
                f"the work limit of {self.units:,} units is reached: {self.left:,} are left, and this step needs "
                f"{units:,}; audit fewer views or fewer claims at once"
            )
        self.left -= units


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def limited(units: int = WORK) -> Iterator[Budget]:
    """Limit the work inside a ``with`` block. If this block is inside another such block, the outer limit counts."""
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    token = _current.set(Budget(units))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def spend(units: int) -> None:
    """Count work before it is done. Outside of :func:`limited` nothing is counted.

    Raises:
        TooMuchWorkError: fewer than ``units`` units are left.
    """
    budget = _current.get()
    if budget is not None:
        budget.spend(units)
