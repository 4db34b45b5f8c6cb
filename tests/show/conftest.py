"""What every test of renderings may use: pages that must not complain."""

import pytest

from kvviz.show.live_map import MapView


@pytest.fixture
def shown(opened):
    """Opens a view or a piece of HTML; no page may have thrown, or written an error to the console, by the end."""
    pages = []

    def show(view: MapView | str, **more):
        pages.append(opened(view if isinstance(view, str) else view.html, **more))
        return pages[-1]

    yield show
    assert [error for page in pages for error in page.errors] == []
