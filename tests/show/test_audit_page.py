"""The page of an audit: it holds every finding and draws every place, and names cannot change the page."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from kvviz.audit.audit import audit_views
from kvviz.audit.claims import Aligned, BelongsAt, Covers, Disjoint, StepAlike
from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.spec import CacheSpec
from kvviz.show.audit_page import render_html
from kvviz.show.byte_map import byte_map
from kvviz.show.describe import describe
from kvviz.show.figures.canvas import BODY, text_inches
from kvviz.show.nearby import map_around
from kvviz.show.pointing import claim_of, shortened


class Page(HTMLParser):
    """Collects open tags, links, texts of pictures, headings and the text of a page."""

    EMPTY = {"meta", "img", "br", "link"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.links, self.alts, self.headings, self.text = [], [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links += [given[name] for name in ("src", "href") if name in given]
        self.alts += [given["alt"]] if tag == "img" else []
        self.headings += [tag] if re.fullmatch(r"h\d", tag) else []
        self.open += [] if tag in self.EMPTY else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def story(layout: str, carve: str = "shape", num_layers: int = 3):
    cache = allocate(CacheSpec(num_layers, 4, 2, 2, 16, "int8_per_token_head"), layout, "meta", one_storage=True)
    owners = cache.owners()
    homes = {view.name: view for view in owners}
    views = [v for v in owners if v.role == "data"] + list(cache.writers(cache.carve_scales(carve)))
    scales = [v.name for v in views if v.role == "scale"]
    return owners, views, [Disjoint(tuple(v.name for v in views)), *(BelongsAt(n, homes[n]) for n in scales)]


SPLIT = [name for name, layout in LAYOUTS.items() if layout.packing == "split"]


@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("carve", ["shape", "strides"])
def test_a_window_is_what_the_whole_map_has_there(layout, carve):
    owners, views, _ = story(layout, carve)
    storage = owners[0].storage
    whole = byte_map(owners, [v for v in views if v.role == "scale"])
    for start in (0, 200, 1000):
        part = byte_map(owners, views, window=(start, start + 150), storage=storage)
        for byte in range(start, start + 150):
            there, here = whole.at(byte), part.at(byte)
            assert (here.state, here.owner, set(here.writers)) == (there.state, there.owner, set(there.writers))


def test_the_place_lies_in_its_map():
    _, views, claims = story("cross-layer NHD")
    for finding in audit_views(views, claims).findings:
        record = map_around(finding, views, claims)
        first = finding.example[0]
        run = record.at(first.start_bytes)
        assert run.state == ("contested" if finding.kind == "collision" else run.state)
        assert {p.view for p in finding.example[: 1 if finding.kind != "collision" else None]} <= {
            part.view for part in run.writers
        }


def test_a_cache_of_terabytes_is_drawn():
    storage = Storage("pool", 1 << 44)
    views = [View(f"layer {n} K", storage, (1 << 24, 16, 8, 64), (1 << 20, 1024, 128, 1), n * 32) for n in range(2)]
    views += [View("layer 2 K", storage, (1 << 20, 16), (1 << 20, 1024), 3 << 20)]
    claims = [Disjoint(tuple(v.name for v in views))]
    result = audit_views(views, claims)
    page = Page(render_html(result, views, claims))
    assert len(page.alts) == len(result.findings) > 1 and "contested" in page.alts[0]


def test_views_that_no_claim_names_are_seen_beside_the_place():
    storage = Storage("pool", 256)
    kv = [View(f"layer {n} K", storage, (2, 32), (128, 1), 64 * n, axes=("block", "byte")) for n in range(2)]
    scales = [View(f"s{n}", storage, (2,), (32,), 8, 4, ("block",), "scale") for n in range(2)]
    over = View("over", storage, (8,), (1,), 60, axes=("byte",))
    claims = [Disjoint(("s0", "s1"))]
    (finding,) = audit_views([*kv, *scales, over], claims).findings
    record = map_around(finding, [*kv, *scales, over], claims)
    seen = {run.start: (run.owner.view if run.owner else None, run.state) for run in record.ranges}
    assert seen == {
        0: ("layer 0 K", "right"), 32: ("s0", "contested"), 36: (None, "unowned"), 60: ("over", "right"),
        64: ("layer 1 K", "right"), 96: (None, "unowned"), 128: ("layer 0 K", "right"), 160: ("s0", "contested"),
        164: (None, "unowned"), 192: ("layer 1 K", "right"), 224: (None, "unowned"),
    }  # fmt: skip


@pytest.mark.parametrize("carve", ["shape", "strides"])
def test_whole_cells_that_no_claim_names_are_no_padding(carve):
    """Data views with their tails overlap the scales. They own only bytes that no other view owns."""
    cache = allocate(CacheSpec(2, 4, 2, 2, 16, "int8_per_token_head"), "cross-layer NHD", "meta")
    storage = cache.storage_of(0)
    kv = [View.of(kv, f"layer {n} KV", storage) for n, kv in enumerate(cache.kv_caches)]
    scales = list(cache.writers(cache.carve_scales(carve)))
    over = View("over", storage, (4,), (1,), 16, role="scale")
    claims = [Disjoint((*(v.name for v in scales), "over"))]
    finding = audit_views([*kv, *scales, over], claims).findings[0]
    record = map_around(finding, [*kv, *scales, over], claims)
    alone = byte_map([*scales, over], window=(record.start, record.stop), storage=storage)
    whole = byte_map(kv, window=(record.start, record.stop), storage=storage)
    assert record.count("unowned") == 0 and record.count("contested") == alone.count("contested") > 0
    for byte in range(record.start, record.stop):
        told = alone if alone.at(byte).writers else whole
        assert (record.at(byte).owner, record.at(byte).writers) == (told.at(byte).owner, told.at(byte).writers)


@pytest.mark.parametrize("count", [2, 4, 9])
def test_what_a_figure_says_of_long_names_fits_on_it(count):
    storage = Storage("pool", 64)
    names = [f"language_model.model.layers.{n}.self_attn.attn K data" for n in range(count)]
    views = [View(name, storage, (8,), (1,), 8) for name in names]
    (finding,) = audit_views(views, [Disjoint(tuple(names))]).findings
    told = claim_of(finding, 8)
    assert text_inches(told, BODY, bold=True) < 10 and told.startswith(
        f"{count} views write these 8 bytes: …0.self_attn.attn K data, …1."
    )
    assert told.count("K data") == min(count, 4) and told.endswith(" and 5 more") == (count == 9)
    assert len(shortened("x" * 99)) <= 25 and shortened("model.layers.10.self_attn K").endswith("self_attn K")
    short = claim_of(replace(finding, views=("a", "b", "layer 1 K", "layer 2 K")), 8)
    assert short == "4 views write these 8 bytes: a, b, the K of 2 layers"


def test_a_view_on_itself_and_one_beyond_its_storage():
    storage = Storage("s", 100)
    itself = View("itself", storage, (4, 4), (2, 1), 10)
    beyond = View("beyond", storage, (4, 8), (32, 1))
    assert map_around(audit_views([itself]).findings[0], [itself]) is None
    record = map_around(audit_views([beyond]).findings[0], [beyond])
    assert (record.start, record.stop) == (0, 100) and record.count("right") == 28
    outside = View("outside", Storage("none", 0), (2,), (1,))
    assert map_around(audit_views([outside]).findings[0], [outside]) is None


def test_every_finding_is_told_and_drawn():
    _, views, claims = story("cross-layer NHD", num_layers=2)
    result = audit_views(views, claims)
    page = Page(render_html(result, views, claims, "views.json"))
    assert page.open == [] and page.headings[0] == "h1" and "h2" in page.headings
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert len(page.alts) >= sum(bool(f.example) for f in result.findings) and all(page.alts)
    for finding in result.findings:
        assert str(finding) in page.text
        assert all(what in page.text for what, _ in finding.hits)


def test_findings_without_a_place_and_every_other_kind():
    storage = Storage("s", 4096)
    a, b = View("a", storage, (4, 8), (8, 1)), View("b", storage, (5, 9), (100, 2), 7)
    claims = [StepAlike("a", "b"), Covers("a", ("b",)), Aligned("b", 16, required=False)]
    result = audit_views([a, b], claims)
    page = Page(render_html(result, [a, b], claims))
    assert {f.kind for f in result.findings} >= {"truncated", "misplaced", "index_space", "unaligned"}
    assert "No map: this finding is about numbers" in page.text and page.open == []


def test_a_clean_page_says_where_to_look_and_names_are_escaped():
    view = View('<script>alert(1)</script> & "co"', Storage("<b>s</b>", 8), (4,), (1,))
    page = render_html(audit_views([view]), [view], title="<i>")
    assert "Look next at ordering" in page and "prefers-color-scheme: dark" in page and "<i>" not in page
    sick = View(view.name, view.storage, (9,), (1,))
    page = render_html(audit_views([sick]), [sick])
    assert "<script>alert" not in page and "<b>" not in page and "&lt;script&gt;alert" in page
    assert page.count("<script>") == page.count("</script>") == page.count("<img") == 1
    assert Page(page).open == []


@pytest.mark.browser
def test_the_map_on_the_page_says_what_the_record_says(opened):
    storage = Storage("pool", 256)
    kv = [View(f"layer {n} K", storage, (2, 36), (128, 1), 64 * n, axes=("block", "byte")) for n in range(2)]
    scales = [View(f"s{n}", storage, (2,), (32,), 8, 4, ("block",), "scale") for n in range(2)]
    claims = [Disjoint(("s0", "s1"))]
    result = audit_views([*kv, *scales], claims)
    record = map_around(result.findings[0], [*kv, *scales], claims)
    page = opened(render_html(result, [*kv, *scales], claims))
    told = page.evaluate(
        "() => { const m = document.querySelector('canvas').kvviz; return [...Array(256).keys()].map(m.describe) }"
    )
    assert [tuple(lines) for lines in told] == [describe(record, byte) for byte in range(256)]
    states = page.evaluate("document.querySelector('canvas').kvviz.painted(0, 256)")
    assert states == [run.state for run in record.ranges for _ in range(run.stop - run.start)]
    assert {"contested", "right", "unowned"} == set(states) and not page.errors
