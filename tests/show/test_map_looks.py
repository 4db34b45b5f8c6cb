"""The looks of interactive maps: narrow, dark, on paper, without scripts, many on a page, copied and saved."""

import re
import time

import pytest

from kvviz.show.describe import describe
from kvviz.show.live_map import MapView
from tests.show.hands import MAPS, ask, canvas, first, giant, hover, pixel, tips
from tests.show.test_live_map import story
from tests.show.test_map_hands import ROW, two

pytestmark = pytest.mark.browser

DARK = """<style>body { --jp-layout-color1: #111; --jp-content-font-color1: #ddd; --jp-content-font-color2: #aaa;
  --jp-border-color1: #616161; background: #111 }</style>"""

CONTRAST = """element => {
    const parts = text => text.match(/[\\d.]+/g).map(Number);
    const light = colour => { const [r, g, b] = colour.map(c => (c /= 255) <= 0.04045 ? c / 12.92
        : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
    let ground = element, ink = parts(getComputedStyle(element).color);
    while (ground && parts(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
    const two = [ink, ground ? parts(getComputedStyle(ground).backgroundColor) : [255, 255, 255]];
    const [low, high] = two.map(colour => light(colour.slice(0, 3))).sort((p, q) => p - q);
    return (high + 0.05) / (low + 0.05);
}"""
"""Returns the contrast of a text against its background."""


