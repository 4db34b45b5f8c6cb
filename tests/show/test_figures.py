"""Figures agree with their records: rectangles, arrows, words, files."""

from collections import Counter
from dataclasses import replace
from functools import cache

import matplotlib
import matplotlib.patches
import matplotlib.text
import nbformat
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from nbclient import NotebookClient

from kvviz.audit.audit import Finding, audit_scales
from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec
from kvviz.show.byte_map import byte_map
from kvviz.show.colours import CONTESTED, HUES, MISPLACED, OUTLINE, UNOWNED, UNREACHED, luminance, owned
from kvviz.show.describe import style_of
from kvviz.show.figures import byte_map_figure
from kvviz.show.figures.buffer_figure import buffer_figure, pieces, stripes
from kvviz.show.figures.byte_map_figure import GAP
from kvviz.show.figures.canvas import render, save, ticks
from kvviz.show.figures.cell_figure import cell_figure, cell_parts
from kvviz.show.rows import rows
from kvviz.show.states import STATES

INT8 = "int8_per_token_head"
SPEC = CacheSpec(4, 4, 2, 2, 16, INT8)
VARIANTS = {
    "story": (SPEC, "cross-layer NHD", 160),
    "HND": (SPEC, "cross-layer HND", 160),
    "no tail": (replace(SPEC, tail=False), "cross-layer NHD", 128),
    "padded": (replace(SPEC, page_size_padded=192), "cross-layer NHD", 192),
    "permuted": (SPEC, "HND", 160),
    "odd rows": (SPEC, "cross-layer NHD", 77),
    "more layers than hues": (replace(SPEC, num_layers=7, num_blocks=2), "cross-layer NHD", 160),
}


def mapped(spec: CacheSpec, layout: str, carve: str, **options):
    """Return the map of layer 0's storage, and the audit."""
    cache = allocate(spec, layout, "meta")
    owners, writers = cache.owners(), cache.writers(cache.carve_scales(carve))
    storage = cache.storage_of(0)
    record = byte_map(
        [v for v in owners if v.storage == storage], [v for v in writers if v.storage == storage], **options
    )
    return record, audit_scales(owners, writers)


@cache
def pair(spec: CacheSpec = SPEC, layout: str = "cross-layer NHD"):
    """Return a right and a wrong map, and the audit of the wrong one."""
    right, _ = mapped(spec, layout, "strides")
    wrong, audit = mapped(spec, layout, "shape")
    return {"Every layer's scales lie in its own cells": right, "All layers' scales land on one place": wrong}, audit


@cache
def variant(name: str):
    """Return the maps of a variant and their figure, drawn once for all tests that only read it."""
    spec, layout, row_bytes = VARIANTS[name]
    maps, audit = pair(spec, layout)
    return maps, byte_map_figure.figure(maps, row_bytes=row_bytes, finding=audit.findings[0])


def panels(figure):
    """Return the axes of the maps, in order. The last axes of a figure belong to the legend, and are left out."""
    return figure.axes[:-1]


def drawn(ax) -> Counter:
    """Count the rectangles ``(left, right, top, bottom, style)``, without the outlines of findings."""
    found = Counter()
    for collection in ax.collections:
        if isinstance(collection, PolyCollection) and collection.get_label() != str(OUTLINE):
            for path in collection.get_paths():
                (a, t), (b, u) = path.vertices.min(axis=0), path.vertices.max(axis=0)
                found[round(a, 6), round(b, 6), round(t, 6), round(u, 6), collection.get_label()] += 1
    return found


def outlines(ax) -> list[tuple[float, float, float, float]]:
    paths = [p for c in ax.collections if c.get_label() == str(OUTLINE) for p in c.get_paths()]
    return [(*p.vertices.min(axis=0), *p.vertices.max(axis=0)) for p in paths]


