"""The picture of the bug shows the bytes that the views of the cache really cover."""

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec
from kvviz.show.story_picture import caption, story_cache, story_svg, tails


def test_right_places_have_one_writer_and_wrong_places_have_all():
    cache = story_cache()
    assert all(tail.is_right for tail in tails(cache, "strides"))
    wrong = Counter(tail.writers for tail in tails(cache, "shape"))
    assert wrong == {(0, 1, 2, 3): 8, (): 24}


def test_the_places_are_those_of_a_list_of_all_bytes():
    cache = story_cache()
    spec = cache.spec
    expected = [
        page * spec.page_size_bytes + half * (spec.data_bytes + spec.scale_bytes) + spec.data_bytes
        for page in range(spec.num_blocks * spec.num_layers)
        for half in range(2)
    ]
    assert [tail.start for tail in tails(cache, "strides")] == expected


def test_the_picture_counts_what_its_words_say():
    root = ElementTree.fromstring(story_svg())
    ours = "{http://www.w3.org/2000/svg}g"
    groups = Counter(group.get("class") for group in root.iter(ours))
    assert groups["kvviz-step-1"] == 32 // 4 + 8 and groups["kvviz-step-5"] == 8
    assert (
        caption(story_cache(), 5)[1]
        == "Layer 3 wrote last, so every layer reads its scales. 24 of 32 places stay empty."
    )
    assert caption(story_cache(), 2)[1] == "Layer 1 writes its scales over the scales of layer 0."
    assert "24 of 32" in root.get("aria-label")


def test_the_picture_of_the_readme_is_this_one():
    kept = Path(__file__).resolve().parents[2] / "docs" / "corruption.svg"
    assert kept.read_text(encoding="utf-8") == story_svg(looping=True), "run python docs/pictures.py"


def test_scales_outside_of_all_places_are_refused():
    cache = allocate(CacheSpec(3, 3, 2, 2, 16, "int8_per_token_head", page_size_padded=256), "cross-layer NHD", "meta")
    with pytest.raises(ValueError, match="where no scale belongs"):
        story_svg(cache)


def test_the_looping_picture_has_no_script_and_shows_each_step_once():
    svg = story_svg(looping=True)
    assert "<script" not in svg and len(svg) < 1_000_000
    begins = re.findall(r"@keyframes o\d+\{(?:0%\{visibility:hidden\})?([\d.]+)%\{visibility:visible", svg)
    assert len(begins) == 6 and [float(one) for one in begins] == sorted(float(one) for one in begins)
    assert "prefers-reduced-motion" in svg
