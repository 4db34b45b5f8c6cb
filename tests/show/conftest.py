"""Fixtures of the tests of renderings: browser pages that must not report errors."""

import pytest

from kvviz.show.live_map import MapView


@pytest.fixture
def shown(opened):
    """Return a function that opens a view or HTML. At the end, no page may have an error in its script or console."""
    pages = []

    def show(view: MapView | str, **more):
        pages.append(opened(view if isinstance(view, str) else view.html, **more))
        return pages[-1]

    yield show
    assert [error for page in pages for error in page.errors] == []