def words(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def hues_of(record) -> dict[int, int]:
    return {part.layer: part.layer for part in (stretch.owner for stretch in record.ranges) if part}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_byte_range_is_drawn_once_in_the_style_of_its_state(name):
    row_bytes = VARIANTS[name][2]
    maps, figure = variant(name)
    for ax, record in zip(panels(figure), maps.values(), strict=True):
        expected, hues, pixels = Counter(), hues_of(record), ax.get_window_extent().width
        for number, row in enumerate(rows(record, row_bytes)):
            for stretch in row.ranges:
                left, right = stretch.start - row.start, stretch.stop - row.start
                style = style_of(stretch, hues)
                assert pixels / row_bytes * (right - left) > 1, "a stretch of less than a pixel"
                expected[left, right, round(number + GAP, 6), round(number + 1 - GAP, 6), str(style)] += 1
        found = drawn(ax)
        loose = Counter({key[:4]: n for key, n in expected.items()})
        assert Counter({key[:4]: n for key, n in found.items()}) == loose
        for key, style in ((key[:4], key[4]) for key in expected):
            wide = (key[1] - key[0]) * pixels / 100 / row_bytes >= 0.08
            assert not wide or (*key, style) in found


@pytest.mark.parametrize("name", VARIANTS)
def test_panels_share_one_byte_scale(name):
    row_bytes = VARIANTS[name][2]
    axes = panels(variant(name)[1])
    assert {ax.get_xlim() for ax in axes} == {(0, row_bytes)}
    assert len({(ax.get_position().x0, ax.get_position().x1) for ax in axes}) == 1
    assert len({tuple(ax.get_xticks()) for ax in axes}) == 1
    tops = [ax.get_position().y1 for ax in axes]
    assert tops == sorted(tops, reverse=True)


def test_every_state_has_a_style_of_its_own():
    maps, _ = pair(*VARIANTS["padded"][:2])
    styles = [state.style for state in STATES.values() if state.style]
    assert len(set(styles)) == len(styles) == len(STATES) - 1
    for record in (*maps.values(), mapped(*VARIANTS["permuted"][:2], "shape")[0]):
        hues = hues_of(record)
        for stretch in record.ranges:
            if stretch.state == "right":
                owner = stretch.owner
                assert style_of(stretch, hues) == owned(owner.layer, owner.role, owner.half)
            else:
                assert style_of(stretch, hues) == STATES[stretch.state].style


def test_labels_offsets_and_counts_are_those_of_the_record():
    maps, figure = variant("story")
    for ax, record in zip(panels(figure), maps.values(), strict=True):
        for row in rows(record, 160):
            assert row.label
            assert words(ax).count(row.label) == words(ax).count(f"{row.start:#x}") == 1
    assert "all 2560 bytes right" in figure.alt_text
    assert "2560 bytes: 2048 right, 128 contested, 384 written by nobody" in figure.alt_text
    written = [text.get_text() for text in figure.texts]
    assert all(title in written for title in maps)


def test_letters_show_the_state_without_colour():
    maps, _ = pair()
    right, wrong = panels(byte_map_figure.figure(maps, row_bytes=160))
    assert (words(right).count("K"), words(right).count("V"), words(right).count("s")) == (64, 64, 128)
    assert (words(wrong).count("4"), words(wrong).count("s")) == (32, 0)
    assert "K" not in words(panels(byte_map_figure.figure(maps, row_bytes=160, letters=False))[0])
    (ax,) = panels(byte_map_figure.figure(mapped(*VARIANTS["permuted"][:2], "shape")[0], row_bytes=40))
    assert words(ax).count("K b0 t0 h1") == 1 and words(ax).count("scale") == 16
    (ax,) = panels(byte_map_figure.figure(mapped(SPEC, "cross-layer NHD", "shape")[0], row_bytes=40))
    assert words(ax).count("4 writers") == 32


def test_layers_that_share_a_hue_have_their_number():
    _, figure = variant("more layers than hues")
    assert {f"L{layer} K" for layer in range(7)} <= set(words(panels(figure)[0]))
    assert any(text.startswith("layers 0, 5") for text in words(figure.axes[-1]))


def test_the_legend_names_what_occurs_and_nothing_else():
    maps, _ = pair()
    found = {name: words(byte_map_figure.figure(record, row_bytes=160).axes[-1]) for name, record in maps.items()}
    right, wrong = found.values()
    assert right == ["layer 0: K data, V data, scale", "layer 1", "layer 2", "layer 3"]
    assert [text.split(":")[0] for text in wrong[-2:]] == ["contested", "nobody writes here"]
    assert not any("padding" in text or "misplaced" in text for text in wrong)


@pytest.mark.parametrize("layout", ["cross-layer NHD", "cross-layer HND", "HND"])
def test_the_arrow_leads_from_the_rightful_to_the_actual_place(layout):
    maps, audit = pair(SPEC, layout)
    finding = next(f for f in audit.findings if f.kind in ("misplaced", "permuted"))
    right, wrong = panels(byte_map_figure.figure(maps, row_bytes=160, finding=finding))
    assert not right.patches and "belongs here" not in words(right)
    (arrow,) = [p for p in wrong.patches if isinstance(p, matplotlib.patches.FancyArrowPatch)]
    actual, rightful = ((*divmod(p.start_bytes, 160)[::-1], p.stop_bytes % 160) for p in finding.example[:2])
    ends = arrow._path_original.vertices[[0, -1]]
    for (x, y), (left, row, stop) in zip(ends, (rightful, actual), strict=True):
        assert x in (left, stop) and y == row + 0.5
    assert sorted(outlines(wrong)) == sorted((left, row, stop, row + 1) for left, row, stop in (rightful, actual))
    assert {"belongs here", "lies here"} <= set(words(wrong))


def test_no_text_lies_on_the_arrow_or_on_its_words():
    maps, audit = pair()
    for finding in (*audit.of_kind("misplaced")[:3], audit.of_kind("collision")[0]):
        figure = byte_map_figure.figure(maps, row_bytes=160, finding=finding)
        ax = panels(figure)[1]
        renderer = figure.canvas.get_renderer()
        boxes = {text: text.get_window_extent(renderer) for text in ax.texts}
        (arrow,) = ax.patches
        curve, t = ax.transData.transform(arrow._path_original.vertices), np.linspace(0, 1, 60)[:, None]
        if len(curve) == 2:
            curve = (1 - t) * curve[0] + t * curve[1]
        else:
            curve = (
                (1 - t) ** 3 * curve[0]
                + 3 * t * (1 - t) ** 2 * curve[1]
                + 3 * t**2 * (1 - t) * curve[2]
                + t**3 * curve[3]
            )
        for text, box in boxes.items():
            assert not any(box.contains(*spot) for spot in curve), text.get_text()
        labels = [t for t in boxes if t.get_weight() == "bold"]
        assert labels
        for label in labels:
            assert not [t.get_text() for t in boxes if t is not label and boxes[t].overlaps(boxes[label])]


def test_only_the_end_within_the_window_is_shown():
    record, audit = mapped(SPEC, "cross-layer NHD", "shape", window=(0, 640))
    finding = audit.of_kind("misplaced")[0]
    (ax,) = panels(byte_map_figure.figure(record, row_bytes=160, finding=finding))
    assert "lies here" in words(ax) and "belongs here" not in words(ax) and not ax.patches
    record, _ = mapped(SPEC, "cross-layer NHD", "shape", window=(640, 1280))
    (ax,) = panels(byte_map_figure.figure(record, row_bytes=160, finding=finding))
    assert "belongs here" in words(ax) and "lies here" not in words(ax)
    record, _ = mapped(SPEC, "cross-layer NHD", "shape", window=(1280, 2560))
    figure = byte_map_figure.figure(record, row_bytes=160, finding=finding)
    assert not {"belongs here", "lies here"} & set(words(panels(figure)[0]))
    assert "bytes [176, 180), is not on these maps" in figure.alt_text


def test_a_collision_names_its_writers():
    maps, audit = pair()
    ax = panels(byte_map_figure.figure(maps, row_bytes=160, finding=audit.of_kind("collision")[0]))[1]
    assert "4 layers write these 4 bytes, each as its K scale" in words(ax)
    assert outlines(ax) == [(16, 0, 20, 1)]
    maps, audit = pair(replace(SPEC, tail=False))
    ax = panels(byte_map_figure.figure(maps, row_bytes=128, finding=audit.of_kind("collision")[0]))[1]
    assert "5 views write these 4 bytes: layer 0 K data, the K scale of 4 layers" in words(ax)
    assert outlines(ax) == [(12, 0, 16, 1)]


def test_wrong_bytes_differ_from_their_neighbours_in_greyscale():
    looks = [(CONTESTED.hatch, CONTESTED.edge), (MISPLACED.hatch, MISPLACED.edge), (UNREACHED.hatch, UNREACHED.edge)]
    assert len(set(looks)) == 3 and UNOWNED.hatch not in (CONTESTED.hatch, MISPLACED.hatch, "")
    for hue in range(len(HUES)):
        styles = [owned(hue, "data", "K"), owned(hue, "data", "V"), owned(hue, "scale", "K")]
        assert not any(style.hatch for style in styles)
        k, v, scale = (luminance(style.fill) for style in styles)
        assert scale + 0.1 < k < v - 0.1 and v < luminance(UNREACHED.fill) - 0.1
    assert luminance(CONTESTED.fill) + 0.1 < luminance(MISPLACED.fill)


def test_views_that_name_no_layer_have_hues_and_names_too():
    storage = Storage("heap", 32)
    views = [View("weights", storage, (16,), (1,)), View("state", storage, (8,), (1,), 16)]
    figure = byte_map_figure.figure(byte_map(views), row_bytes=16)
    assert words(figure.axes[-1])[:2] == ["weights: data", "state"]
    assert figure.alt_text.startswith("Byte map of heap.")
    assert len({key[4] for key in drawn(figure.axes[0])}) == 3, "two owners and padding"


def all_figures():
    maps, audit = pair(CacheSpec(2, 2, 1, 1, 8, INT8))
    yield lambda: byte_map_figure.figure(maps, row_bytes=24, finding=audit.of_kind("collision")[0])
    yield lambda: byte_map_figure.figure(maps, row_bytes=24, finding=audit.of_kind("misplaced")[0])
    yield lambda: cell_figure(SPEC)
    yield lambda: buffer_figure(allocate(SPEC, "BLNHC", "meta"), block=1)


@pytest.mark.parametrize("make", list(all_figures()))
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_same_input_same_bytes(make, kind, tmp_path):
    first = save(make(), tmp_path / f"a.{kind}").read_bytes()
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None, "hatch.linewidth": 9, "axes.linewidth": 7}):
        again = make()
        assert save(again, tmp_path / f"b.{kind}").read_bytes() == first
        assert render(again, kind) == first


