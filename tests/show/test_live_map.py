"""The interactive map agrees with text, figure and record in every byte. It is small, repeatable and safe."""

import base64
import io
import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from kvviz.audit.audit import audit_scales
from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.codes import decode
from kvviz.cache.modes import MODES, SCALE_BYTES, get_mode
from kvviz.cache.spec import CacheSpec
from kvviz.show.byte_map import byte_map
from kvviz.show.byte_map_text import letter
from kvviz.show.colours import HUES, rgb
from kvviz.show.describe import describe, hues_of, style_of
from kvviz.show.live_map import MapView, clipped
from kvviz.show.overview import overview
from kvviz.show.states import STATES

EVERY = "n => {{ const m = document.querySelector('canvas').kvviz; return [...Array(n).keys()].map(m.{}) }}"
"""Returns the map's answer for each of its first n bytes."""

INT8 = "int8_per_token_head"
SCALED = tuple(mode.name for mode in MODES.values() if mode.is_per_token_head)


def story(
    mode: str = "int8_per_token_head", carve: str = "shape", layout: str = "cross-layer NHD", layers: int = 3, **more
):
    """Return a small cache of random bytes: its spec, its map with values, and its audit."""
    spec = CacheSpec(layers, 3, 2, 2, 16, mode, **more)
    cache = allocate(spec, layout, "cpu")
    torch.manual_seed(3)
    cache.storages[0].copy_(torch.randint(0, 256, cache.storages[0].shape, dtype=torch.uint8))
    writers = cache.writers(cache.carve_scales(carve))
    record = byte_map(cache.owners(), writers, values=cache.storages[0], kv_cache_dtype=mode)
    return spec, record, audit_scales(cache.owners(), writers)


def odd_views() -> list[View]:
    """Return views with negative and zero strides, overlaps, padding, several writers and other itemsizes."""
    heap = Storage("heap", 600)
    return [
        View("backwards", heap, (5, 4), (-20, 3), 100, 2, ("block", "token")),
        View("repeated", heap, (3, 4, 2), (40, 0, 5), 70, 4, ("block", "head", "x")),
        View("itself", heap, (6, 6), (7, 5), 300, 4),
        View("cells", heap, (4, 8), (32, 1), 400, 1, ("block", "byte")),
        View("gaps", heap, (4, 8), (32, 2), 410, 1, ("block", "byte"), "scale"),
        View("empty", heap, (0, 8), (32, 2), 0, 1),
        View("lone", heap, (), (), 7, 8),
    ]


def data_of(html: str) -> dict:
    """Return the data of the script."""
    data, _ = json.JSONDecoder().raw_decode(html.partition("const DATA = ")[2])
    return data


@pytest.mark.browser
@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize("carve", ["shape", "strides"])
def test_script_and_record_describe_every_byte_alike(opened, mode, carve):
    spec, record, _ = story(mode, carve)
    page = opened(MapView(record, row_bytes=spec.page_size_bytes).html)
    lines = page.evaluate(EVERY.format("describe"), record.stop)
    assert [tuple(each) for each in lines] == [describe(record, byte) for byte in range(record.stop)]


@pytest.mark.browser
def test_script_and_record_agree_on_unusual_views(opened):
    views = odd_views()
    for owners, claims in ((views, ()), (views[:4], [View("cells", views[0].storage, (4, 8), (32, 1), 420, 1)])):
        record = byte_map(owners, claims)
        page = opened(MapView(record, row_bytes=50).html)
        expected = [stretch.state for stretch in record.ranges for _ in range(stretch.stop - stretch.start)]
        assert page.evaluate("n => document.querySelector('canvas').kvviz.painted(0, n)", record.stop) == expected
        assert page.evaluate(EVERY.format("state"), record.stop) == expected
        lines = page.evaluate(EVERY.format("describe"), record.stop)
        assert [tuple(each) for each in lines] == [describe(record, byte) for byte in range(record.stop)]
    assert {stretch.state for stretch in byte_map(views).ranges} >= {"right", "contested", "unowned"}


