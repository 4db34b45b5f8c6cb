"""Interactive maps react to mouse, keyboard and touch with the text of ``describe``."""

import pytest

from kvviz.show.describe import describe
from kvviz.show.live_map import MapView
from tests.show.hands import MAPS, ask, canvas, first, giant, hover, one_stranger, pixel, place, selected_lines, tips
from tests.show.test_live_map import story

pytestmark = pytest.mark.browser

ROW = 64
HELP = (
    "Point at a byte, tap it, or use the arrow keys. To zoom, use plus and minus, two fingers, or the wheel with Ctrl. "
    "Dragging moves the map."
)


def one(shown, **more):
    _, record, _ = story()
    return record, shown(MapView(record, row_bytes=ROW), **more)


def two(shown, **more):
    spec, wrong, _ = story()
    right = story(carve="strides")[1]
    maps = {"wrong": wrong, "right": right}
    return (wrong, right), shown(MapView(maps, row_bytes=spec.page_size_bytes, beside=True), **more)


def row_of(page, byte: int) -> int:
    return byte // ROW - ask(page, "look()")["top"]


# ---- the mouse ------------------------------------------------------------------------------------------------


def test_the_byte_under_the_mouse_is_told_below_the_map(shown):
    record, page = one(shown)
    assert tips(page) == [None]
    for byte in (0, 17, ROW, 700, record.stop - 1):
        hover(page, byte)
        assert tips(page) == [list(describe(record, byte))]
        tip, map_ = page.locator(".kvviz-tip").bounding_box(), canvas(page).bounding_box()
        assert tip["y"] >= map_["y"] + map_["height"], "the text would cover the map"
    page.mouse.move(2, 2)
    assert tips(page) == [None] and ask(page, "selected()") is None


def test_a_click_selects_a_byte_and_escape_ends_it(shown):
    record, page = one(shown)
    assert selected_lines(page) == [HELP]
    page.mouse.click(*place(page, 130))
    assert ask(page, "selected()") == 130 and selected_lines(page) == list(describe(record, 130))
    page.keyboard.press("Escape")
    assert ask(page, "selected()") is None and selected_lines(page) == [HELP]


def test_the_wheel_zooms_about_the_byte_under_the_pointer(shown):
    _, page = one(shown)
    for byte in (3, 300, 737, 1200):
        x, y = place(page, byte)
        for low in (-7, 0, 7):  # anywhere in the row
            page.mouse.move(x, y + low)
            canvas(page).focus()  # as after a click
            before, zoom = tips(page)[0][0], ask(page, "look()")["zoom"]
            assert before.startswith(f"byte {byte} ")
            for turn in (-100, -100, 50, -100):
                page.mouse.wheel(0, turn)
                page.wait_for_function(f"zoom => {MAPS}[0].kvviz.look().zoom !== zoom", arg=zoom)
                zoom = ask(page, "look()")["zoom"]
                assert tips(page)[0][0] == before, (byte, low, turn)
            assert zoom > 1.5
            page.get_by_role("button", name="back to the first view").click()
            assert ask(page, "look()")["zoom"] == 1


def test_a_page_that_scrolls_past_a_map_goes_on_scrolling(shown):
    _, record, _ = story()
    tall = '<div style="height:1500px"></div>'
    page = shown(f"{tall}{MapView(record, row_bytes=ROW).html}{tall}")
    page.mouse.move(500, 450)
    scrolled, met = 0, 0
    while scrolled < 1700:
        page.mouse.wheel(0, 100)
        page.wait_for_function("y => scrollY > y", arg=scrolled, timeout=10_000)
        scrolled = page.evaluate("scrollY")
        under = page.evaluate("document.elementFromPoint(500, 450).tagName") == "CANVAS"
        met += under
        if under and met == 2:
            page.wait_for_timeout(700)  # a pause: the browser sends pointer moves of its own
    assert met > 2 and ask(page, "look()")["zoom"] == 1
    page.evaluate("scrollTo(0, 1300)")
    page.mouse.move(510, 450)  # even a pointer that moves over the map does not make the wheel zoom
    page.mouse.wheel(0, 10)
    page.wait_for_function("scrollY === 1310")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.wait_for_function(f"{MAPS}[0].kvviz.look().zoom > 1")
    page.keyboard.up("Control")
    page.get_by_role("button", name="back to the first view").click()
    page.evaluate("scrollTo(0, 1300)")
    page.mouse.click(510, 450)  # after a click into the map, the wheel zooms, and never scrolls the page
    for _ in range(30):
        page.mouse.wheel(0, 100)
    page.wait_for_function(f"{MAPS}[0].kvviz.look().zoom < 0.21")
    assert page.evaluate("scrollY") == 1300