def test_the_display_bundle_has_a_picture_and_its_alt_text():
    figure = cell_figure(SPEC)
    data, about = figure._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG") and data["text/plain"] == figure.alt_text
    assert about["image/png"]["width"] == 1100


@pytest.mark.notebook
def test_a_figure_shows_once_in_a_notebook_and_leaves_pyplot_alone():
    show = (
        "from kvviz.cache.spec import CacheSpec\nfrom kvviz.show.figures.cell_figure import cell_figure\n"
        "cell_figure(CacheSpec(1, 1, 1, 1, 16))"
    )
    codes = (show, "import sys\n'matplotlib.pyplot' in sys.modules", f"import matplotlib.pyplot as plt\n{show}")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    NotebookClient(book, timeout=120, kernel_name="python3").execute()
    (before,), (pyplot,), (after,) = (cell.outputs for cell in book.cells)
    assert pyplot["data"]["text/plain"] == "False"
    for output in (before, after):
        assert output["output_type"] == "execute_result"
        assert set(output["data"]) == {"image/png", "text/plain"}
        assert output["data"]["text/plain"].startswith("fp8_per_token_head: a cell is 16 bytes of data")
        assert output["metadata"]["image/png"]["width"] == 1100


def test_dollars_are_dollars():
    record = byte_map([View(r"$\bad{$ of", Storage("$x$", 8), (8,), (1,))])
    for titles in ({r"$\bad{$ of": record}, {"costs $1 or $2": record}):
        figure = byte_map_figure.figure(titles, row_bytes=8)
        assert figure._repr_png_().startswith(b"\x89PNG")
        assert not any(text.get_parse_math() for text in figure.findobj(matplotlib.text.Text))
    cache = allocate(SPEC, "BLNHC", "meta")
    assert buffer_figure({r"$\bad{$": cache})._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packing", ["packed", "split"])