def views() -> list[tuple[MapView, str]]:
    """Return a map, a pair of maps, a time lapse and a very large map, each with a name."""
    spec, record, result = story()
    right = story(carve="strides")[1]
    after = record.values[:10] + b"abc" + record.values[13:]
    huge, middle, _ = giant()
    return [
        (MapView(record, row_bytes=spec.page_size_bytes, finding=result.findings[0]), "finding"),
        (MapView({"w" * 90: record, "right": right}, row_bytes=spec.page_size_bytes, beside=True), "pair"),
        (MapView(record, row_bytes=ROW, frames=[("layer 0 writes the token's scale", after)]), "frames"),
        (MapView(middle, row_bytes=huge.page_size_bytes // 16), "giant"),
    ]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(("view", "name"), views(), ids=lambda value: value if isinstance(value, str) else "")
def test_no_map_makes_a_page_scroll_sideways(shown, view, name, width):
    page = shown(view, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for n in range(page.locator("canvas[role=application]").count()):
        box = canvas(page, n).bounding_box()
        for x in (box["x"] + 70, box["x"] + box["width"] - (8 if width < 640 else 120)):
            page.mouse.move(x, box["y"] + 4)
            assert tips(page)[n] is not None and page.evaluate("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('.kvviz-bar button, .kvviz-title, .kvviz-tip, .kvviz-counts')]"
    assert page.evaluate(f"{cut}.filter(node => node.scrollWidth > node.clientWidth + 1).length") == 0


def test_a_pair_stands_side_by_side_or_stacked(shown):
    (left, right) = (canvas(two(shown)[1], n).bounding_box() for n in (0, 1))
    assert abs(left["y"] - right["y"]) < 1 and right["x"] > left["x"] + left["width"]
    (above, below) = (canvas(two(shown, width=390)[1], n).bounding_box() for n in (0, 1))
    assert above["x"] == below["x"] and below["y"] > above["y"] + above["height"]


def test_without_javascript_the_picture_and_its_words_stay(shown):
    _, record, _ = story()
    page = shown(MapView(record, row_bytes=ROW), javascript=False)
    image = page.locator(".kvviz img")
    assert page.locator("canvas").count() == 0 and image.is_visible() and image.bounding_box()["width"] > 900
    assert "96 contested, 192 written by nobody" in image.get_attribute("alt")
    assert page.get_by_text("96 contested, 192 written by nobody").is_visible()
    assert page.locator(".kvviz-legend li").count() == 5


def test_paper_shows_picture_and_legend_without_controls(shown):
    _, record, _ = story()
    page = shown(MapView(record, row_bytes=ROW).html + DARK)
    hover(page, 100)
    page.emulate_media(media="print")
    assert page.locator(".kvviz img").is_visible() and page.locator(".kvviz-legend").is_visible()
    for hidden in ("canvas", ".kvviz-bar", ".kvviz-selected", ".kvviz-tip"):
        assert not page.locator(hidden).is_visible(), hidden
    swatch = page.locator("[data-kvviz=unreached] .kvviz-swatch")
    looks = swatch.evaluate("s => [getComputedStyle(s).printColorAdjust, getComputedStyle(s).backgroundColor]")
    assert looks == ["exact", "rgb(255, 255, 255)"]
    printed = page.pdf()
    assert printed.startswith(b"%PDF") and b"/Subtype /Image" in printed
    page.emulate_media(media="screen")
    assert canvas(page).is_visible() and not page.locator(".kvviz img").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(shown, scheme):
    _, record, result = story()
    html = MapView(record, row_bytes=ROW, finding=result.findings[0]).html
    page = shown((DARK if scheme == "dark" else "") + html, scheme=scheme)
    hover(page, 100)
    parts = ("title", "counts", "note", "tip b", "tip div", "selected", "legend button", "bar button", "bar input")
    for part in parts:
        assert page.locator(f".kvviz-{part.replace(' ', ' >> ')}").first.evaluate(CONTRAST) >= 4.5, part


def shade(page, key: str) -> tuple[int, ...]:
    """Return the colour of the first swatch of a legend entry."""
    swatch = page.locator(f'[data-kvviz="{key}"] .kvviz-swatch').first
    text = swatch.evaluate("s => getComputedStyle(s).backgroundColor")
    scale = 255 if text.startswith("color(srgb") else 1
    return tuple(round(float(part) * scale) for part in re.findall(r"\d+\.?\d*", text)[:3])


def test_map_and_legend_follow_a_change_of_theme(shown):
    _, record, _ = story()
    page = shown(MapView(record, row_bytes=ROW))
    unreached, right = first(record, "unreached"), first(record, "right")
    assert [shade(page, "unreached"), shade(page, "hue 0")] == [pixel(page, unreached), pixel(page, right)]
    hatched = "getComputedStyle(document.querySelector('[data-kvviz=contested] .kvviz-swatch')).backgroundImage"
    assert page.evaluate(hatched).startswith("repeating-linear-gradient")
    page.evaluate("""() => {
        for (const [name, value] of [["layout", "#111"], ["content-font", "#ddd"]])
            document.body.style.setProperty(`--jp-${name}-color1`, value);
        document.body.dataset.jpThemeLight = "false";
    }""")
    assert shade(page, "unreached") == pixel(page, unreached) == (17, 17, 17)
    drawn = pixel(page, right)
    assert sum(drawn) < 300 and all(abs(a - b) <= 1 for a, b in zip(shade(page, "hue 0"), drawn, strict=True))


def test_ten_maps_on_one_page_all_answer(shown):
    spec, record, _ = story()
    html = MapView(record, row_bytes=spec.page_size_bytes).html
    start = time.perf_counter()
    page = shown(html * 10)
    lines = page.evaluate(f"{MAPS}.map(canvas => canvas.kvviz.describe(17))")
    print(f"ten maps: {time.perf_counter() - start:.2f} s")
    assert lines == [list(describe(record, 17))] * 10
    canvas(page, 9).scroll_into_view_if_needed()
    hover(page, 30, 9)
    assert tips(page) == [None] * 9 + [list(describe(record, 30))]


def test_a_copy_whose_scripts_run_again_is_a_second_map(shown):
    spec, record, _ = story()
    html = MapView(record, row_bytes=spec.page_size_bytes).html
    page = shown(html)
    hover(page, 40)
    page.evaluate(
        """html => {
        const copy = document.createElement("div");
        copy.innerHTML = html;
        document.body.append(copy);
        for (const old of copy.querySelectorAll("script")) {
            const made = document.createElement("script");
            made.textContent = old.textContent;
            old.parentNode.replaceChild(made, old);
        }
    }""",
        html,
    )
    hover(page, 30, 1)
    assert tips(page) == [None, list(describe(record, 30))]
    page.mouse.click(*(canvas(page, 1).bounding_box()[side] + 80 for side in "xy"))
    assert ask(page, "selected()", 0) is None and ask(page, "selected()", 1) is not None


def test_a_page_that_a_browser_saved_is_interactive_again(shown):
    record = story()[1]
    page = shown(MapView(record, row_bytes=ROW))
    hover(page, 40)
    saved = page.evaluate("document.body.innerHTML")
    again = shown(saved)
    assert again.locator("canvas").count() == 1 and again.locator("button button").count() == 0
    assert again.locator(".kvviz-bar").count() == again.locator(".kvviz-selected").count() == 1
    hover(again, 700)
    assert tips(again) == [list(describe(record, 700))]
    again.locator("[data-kvviz=contested] button").click()
    assert ask(again, "lit()") == {"state": 1}