@pytest.mark.parametrize("carve", ["shape", "strides"])
def test_the_picture_shows_the_state_of_every_byte(carve):
    spec, record, _ = story(carve=carve)
    html = MapView(record, row_bytes=64).html
    source = base64.b64decode(re.search(r'src="data:image/png;base64,([^"]+)"', html).group(1))
    pixels = np.asarray(Image.open(io.BytesIO(source)).convert("RGB"))
    scale, height = pixels.shape[1] // 64, pixels.shape[0] // (record.stop // 64)
    hues = hues_of([record])
    for stretch in record.ranges:
        for byte in range(stretch.start, stretch.stop):
            row, column = divmod(byte, 64)
            cell = pixels[row * height : row * height + height - 1, column * scale : (column + 1) * scale]
            assert (cell == rgb(style_of(stretch, hues).fill)).all(axis=2).mean() > 0.5, (byte, stretch)


def test_text_figure_and_html_count_alike():
    spec, record, _ = story()
    view = MapView({"a title": record}, row_bytes=64)
    strips = "".join(re.findall(r"\|(.*?)\|", view.text))
    marks = {letter(stretch): stretch.state for stretch in record.ranges}
    for state in STATES:
        assert sum(marks[mark] == state for mark in strips) == record.count(state)
    counted = re.search(r'kvviz-counts">(.*?)<', view.html).group(1)
    for state, word in (("contested", "contested"), ("unreached", "written by nobody"), ("right", "right")):
        assert f"{record.count(state)} {word}" in counted and f"{record.count(state)} {word}" in view.alt_text


def test_the_same_record_gives_the_same_bytes_and_no_ids_or_addresses():
    spec, record, result = story()
    views = [MapView(record, row_bytes=64, finding=result.findings[0]).html for _ in range(2)]
    assert views[0] == views[1]
    assert not re.search(r"""\bid=|https?:|src="(?!data:)|\burl\(|@import""", views[0])


def test_sizes_are_those_of_a_notebook():
    spec = CacheSpec(4, 4, 8, 4, 60, "int8_per_token_head")
    cache = allocate(spec, "cross-layer NHD", "cpu")
    cache.storages[0].copy_(torch.randint(0, 256, (1 << 16,), dtype=torch.uint8))
    writers = cache.writers(cache.carve_scales("shape"))
    with_values = byte_map(cache.owners(), writers, values=cache.storages[0], kv_cache_dtype=spec.kv_cache_dtype)
    bare = len(MapView(byte_map(cache.owners(), writers), row_bytes=1024).html)
    one = len(MapView(with_values, row_bytes=1024).html)
    two = len(MapView({"a": with_values, "b": with_values}, row_bytes=1024).html)
    print(f"64 KiB: {one / 1000:.0f} KB with values, {bare / 1000:.0f} without, {two / 1000:.0f} for two")
    assert one <= 140_000 and two - one <= 100_000


def test_forty_gibibytes_are_a_small_page_made_at_once():
    spec = CacheSpec(28, 50_269, 16, 8, 128, "fp8_per_token_head")
    cache = allocate(spec, "cross-layer NHD", "meta")
    owners, writers = cache.owners(), cache.writers(cache.carve_scales("shape"))
    start = time.process_time()
    record = byte_map(owners, writers, window=(1 << 35, (1 << 35) + 65_536))
    html = MapView(record, row_bytes=2112).html
    print(f"{record.storage.nbytes / 2**30:.1f} GiB: {time.process_time() - start:.2f} s, {len(html) / 1024:.0f} KiB")
    assert len(html) <= 150 * 1024 and "Geometry only" in html
    strip = data_of(html)["maps"][0]["strip"]
    assert sum(column[0] for column in strip) == sum(view.num_elements * view.itemsize for view in owners)
    assert sum(column[1] for column in strip) == sum(view.num_elements * view.itemsize for view in record.writers)


