"""Draw the pictures of the README: ``python docs/pictures.py``. Screenshots need Chromium and playwright."""

import shutil
import tempfile
from pathlib import Path

from kvviz import CacheSpec, MapView, allocate, audit_scales, audit_views, byte_map
from kvviz.audit.claims import Disjoint, Follows
from kvviz.show.audit_page import render_html
from kvviz.show.story_picture import story_svg

DOCS = Path(__file__).parent
SIZES = {"num_layers": 4, "num_blocks": 4, "block_size": 2, "num_kv_heads": 2, "head_size": 16}
CACHE = allocate(CacheSpec(**SIZES, kv_cache_dtype="int8_per_token_head"), "cross-layer NHD", "meta")
ROW_BYTES = CACHE.spec.page_size_bytes


def wrong_map() -> dict:
    """Return the map of the buffer with scale views that were made from the shape."""
    data = [view for view in CACHE.owners() if view.role == "data"]
    writers = CACHE.writers(CACHE.carve_scales("shape"))
    return {"Scale views from the shape alone": byte_map(CACHE.owners(), [*data, *writers])}


def screenshot(html: str, path: Path, width: int, height: int, point: tuple[float, float] | None = None) -> None:
    """Save a picture of a page, with the mouse at a point of the first map if one is given."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        page_file = Path(folder, "page.html")
        page_file.write_text(html, encoding="utf-8")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(page_file.as_uri())
        page.wait_for_timeout(500)
        if point:
            box = page.locator("canvas").first.bounding_box()
            page.mouse.move(box["x"] + point[0] * box["width"], box["y"] + point[1] * box["height"])
            page.wait_for_timeout(300)
        page.screenshot(path=path)
        browser.close()


def main() -> None:
    """Write corruption.svg, live_map.png and audit_page.png."""
    (DOCS / "corruption.svg").write_text(story_svg(looping=True), encoding="utf-8")
    style = "<style>body{margin:16px;font:16px system-ui,sans-serif;background:#fff}</style>"
    html = f'<!DOCTYPE html><meta charset="utf-8">{style}{MapView(wrong_map(), row_bytes=ROW_BYTES).html}'
    screenshot(html, DOCS / "live_map.png", 900, 480, point=(0.36, 0.1))
    data = [view for view in CACHE.owners() if view.role == "data"]
    scales = list(CACHE.writers(CACHE.carve_scales("shape")))
    groups = [Disjoint(tuple(view.name for view in views)) for views in (data, scales)]
    claims = [*groups, *(Follows(s.name, s.name.replace("scale", "data"), CACHE.spec.data_bytes) for s in scales)]
    result = audit_views([*data, *scales], claims)
    assert not result.clean and not audit_scales(CACHE.owners(), scales).clean
    screenshot(render_html(result, [*data, *scales], claims, "views.json"), DOCS / "audit_page.png", 800, 900)


if __name__ == "__main__":
    main()
