"""A pytest plugin with which other projects test the memory layout of their caches.

After ``pip install kvviz``, every test can use the fixture ``layout``. Example::

    def test_cache(layout):
        layout.add({"layer 0 K data": data, "layer 0 K scale": scale})  # torch tensors or numpy arrays

The test fails if the tensors share bytes. The message says the cause and a repair. pytest loads this file in every
project of the environment. So this file imports the audit only when a test needs it.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvviz.audit.claims import Claim
    from kvviz.audit.findings import Audit
    from kvviz.audit.view import View
    from kvviz.audit.views_file import ViewsFile


def assert_layout(
    cache: "Mapping[str, Any] | Iterable[View] | ViewsFile | str | Path", claims: "Iterable[Claim] | None" = None
) -> "Audit":
    """Audit a cache. Return the audit if it is clean.

    Args:
        cache: ``{name: tensor}`` with torch tensors or numpy arrays, or views, or the path of a views file.
        claims: what must hold. The default for a views file is its own claims. The default for tensors and views is
            ``kvviz.audit.collect.usual_claims``: no two data views share a byte, no two scale views share a byte, and
            each scale follows its data.

    Raises:
        AssertionError: there is an error or no view. The message is the text of ``kvviz audit``.
        ValueError: a claim does not fit the views, or the views file breaks its format.
    """
    __tracebackhide__ = True  # pytest shows the line of the test, not this function
    from kvviz.audit import diagnosis_text, views_file
    from kvviz.audit.causes import diagnose
    from kvviz.audit.collect import usual_claims, views_of

    if isinstance(cache, str | Path):
        cache = views_file.read(cache)
    if isinstance(cache, views_file.ViewsFile):
        views, usual = cache.views, cache.claims
    else:
        views = views_of(cache) if isinstance(cache, Mapping) else tuple(cache)
        usual = usual_claims(views)
    if not views:
        raise AssertionError("the cache has no views, so nothing was audited; give at least one tensor")
    given = views_file.ViewsFile.of(views, usual if claims is None else tuple(claims))
    result = given.audit()
    if not result.clean:
        raise AssertionError(
            diagnosis_text.audit_text(result, diagnose(given.views, given.claims, result), option="kvviz audit -v")
        )
    return result


class Layout:
    """The tensors and claims of one test. They are audited when the test function ends, or by :meth:`check`."""

    def __init__(self) -> None:
        self._tensors: dict[str, Any] = {}
        self._overlapping: set[str] = set()
        self._claims: list[Claim] = []
        self.checked = True

    def add(self, tensors: Mapping[str, Any], axes: Iterable[str] = (), *, overlap: bool = False) -> None:
        """Add tensors by name. ``X scale`` must follow ``X data``.

        Args:
            tensors: torch tensors or numpy arrays.
            axes: names of the axes, for messages, for example ``("block", "token", "head", "element")``. If a tensor
                has fewer axes, it gets only the first names.
            overlap: True if these tensors may share bytes with other tensors. Example: the bytes that a copy takes.

        Raises:
            ValueError: a tensor with this name was added before.
        """
        if double := sorted(self._tensors.keys() & tensors):
            raise ValueError(f"the name {double[0]!r} was added before; give each tensor a name of its own")
        for name, tensor in tensors.items():
            names = tuple(axes)[: len(getattr(tensor, "shape", ()))]
            self._tensors[name] = (tensor, names) if names else tensor
        self._overlapping |= set(tensors if overlap else ())
        self.checked = False

    def claim(self, *claims: "Claim") -> None:
        """State what must hold, in addition to ``kvviz.audit.collect.usual_claims``."""
        self._claims += claims
        self.checked = False

    def check(self) -> "Audit":
        """Audit all tensors that were added until now. See :func:`assert_layout`."""
        __tracebackhide__ = True
        from kvviz.audit.collect import usual_claims, views_of

        views = views_of(self._tensors)
        self.checked = True
        owners = [view for view in views if view.name not in self._overlapping]
        return assert_layout(views, [*usual_claims(owners), *self._claims])


_LAYOUTS = pytest.StashKey[list[Layout]]()
"""The layouts of one test."""


class LayoutFailed(pytest.fail.Exception, AssertionError):
    """A layout has findings. pytest prints the message without a traceback, because no line of the test is to blame."""


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Iterator[Layout]:
    """Collect the tensors of a cache, and audit them at the end of the test."""
    collected = Layout()
    request.node.stash.setdefault(_LAYOUTS, []).append(collected)
    yield collected
    _check([collected])  # what was added after the test function, for example by another fixture


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> object:
    """Audit what a test added to ``layout`` but did not check. A finding fails the test itself."""
    layouts = item.stash.setdefault(_LAYOUTS, [])
    try:
        outcome = yield
    except BaseException:  # the test failed for a reason of its own: one reason is enough
        for one in layouts:
            one.checked = True
        raise
    _check(layouts)
    return outcome


def _check(layouts: "Iterable[Layout]") -> None:
    """Audit the layouts that were not audited yet."""
    for one in layouts:
        if one.checked:
            continue
        text = ""
        try:
            one.check()
        except AssertionError as error:
            text = str(error)
        if text:
            raise LayoutFailed(text, pytrace=False)
