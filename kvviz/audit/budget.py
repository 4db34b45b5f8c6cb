"""Counts work, so that an audit ends after the same amount of work on every machine, however busy the machine is.

Example: ``with limited(): audit_views(views, claims)``. Functions with much work call :func:`spend` before they do it.
If less work is left than a step needs, ``spend`` raises :class:`TooMuchWorkError`, and the step is not done.
``audit_views``, ``diagnose`` and ``render_html`` have the same limit: in Python, in the command and for every output.
No clock decides anything.

The size of a result counts as work too. So a finding, a JSON file and a page cannot become too large.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

WORK = 40_000_000
"""Work limit of an audit, of a diagnosis and of a page, each. One unit is the work of sorting one byte range.

40 million units take about 5 seconds on one core of an AMD EPYC server. A cache of 80 layers needs 1 to 15 million.
"""


class TooMuchWorkError(ValueError):
    """An exact answer would need more work than a limit allows. The message says which limit."""


class Budget:
    """Work that may still be done.

    Attributes:
        units: the work limit.
        left: what is left of it.
    """

    def __init__(self, units: int) -> None:
        self.units = self.left = units

    def spend(self, units: int) -> None:
        """Count work before it is done. Raise TooMuchWorkError, and count nothing, if less is left."""
        if units > self.left:
            raise TooMuchWorkError(
                f"the work limit of {self.units:,} units is reached: {self.left:,} are left, and this step needs "
                f"{units:,}; audit fewer views or fewer claims at once"
            )
        self.left -= units


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def limited(units: int = WORK) -> Iterator[Budget]:
    """Limit the work inside a ``with`` block. If a limit holds already, this limit stays and is shared."""
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
        TooMuchWorkError: less work is left. Then nothing is counted.
    """
    budget = _current.get()
    if budget is not None:
        budget.spend(units)