def test_a_drag_pans_and_selects_nothing(shown):
    _, page = one(shown)
    canvas(page).focus()
    for _ in range(4):
        page.keyboard.press("+")
    page.mouse.move(600, 200)
    under, look = tips(page)[0][0], ask(page, "look()")
    page.mouse.down()
    for step in range(1, 6):
        page.mouse.move(600 - 30 * step, 200 - 9.6 * step)  # in all 2 rows of 24 pixels
    page.mouse.up()
    after = ask(page, "look()")
    assert after["left"] > look["left"] and after["top"] > look["top"] and after["zoom"] == look["zoom"]
    page.mouse.move(451, 152)
    assert tips(page)[0][0] == under and ask(page, "selected()") is None
    page.mouse.move(700, 120)
    assert ask(page, "look()") == after, "the button is up"


def test_the_axis_and_the_hex_values_follow_the_zoom(shown):
    _, page = one(shown)
    axis = f"{MAPS}[0].getContext('2d').getImageData(0, {MAPS}[0].height - 14, {MAPS}[0].width, 14).data.join()"
    before = page.evaluate(axis)
    canvas(page).focus()
    for _ in range(3):
        page.keyboard.press("+")
    assert page.evaluate(axis) != before
    left = f"[...{MAPS}[0].getContext('2d').getImageData(64, 0, 2, 60).data].some((part, i) => i % 4 === 3 && part)"
    assert not page.evaluate(left), "bytes are drawn over the offsets of the rows"


# ---- the keyboard ---------------------------------------------------------------------------------------------