@pytest.mark.parametrize("layout", ["NHD", "cross-layer NHD", "BLHNC", "LBNHC"])
@pytest.mark.parametrize("columns", [1, 37, 512])
def test_the_overview_counts_every_byte(layout, columns):
    spec = CacheSpec(3, 4, 4, 2, 16, "int8_per_token_head")
    cache = allocate(spec, layout, "meta")
    storage = cache.storage_of(1)
    record = byte_map(cache.owners(), cache.writers(cache.carve_scales("strides")), storage=storage)
    found = overview(record, columns)
    assert [c.start for c in found[1:]] == [c.stop for c in found[:-1]] and found[-1].stop == storage.nbytes
    for column in found:
        for views, count in ((record.owners, column.owned), (record.writers, column.written)):
            claimed = np.concatenate([view.all_bytes for view in views])
            assert ((claimed >= column.start) & (claimed < column.stop)).sum() == count


def test_the_overview_of_odd_views():
    record = byte_map(odd_views())
    for column in overview(record, 60):
        claimed = np.concatenate([view.all_bytes for view in record.owners if view.num_elements])
        assert ((claimed >= column.start) & (claimed < column.stop)).sum() == column.owned


HOSTILE = [
    "<script>alert(1)</script>",
    "\"quoted\" 'and' `ticked` ${x}",
    "two\nlines\r\x00",
    "\u202eright to left\u202c \u05e9\u05dc\u05d5\u05dd",
    "</script><img src=x onerror=alert(2)>",
    "x" * 10_000,
]


@pytest.mark.browser
@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_shown_as_text(opened, name):
    storage = Storage(name, 256)
    views = [View(name, storage, (4, 16), (32, 1), 0, 1, (name, "byte"), name), View("b", storage, (4,), (32,), 8)]
    view = MapView({name: byte_map(views, values=np.arange(256, dtype=np.uint8))}, row_bytes=64)
    assert len(view.html) < 80_000
    page = opened(view.html)
    assert page.locator("script").count() == 1 and page.locator("img").count() == 1
    assert not page.dialogs and not page.errors and all(url.startswith("data:") for url in page.asked)
    assert page.locator(".kvviz-title").inner_text() == clipped(name).replace("  ", " ").strip()
    assert clipped(name)[:20] in page.evaluate("document.querySelector('canvas').kvviz.describe(3)")[1]


def test_layers_that_share_a_colour_are_named():
    spec, record, _ = story(layers=len(HUES) + 2)
    html = MapView(record, row_bytes=spec.page_size_bytes).html
    assert "layers 0, 5" in html and "layers 1, 6" in html
    assert {view[5] for view in data_of(html)["maps"][0]["owners"]} == set(range(len(HUES) + 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: MapView({}, row_bytes=8), "there is no map to show"),
        (
            lambda m: MapView({"a": 3}, row_bytes=8),
            "maps must have titles .str. as keys and ByteMaps as values, but 'a' has a int",
        ),
        (lambda m: MapView(m, row_bytes=0), "row_bytes must be at least 1, not 0"),
        (lambda m: MapView(m, row_bytes=6.4), "row_bytes must be an integer, not 6.4"),
        (
            lambda m: MapView({"a": m, "b": m}, row_bytes=8, frames=[("x", b"")]),
            "frames need exactly one map, but 2 maps are given",
        ),
        (lambda m: MapView(m, row_bytes=8, frames=[("x", b"12")]), "frame 'x' has 2 bytes, but the map's window has"),
    ],
)
def test_wrong_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call(story()[1])


def test_frames_are_differences_and_add_up():
    spec, record, _ = story()
    first = bytearray(record.values)
    first[10:14], first[100] = b"\x01\x02\x03\x04", first[100] ^ 255
    second = bytearray(first)
    second[500] ^= 1
    frames = [("layer 0 writes", bytes(first)), ("layer 1 writes", bytes(second))]
    (data,) = data_of(MapView(record, row_bytes=64, frames=frames).html)["maps"]
    plane = bytearray(record.values)
    for (title, changes), (given, after) in zip(data["frames"], frames, strict=True):
        for at, text in changes:
            piece = base64.b85decode(text.translate(str.maketrans(",:.", "<>&")))
            plane[at : at + len(piece)] = piece
        assert (title, bytes(plane)) == (given, after)
    assert sum(len(text) for _, changes in data["frames"] for _, text in changes) < 40


