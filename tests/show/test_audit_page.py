"""The page of an audit: causes, pictures, repairs and every finding. What is cut is counted."""

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from kvviz.audit.audit import audit_views
from kvviz.audit.case_book import cases
from kvviz.audit.causes import CAUSES, diagnose
from kvviz.audit.claims import Aligned, BelongsAt, Covers, Disjoint, Follows, Maps, StepAlike
from kvviz.audit.elements import place
from kvviz.audit.findings import Audit, Finding
from kvviz.audit.repair_words import repair_code
from kvviz.audit.view import Storage, View
from kvviz.audit.views_file import load
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.spec import CacheSpec
from kvviz.show import audit_page
from kvviz.show.audit_page import render_html
from kvviz.show.byte_map import byte_map
from kvviz.show.figures.canvas import BODY, text_inches
from kvviz.show.nearby import map_around
from kvviz.show.pointing import claim_of, shortened
from tests.audit.test_diagnosis_text import carved_from_the_shape


class Page(HTMLParser):
    """Collects open tags, links, texts of pictures and the text of a page."""

    EMPTY = {"meta", "br", "link"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.links, self.pictures, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links += [given[name] for name in ("src", "href") if name in given]
        self.pictures += [given["aria-label"]] if given.get("role") == "img" else []
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
    storage = Storage("pool", 1 << 60)
    views = [View(f"layer {n} K", storage, (1 << 24, 16, 8, 64), (1 << 20, 1024, 128, 1), n * 32) for n in range(2)]
    views += [View("layer 2 K", storage, (1 << 20, 16), (1 << 20, 1024), 3 << 20)]
    claims = [Disjoint(tuple(v.name for v in views))]
    page = Page(render_html(audit_views(views, claims), views, claims))
    assert len(page.pictures) == 1 and "2 views: layer 0 K; layer 1 K (contested)" in page.text


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


def test_the_page_of_80_layers():
    views, claims = carved_from_the_shape()
    result = audit_views(views, claims)
    html = render_html(result, views, claims, "huge.json", lessons={"04": "04_root_cause.html"})
    page = Page(html)
    assert len(html) <= 400_000 and page.open == [] and len(page.pictures) == 1
    for said in (
        "Not clean: one cause explains all 162 findings.",
        "They start at byte 128 or 17,024 and step 33,792 bytes per block.",
        "layer 1 K scale [block 0, token 0, head 0] lies at byte 128 of the storage and belongs at byte 33,920.",
        "33,760 bytes between, not drawn",
        "80 views layer 0 K scale, layer 1 K scale, layer 2 K scale and 77 more",
        "offset = (50269, 16, 8), (675840, 264, 33), 8448 * n + 32",
        "Proof: Audited with this repair: the same claims are clean.",
        "2 x collision", "160 x misplaced", "The 160 views", "162 findings, one by one",
        "320 views in 1 storage, 162 claims.",
    ):  # fmt: skip
        assert said in page.text, said
    assert "04_root_cause.html" in page.links and "48 views" not in page.text and "and 45 more" not in page.text
    (shared,) = {line for line in page.text.splitlines() if "views: layer 0 K scale" in line and "[128," in line}
    assert re.findall(r"layer (\d+) K scale", shared) == [str(n) for n in range(80)]


def test_findings_are_numbered_naturally():
    views, claims = carved_from_the_shape()
    html = render_html(audit_views(views, claims), views, claims)
    listed = re.findall(r'<li value="(\d+)"><pre tabindex="0">(?:misplaced: layer (\d+) ([KV]))?', html)
    assert [int(number) for number, _, _ in listed] == list(range(1, 163))
    layers = [(int(layer), half) for _, layer, half in listed if layer]
    assert layers == sorted(layers) and len(layers) == 160


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_80_layers_take_three_screens(opened, width):
    views, claims = carved_from_the_shape()
    page = opened(render_html(audit_views(views, claims), views, claims), width=width)
    fold = page.get_by_text("162 findings, one by one").bounding_box()
    assert fold["y"] < 3 * 900 and page.evaluate("document.documentElement.scrollHeight") < 3 * 900
    assert page.asked == [] and page.errors == []
    lies, belongs = (page.get_by_text(word, exact=True).bounding_box() for word in ("lies here", "belongs here"))
    assert lies["y"] < belongs["y"] < fold["y"] and lies["height"] > 10


def two_mistakes():
    storage, far = Storage("s", 128), Storage("t", 96)
    views = [View("content", storage, (4, 24), (32, 1)), View("sent", storage, (4, 20), (32, 1))]
    views += [View(f"{half} data", far, (4, 8), (24, 1), at) for half, at in (("K", 0), ("V", 12))]
    views += [View("K scale", far, (4,), (6,), 2, 4), View("V scale", far, (4,), (6,), 2, 4)]
    claims = [Covers("sent", ("content",)), Follows("K scale", "K data", 8), Follows("V scale", "V data", 8)]
    return views, claims


def test_two_mistakes_have_two_sections():
    views, claims = two_mistakes()
    result = audit_views(views, claims)
    page = Page(render_html(result, views, claims))
    assert len(diagnose(views, claims, result)) == len(page.pictures) == 2
    assert "Cause 1: " in page.text and "Cause 2: " in page.text and "2 causes explain all 2 findings" in page.text
    assert page.text.count("Audited with all repairs: the same claims are clean.") == 2
    assert "s, bytes 8 to 39" in page.text and "t, bytes 0 to 31" in page.text


def test_a_page_without_a_diagnosis_shows_the_first_place():
    views, claims = two_mistakes()
    page = Page(render_html(audit_views(views, claims), views, claims, diagnoses=()))
    assert len(page.pictures) == 1 and "These findings were not diagnosed." in page.text


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_every_public_case_has_a_page(case):
    file = load(json.dumps(case["views_file"]))
    result = file.audit()
    found = diagnose(file.views, file.claims, result)
    page = Page(render_html(result, file.views, file.claims, case["id"]))
    text = " ".join(page.text.split())
    assert page.open == [] and len(page.pictures) + text.count("No picture:") == len(found)
    for one in found:
        assert all(said in text for said in (one.text, one.effect, *one.others))
        assert ("Proof:" in text) == one.proved and f"notebook {CAUSES[one.cause].lesson}" in text
    for finding in result.findings:
        assert str(finding) in page.text
    assert ("Copy" in text) == any(one.proved for one in found)


def test_the_pasted_repair_is_the_repair():
    views, claims = carved_from_the_shape()
    (found,) = diagnose(views, claims)
    lines = repair_code(found.repaired).splitlines()
    for view in found.repaired:
        line = lines[1] if " K " in view.name else lines[3]
        made = {"n": int(view.name.split()[1])}
        exec(line, made)
        assert (made["shape"], made["stride"], made["offset"]) == (view.shape, view.stride, view.offset)
    irregular = [replace(view, offset=n * n) for n, view in enumerate(found.repaired[:6:2])]
    made = {"name": irregular[2].name}
    exec(repair_code(irregular), made)
    assert made["offset"] == 4
    assert "import" not in repair_code([replace(irregular[0], name="a\nimport os")]).splitlines()[1]


def test_what_is_cut_is_counted(monkeypatch):
    for name, most in (("MOST_FINDINGS", 5), ("MOST_NAMES", 7), ("MOST_CAUSES", 1)):
        monkeypatch.setattr(audit_page, name, most)
    views, claims = two_mistakes()
    assert (
        "1 more cause: kvviz audit -v prints all." in Page(render_html(audit_views(views, claims), views, claims)).text
    )
    views, claims = carved_from_the_shape()
    page = Page(render_html(audit_views(views, claims), views, claims))
    assert "157 more findings: kvviz audit -v prints all." in page.text
    assert "153 more: kvviz audit --json lists all." in page.text


@pytest.mark.browser
def test_the_repair_is_copied(opened):
    views, claims = carved_from_the_shape()
    (found,) = diagnose(views, claims)
    html = render_html(audit_views(views, claims), views, claims)
    page = opened(html)
    page.get_by_role("button", name="Copy").click()
    page.wait_for_timeout(100)
    assert page.evaluate("getSelection().toString()").split() == repair_code(found.repaired).split()
    assert page.locator(".copy button").inner_text() in ("Copied", "Selected: press Ctrl+C")
    plain = opened(html, javascript=False)
    assert not plain.locator(".copy button").is_visible()
    plain.locator(".copy pre").click()
    assert plain.locator(".copy pre").inner_text() == repair_code(found.repaired)


@pytest.mark.browser
def test_a_dark_screen_prints_dark_on_white(opened):
    views, claims = carved_from_the_shape()
    page = opened(render_html(audit_views(views, claims), views, claims), scheme="dark")
    looks = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(looks) == "rgb(22, 24, 27)"
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(looks) == "rgb(255, 255, 255)" and not page.locator(".copy button").is_visible()
    ink = "getComputedStyle(document.querySelector('svg text')).fill"
    assert page.evaluate(ink) == "rgb(68, 68, 68)"


def test_a_finding_about_numbers_has_no_picture():
    view = View("slots", Storage("s", 12), (3, 4), (4, 1))
    claims = [Maps("ids", "slots", 12)]
    page = Page(render_html(audit_views([view], claims), [view], claims))
    assert "No picture: this mistake is about numbers" in page.text and page.pictures == [] and page.open == []


def test_findings_of_every_other_kind():
    storage = Storage("s", 4096)
    a, b = View("a", storage, (4, 8), (8, 1)), View("b", storage, (5, 9), (100, 2), 7)
    claims = [StepAlike("a", "b"), Covers("a", ("b",)), Aligned("b", 16, required=False)]
    result = audit_views([a, b], claims)
    page = Page(render_html(result, [a, b], claims))
    assert {f.kind for f in result.findings} >= {"truncated", "misplaced", "index_space", "unaligned"}
    assert all(str(finding) in page.text for finding in result.findings) and page.open == []


def test_a_clean_page_is_short_and_names_are_escaped():
    view = View('<script>alert(1)</script> & "co"', Storage("<b>s</b>", 8), (4,), (1,))
    page = render_html(audit_views([view]), [view], title="<i>")
    assert "Clean: every claim holds." in page and "Look next at ordering" in page and "<i>" not in page
    assert "1 view lies within its storage" in page and not {"<script", "<svg", "<figure"} & set(
        re.findall("<\\w+", page)
    )
    sick = View(view.name, view.storage, (9,), (1,))
    page = render_html(audit_views([sick]), [sick])
    assert "<script>alert" not in page and "<b>s" not in page and "&lt;script&gt;alert" in page
    assert Page(page).open == []
    assert "Empty: the file has no views" in render_html(audit_views([]), [])


def test_a_page_costs_little_whatever_the_views_are():
    """Large elements, a storage that a browser cannot count, and views that overlap themselves."""
    large = [View(f"v{n}", Storage("s", 1 << 60), (4,), (1,), n, 1 << 20) for n in range(40)]
    many = [View(f"v{n}", Storage("s", 1 << 22), (1 << 20,), (1,), n, 1 << 20) for n in range(3)]
    wide = [View(f"v{n}", Storage("s", 4), (3,), (1,), n) for n in range(1000)]
    for views in (large, many, wide):
        claims = [Disjoint(tuple(view.name for view in views))]
        found = Audit(
            (Finding("collision", tuple(view.name for view in views), "s", 1, 1, (place(views[0], (0,)),)),), ()
        )
        begun = time.process_time()
        html = render_html(found, views, claims, diagnoses=())
        assert time.process_time() - begun < 3 and len(html) < 400_000 and len(Page(html).open) == 0