def test_the_keyboard_reaches_every_byte_and_its_text(shown):
    record, page = one(shown)
    page.keyboard.press("Tab")
    assert page.evaluate(f"document.activeElement === {MAPS}[0]")
    walk = [
        ("ArrowRight", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowDown", 2 + ROW), ("ArrowLeft", 1 + ROW),
        ("ArrowUp", 1), ("ArrowLeft", 0), ("ArrowLeft", 0), ("End", record.stop - 1), ("ArrowRight", record.stop - 1),
        ("ArrowUp", record.stop - 1 - ROW), ("Home", 0), ("PageDown", 22 * ROW), ("PageUp", 0),
    ]  # fmt: skip
    for key, byte in walk:
        page.keyboard.press(key)
        assert ask(page, "selected()") == byte, key
        assert selected_lines(page) == list(describe(record, byte))
    assert page.locator(".kvviz-selected").get_attribute("aria-live") == "polite"
    assert page.evaluate("scrollY") == 0


def test_the_selected_byte_stays_visible_when_keys_zoom_and_move(shown):
    record, page = one(shown)
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    for _ in range(5):
        page.keyboard.press("+")
    assert ask(page, "look()")["zoom"] > 2
    for key, times in (("ArrowLeft", 70), ("ArrowUp", 20), ("ArrowRight", 70)):
        for _ in range(times):
            page.keyboard.press(key)
            byte = ask(page, "selected()")
            assert ask(page, f"where({byte})")["shown"], (key, byte)
    zoom = ask(page, "look()")["zoom"]
    page.keyboard.press("-")
    assert ask(page, "look()")["zoom"] == pytest.approx(zoom / 1.6)


def test_tab_leaves_the_map_and_keys_of_the_browser_work(shown):
    _, page = one(shown)
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Control+ArrowRight")
    assert ask(page, "selected()") == 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "BUTTON"


# ---- a finger -------------------------------------------------------------------------------------------------


def test_a_tap_selects_and_shows(shown):
    record, page = one(shown, width=390, touch=True)
    for byte in (200, 901):
        page.touchscreen.tap(*place(page, byte))
        picked = ask(page, "selected()")
        assert abs(picked - byte) <= 1  # a byte is 5 pixels wide
        assert tips(page) == [list(describe(record, picked))] and selected_lines(page) == list(describe(record, picked))


def test_two_fingers_zoom_and_one_finger_moves(shown):
    _, page = one(shown, width=390, touch=True)
    session = page.context.new_cdp_session(page)

    def touch(kind, *points):
        places = [{"x": x, "y": y, "id": n} for n, (x, y) in enumerate(points)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

    x, y = place(page, 700)
    touch("touchStart", (x - 20, y), (x + 20, y))
    for wide in (30, 40, 60):
        touch("touchMove", (x - wide, y), (x + wide, y))
    touch("touchEnd")
    look = ask(page, "look()")
    assert 2.5 < look["zoom"] < 3.5 and ask(page, "selected()") is None
    touch("touchStart", (200, y))
    for at in (180, 150, 120):
        touch("touchMove", (at, y))
    touch("touchEnd")
    after = ask(page, "look()")
    assert after["left"] > look["left"] and after["zoom"] == look["zoom"]


def test_controls_are_large_enough_for_fingers(shown):
    _, page = one(shown, width=390, touch=True)
    sizes = page.evaluate(
        "[...document.querySelectorAll('.kvviz-bar button, .kvviz-bar input, .kvviz-legend button')]"
        ".map(it => it.getBoundingClientRect()).map(box => Math.min(box.width, box.height))"
    )
    assert len(sizes) > 5 and min(sizes) >= 40


# ---- controls -------------------------------------------------------------------------------------------------


def test_a_legend_entry_highlights_its_bytes(shown):
    record, page = one(shown)
    contested, right = first(record, "contested"), first(record, "right")
    plain = [pixel(page, byte) for byte in (contested, right)]
    button = page.locator("[data-kvviz=contested] button")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert button.get_attribute("aria-pressed") == "true" and ask(page, "lit()") == {"state": 1}
    assert pixel(page, contested) == plain[0] and sum(pixel(page, right)) > sum(plain[1]) + 60
    other = page.locator('[data-kvviz="hue 0"] button')
    other.press("Enter")
    assert [b.get_attribute("aria-pressed") for b in (button, other)] == ["false", "true"]
    assert [pixel(page, byte) for byte in (contested, right)] == plain, "layer 0 writes both bytes"
    other.click()
    assert other.get_attribute("aria-pressed") == "false" and ask(page, "lit()") is None
    assert [pixel(page, byte) for byte in (contested, right)] == plain


def test_a_legend_entry_highlights_all_that_its_layer_owns_or_writes(shown):
    record, page = one(shown)
    bytes_of = [next(r.start for r in record.ranges if r.owner.layer == n and r.state == "right") for n in range(3)]
    plain = [pixel(page, byte) for byte in bytes_of]
    assert page.get_by_label("highlight").count() == 0, "the legend has an entry for each layer"
    entry = page.locator('[data-kvviz="hue 1"] button')
    entry.click()
    assert [pixel(page, byte) == colour for byte, colour in zip(bytes_of, plain, strict=True)] == [False, True, False]
    entry.click()
    assert [pixel(page, byte) for byte in bytes_of] == plain


def test_one_of_many_layers_is_highlighted_by_name(shown):
    spec, middle, _ = giant()
    page = shown(MapView(middle, row_bytes=spec.page_size_bytes))
    choice = page.get_by_label("highlight")
    assert choice.locator("option").all_inner_texts()[:3] == ["highlight: everything", "layer 0", "layer 1"]
    choice.select_option("layer 6")
    assert ask(page, "lit()") == {"hue": 6}


@pytest.mark.parametrize("state", ["contested", "misplaced"])
def test_the_text_of_a_wrong_byte_names_state_and_owner(shown, state):
    spec, record = story()[:2] if state == "contested" else one_stranger()
    page = shown(MapView(record, row_bytes=spec.page_size_bytes))
    byte = first(record, state)
    page.mouse.click(*place(page, byte))
    lines = selected_lines(page)
    assert lines == list(describe(record, byte)) and lines[2].startswith(f"{state}: written by ")
    assert lines[1].startswith(f"{record.at(byte).owner}, byte 0 of ")


def test_go_to_byte_takes_numbers_and_explains_other_input(shown):
    record, page = one(shown)
    box = page.get_by_label("go to byte")
    for text, byte in (("0x10", 16), ("1439", 1439), (" 7 ", 7)):
        box.fill(text)
        box.press("Enter")
        assert ask(page, "selected()") == byte and selected_lines(page) == list(describe(record, byte))
    for text in ("nonsense", "12x", "-1", "1.5", "1440"):
        box.fill(text)
        box.press("Enter")
        assert selected_lines(page) == [f"{text} is not a byte of this storage: give a number from 0 to 1439"]
        assert ask(page, "selected()") == 7


def test_maps_of_one_view_share_pointer_selection_and_zoom(shown):
    records, page = two(shown)
    for n, byte in ((0, 17), (1, 500)):
        hover(page, byte, n)
        assert tips(page) == [list(describe(record, byte)) for record in records]
    canvas(page, 1).focus()
    page.mouse.wheel(0, -100)
    page.wait_for_function(f"{MAPS}[0].kvviz.look().zoom > 1")
    assert ask(page, "look()", 0) == ask(page, "look()", 1)
    left, (x, y) = ask(page, "look()")["left"], place(page, 500, 1)
    page.mouse.down()
    page.mouse.move(x - 40, y, steps=4)
    page.mouse.up()
    assert ask(page, "look()", 0) == ask(page, "look()", 1) and ask(page, "look()")["left"] > left
    page.mouse.move(2, 2)
    assert tips(page) == [None, None]
    page.mouse.click(*place(page, 500, 1))
    assert [ask(page, "selected()", n) for n in (0, 1)] == [500, 500]
    assert [selected_lines(page, n) for n in (0, 1)] == [list(describe(record, 500)) for record in records]
    page.locator('[data-kvviz="hue 1"] button').first.click()
    assert [ask(page, "lit()", n) for n in (0, 1)] == [{"hues": 1}] * 2
    assert page.locator("[aria-pressed=true]").count() == 2


def test_a_step_changes_the_tooltip(shown):
    _, record, _ = story()
    planes = [bytes(record.values)]
    for value in (11, 22):
        planes.append(planes[-1][:10] + bytes([value]) + planes[-1][11:])
    page = shown(MapView(record, row_bytes=ROW, frames=[("one writes", planes[1]), ("two writes", planes[2])]))
    slider = page.get_by_label("step through the writes")
    page.mouse.click(*place(page, 10))
    for key, title, value in (("End", "two writes", 22), ("ArrowLeft", "one writes", 11), ("Home", "before", None)):
        slider.focus()
        hover(page, 10)
        slider.press(key)
        value = planes[0][10] if value is None else value
        assert tips(page)[0][0] == selected_lines(page)[0] == f"byte 10 (0xa): 0x{value:02x} = {value}"
        assert page.locator(".kvviz-bar label").inner_text().strip() == title


def test_the_last_block_of_44_gibibytes_is_reached_in_two_steps(shown):
    spec, record, end = giant()
    page = shown(MapView(record, row_bytes=spec.page_size_bytes // 16))
    byte = end.stop - 1000
    box = page.get_by_label("go to byte")
    box.fill(hex(byte))
    box.press("Enter")
    assert selected_lines(page) == list(describe(end, byte)) and ask(page, f"where({byte})")["shown"]
    hover(page, byte)
    assert tips(page) == [list(describe(end, byte))]
    page.get_by_role("button", name="back to the first view").click()
    strip = page.locator(".kvviz-strip")
    size = strip.bounding_box()
    page.mouse.click(size["x"] + size["width"] - 112, size["y"] + 12)
    middle = canvas(page).bounding_box()
    page.mouse.move(middle["x"] + 500, middle["y"] + 200)
    under = int(tips(page)[0][0].split()[1])
    assert under >= end.start and tips(page) == [list(describe(end, under))]