def test_the_bundle_holds_text_always_and_a_picture_on_request():
    spec, record, result = story()
    data, _ = MapView(record, row_bytes=64)._repr_mimebundle_()
    assert set(data) == {"text/plain", "text/html"} and "contested" in data["text/plain"]
    for bundle in (
        MapView(record, row_bytes=64, finding=result.findings[0], png=True)._repr_mimebundle_(),
        MapView(record, row_bytes=64)._repr_mimebundle_(include={"image/png"}),
    ):
        assert bundle[0]["image/png"].startswith(b"\x89PNG") and "contested" in bundle[1]["image/png"]["alt"]


def test_every_state_has_a_swatch_that_highlights_it():
    spec, record, _ = story()
    html = MapView(record, row_bytes=64).html
    keys = re.findall(r'<li data-kvviz="(.*?)"', html)
    assert keys == ["hue 0", "hue 1", "hue 2", "contested", "unreached"] and set(STATES) >= set(keys[3:])


def disagreeing() -> list:
    """Return three maps. In two maps, a writer has the name of the owner, but another shape or other names of axes.

    In the third map, the names of two views have the same beginning.
    """
    heap = Storage("heap", 64)
    owner = View("v", heap, (4, 2, 8), (16, 8, 1), axes=("token", "head", "byte"))
    long = "x" * 300
    twins = [View(long + end, heap, (4, 8), (16, 1), at, axes=("token", "byte")) for end, at in (("a", 0), ("b", 8))]
    swapped = [View(view.name, heap, view.shape, view.stride, 8 - view.offset, axes=view.axes) for view in twins]
    return [
        byte_map([owner], [View("v", heap, (2, 4, 8), (32, 8, 1), axes=owner.axes)]),
        byte_map([owner], [View("v", heap, owner.shape, owner.stride, axes=("head", "token", "byte"))]),
        byte_map(twins, swapped),
    ]


@pytest.mark.browser
@pytest.mark.parametrize("which", range(3))
def test_a_writer_with_the_name_of_an_owner_and_another_form_is_not_the_owner(opened, which):
    record = disagreeing()[which]
    page = opened(MapView(record, row_bytes=16).html)
    expected = [stretch.state for stretch in record.ranges for _ in range(stretch.stop - stretch.start)]
    assert page.evaluate("document.querySelector('canvas').kvviz.painted(0, 64)") == expected
    assert page.evaluate(EVERY.format("state"), 64) == expected and "misplaced" in expected


@pytest.mark.browser
def test_scales_with_fewer_axes_than_data_are_decoded_if_shapes_fit(opened):
    heap = Storage("heap", 256)
    data = View("layer 0 K data", heap, (4, 2, 8), (16, 8, 1), axes=("token", "head", "dim"))
    for shape in ((4, 2), (4,), (2, 4), (4, 2, 8)):
        scale = View("layer 0 K scale", heap, shape, tuple(range(len(shape), 0, -1)), 32, 4, role="scale")
        record = byte_map([data, scale], values=np.arange(256, dtype=np.uint8), kv_cache_dtype=INT8)
        lines = opened(MapView(record, row_bytes=16).html).evaluate(EVERY.format("describe"), 64)
        assert [tuple(each) for each in lines] == [describe(record, byte) for byte in range(64)]
        assert any("code x scale" in line for line in lines[3]) == (shape in ((4, 2), (4,), (4, 2, 8)))


def test_three_hundred_writers_are_counted():
    heap = Storage("heap", 8)
    record = byte_map([View(f"v{n}", heap, (8,), (1,)) for n in range(300)])
    assert "written by 300" in describe(record, 3)[2] and "and 294 more" in describe(record, 3)[2]