@pytest.mark.parametrize("tail", [True, False])
def test_a_cell_is_drawn_as_the_spec_says(mode, packing, tail):
    spec = replace(SPEC, kv_cache_dtype=mode, tail=tail)
    figure = cell_figure(spec, packing=packing)
    *cells, page, _ = figure.axes
    starts = (0, spec.cell_bytes if packing == "packed" else 0)
    parts = [part for half, start in zip("KV", starts, strict=True) for part in cell_parts(spec, half, start)]
    found = Counter(key[:2] for ax in cells for key in drawn(ax).elements())
    assert found == Counter((part.start, part.stop) for part in parts)
    ends = sorted({key[1] for key in drawn(page)})
    assert ends[-1] == spec.page_size_bytes and {spec.real_page_size_bytes, spec.content_page_size_bytes} <= set(ends)
    hatched = any(key[4] == str(CONTESTED) for ax in cells for key in drawn(ax))
    assert hatched == (spec.is_per_token_head and not tail)
    for size in (spec.real_page_size_bytes, spec.content_page_size_bytes, spec.page_size_bytes):
        assert str(size) in figure.alt_text
    if mode == "int4_per_token_head":
        assert any("zero-point" in word for ax in cells for word in words(ax))


def test_padding_is_drawn_after_the_content():
    spec = replace(SPEC, page_size_padded=400)
    page = cell_figure(spec).axes[-2]
    assert [key[:2] for key in drawn(page) if key[4] == str(UNOWNED)] == [(160, 400)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mode", ["bfloat16", INT8])
@pytest.mark.parametrize("one_storage", [None, True])
def test_stripes_are_the_bytes_of_the_owners(name, mode, one_storage):
    cache = allocate(CacheSpec(3, 4, 2, 2, 16, mode), name, "meta", one_storage=one_storage)
    expected: dict[str, dict[int, tuple]] = {}
    for view in cache.owners():
        layer, bytes_ = int(view.name.split()[1]), view.bytes_of(view.starts)
        for block in range(4):
            for byte in bytes_[block].ravel().tolist():
                expected.setdefault(view.storage.name, {})[byte] = (layer, block)
    found = stripes(cache)
    assert {
        storage: {byte: (s.layer, s.block) for s in mine for byte in range(s.start, s.stop)}
        for storage, mine in found.items()
    } == expected


@pytest.mark.parametrize(
    "layout, count, size",
    [
        ("NHD", 4, 160),
        ("HND", 4, 160),
        ("LHBNC", 8, 80),
        ("cross-layer NHD", 1, 640),
        ("BHLNC", 1, 640),
        ("BLHNC", 1, 640),
    ],
)
def test_pieces_of_a_block_are_counted_and_outlined(layout, count, size):
    cache = allocate(SPEC, layout, "meta")
    figure = buffer_figure({"Here": cache}, block=1)
    assert f"block 1 is {count} piece{'s' * (count > 1)} of {size} bytes" in figure.alt_text
    found = [(start, stop) for mine in stripes(cache).values() for block, start, stop in pieces(mine) if block == 1]
    assert sorted((left, right) for left, _, right, _ in outlines(figure.axes[0])) == sorted(found)
    assert len(found) == count and {stop - start for start, stop in found} == {size}


def test_padding_does_not_divide_a_block():
    cache = allocate(replace(SPEC, page_size_padded=192), "BLHNC", "meta")
    figure = buffer_figure({"Padded": cache}, block=1)
    assert "block 1 is 1 piece of 736 bytes, padding between its pages included" in figure.alt_text
    assert any(key[4] == str(UNOWNED) for key in drawn(figure.axes[0]))


def test_buffers_share_one_scale_and_count_what_is_left_out():
    caches = {
        kind: allocate(replace(SPEC, num_layers=9), layout, "meta") for kind, layout in (("a", "NHD"), ("b", "BLNHC"))
    }
    figure = buffer_figure(caches, block=0, max_layers_shown=3)
    one, two = figure.axes
    assert one.get_xlim() == two.get_xlim() == (0, 9 * 640)
    assert {tuple(ax.get_xticks()) for ax in figure.axes} == {tuple(one.get_xticks())}
    assert "… and 6 more buffers of the same kind, not drawn" in words(one) and len(outlines(one)) == 3
    assert "block 0 is 9 pieces of 160 bytes" in figure.alt_text


@pytest.mark.parametrize("size, most", [(160, 14), (77, 14), (1, 3), (4224, 14), (123457, 11), (3 * 10**9, 11)])
def test_ticks_are_few_and_even(size, most):
    marks = ticks(size, most)
    assert marks[0] == 0 and marks[-1] <= size and 2 <= len(marks) <= most + 1
    assert len(set(np.diff(marks))) == 1


def test_ticks_prefer_edges_of_cells():
    assert ticks(160, 14, set(range(0, 160, 20))) == list(range(0, 161, 20))


def test_errors_say_what_to_do():
    record, audit = mapped(SPEC, "cross-layer NHD", "shape")
    with pytest.raises(ValueError, match="there is no map to draw"):
        byte_map_figure.figure({}, row_bytes=160)
    with pytest.raises(ValueError, match="row_bytes must be at least 1, not 0"):
        byte_map_figure.figure(record, row_bytes=0)
    with pytest.raises(ValueError, match="width_inches 2 leaves no room"):
        byte_map_figure.figure(record, row_bytes=160, width_inches=2)
    with pytest.raises(ValueError, match="a title must be a text .str., but 1 is int"):
        byte_map_figure.figure({1: record}, row_bytes=160)
    with pytest.raises(ValueError, match="'a' must be the title of a ByteMap, not of a KVCache"):
        byte_map_figure.figure({"a": allocate(SPEC, "NHD", "meta")}, row_bytes=160)
    with pytest.raises(ValueError, match=r"the map 'a' has no bytes, \[3, 3\)"):
        byte_map_figure.figure({"a": replace(record, start=3, stop=3, ranges=())}, row_bytes=160)
    with pytest.raises(ValueError, match="there is no map to draw"):
        byte_map_figure.figure([record], row_bytes=160)
    stray = replace(audit.findings[0], storage="elsewhere")
    with pytest.raises(ValueError, match="storage 'elsewhere', but the maps show cache"):
        byte_map_figure.figure(record, row_bytes=160, finding=stray)
    outside = Finding("out_of_bounds", ("x",), "cache", 1, 1, audit.findings[0].example[:1])
    with pytest.raises(ValueError, match="cannot mark a finding of kind 'out_of_bounds', but only of kind collision"):
        byte_map_figure.figure(record, row_bytes=160, finding=outside)
    with pytest.raises(ValueError, match="packing 'spilt' does not exist.*did you mean 'split'"):
        cell_figure(SPEC, packing="spilt")
    cache = allocate(SPEC, "NHD", "meta")
    with pytest.raises(ValueError, match="block 4 does not exist: choose one of the blocks 0 to 3 of 'NHD'"):
        buffer_figure(cache, block=4)
    with pytest.raises(ValueError, match="max_layers_shown must be at least 1, not 0"):
        buffer_figure(cache, max_layers_shown=0)
    with pytest.raises(ValueError, match="there is no cache to draw"):
        buffer_figure({})
    with pytest.raises(ValueError, match="a title must be a text .str., but 1 is int"):
        buffer_figure({1: cache})
    for width in (1, 0, float("nan")):
        with pytest.raises(ValueError, match=f"width_inches {width} leaves no room"):
            buffer_figure(cache, width_inches=width)
    assert buffer_figure(cache, width_inches=4) and byte_map_figure.figure(record, row_bytes=160, width_inches=4)
    with pytest.raises(ValueError, match="too many to draw"):
        buffer_figure(allocate(replace(SPEC, num_blocks=20_000), "NHD", "meta"))
    with pytest.raises(ValueError, match="cannot be saved as 'jpg', but only as png or svg"):
        save(cell_figure(SPEC), "figure.jpg")


def test_six_thousand_byte_ranges_are_drawn():
    record, _ = mapped(CacheSpec(8, 47, 2, 2, 16, INT8), "cross-layer NHD", "shape")
    assert len(record.ranges) > 6000
    assert byte_map_figure.figure(record, row_bytes=160)._repr_png_().startswith(b"\x89PNG")