def test_a_row_is_no_longer_than_the_window():
    spec, record, _ = story()
    assert MapView(record, row_bytes=10**10).row_bytes == record.stop


def test_numpy_integers_are_integers():
    _, record, _ = story()
    assert MapView(record, row_bytes=np.int32(64)).html == MapView(record, row_bytes=64).html


def test_a_finding_without_a_place_raises():
    spec, record, result = story()
    finding = next(f for f in result.findings if f.kind == "collision")
    with pytest.raises(ValueError, match="of kind 'oversized', but only of kind collision, misplaced, permuted"):
        MapView(record, row_bytes=64, finding=replace(finding, kind="oversized"))
    with pytest.raises(ValueError, match="this finding of kind 'collision' has no place"):
        MapView(record, row_bytes=64, finding=replace(finding, example=()))


def test_steps_have_a_sentence_each():
    spec, record, _ = story()
    after = bytearray(record.values)
    after[10:14] = bytes(255 - byte for byte in after[10:14])
    view = MapView(record, row_bytes=64, frames=[("layer 0 writes", bytes(after)), ("nobody writes", bytes(after))])
    for text in (view.text, view.alt_text):
        assert "Then layer 0 writes: 4 bytes lie in byte ranges that changed; the first are bytes [10, 14)" in text
        assert "Then nobody writes: 0 bytes" in text


@pytest.mark.parametrize("mode", [mode for mode in SCALED if get_mode(mode).can_decode_bytes])
def test_codes_are_those_of_the_reference(mode):
    """The map decodes without torch. The reference of the kernels must give the same codes for every byte."""
    values = torch.arange(256, dtype=torch.uint8)
    shown = torch.tensor([get_mode(mode).codes_in(value) for value in range(256)]).flatten().float()
    expected = decode(values, torch.tensor(1.0), mode).float()  # a scale of 1.0 has the zero-point 0
    assert torch.equal(shown.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@pytest.mark.browser
def test_a_float16_scale_is_decoded(opened, monkeypatch):
    new = replace(get_mode("fp8_per_token_head"), name="new_per_token_head", scale_dtype="float16")
    monkeypatch.setitem(MODES, new.name, new)
    _, record, _ = story()
    halves = [replace(view, itemsize=2) if view.role == "scale" else view for view in record.owners]
    owners = tuple(
        replace(view, offset=view.offset * 2, stride=tuple(2 * s for s in view.stride))
        if view.role == "scale"
        else view
        for view in halves
    )
    record = byte_map(owners, owners, values=record.values, kv_cache_dtype=new.name)
    page = opened(MapView(record, row_bytes=64).html)
    lines = page.evaluate(EVERY.format("describe"), record.stop)
    assert [tuple(each) for each in lines] == [describe(record, byte) for byte in range(record.stop)]
    assert any("code x scale" in line for each in lines for line in each)


@pytest.mark.browser
@pytest.mark.parametrize("change", [{"code": "bfloat16"}, {"scale_dtype": "float8_e8m0fnu"}])
def test_a_code_or_scale_that_cannot_be_decoded_says_so(opened, monkeypatch, change):
    monkeypatch.setitem(SCALE_BYTES, "float8_e8m0fnu", 4)
    new = replace(get_mode("fp8_per_token_head"), name="new_per_token_head", **change)
    monkeypatch.setitem(MODES, new.name, new)
    _, record, _ = story()
    record = replace(record, kv_cache_dtype=new.name)
    page = opened(MapView(record, row_bytes=64).html)
    lines = page.evaluate(EVERY.format("describe"), record.stop)
    assert [tuple(each) for each in lines] == [describe(record, byte) for byte in range(record.stop)]
    text = f"a {new.code} code with a {new.scale_dtype} scale: this map cannot decode its value"
    assert describe(record, 0)[-1] == text and not any("code x scale" in line for each in lines for line in each)
