"""Explorers: controls change map, audit and sizes, and an explorer keeps its last position."""

import re

import pytest

from kvviz.audit.audit import audit_scales
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.show import explorers
from kvviz.show.explorers import CHOICES, Explorer, Position, look, summary_html, twin


@pytest.fixture(autouse=True)
def no_last_positions(monkeypatch):
    monkeypatch.setattr(explorers, "_LAST", {})


def changed(explorer: Explorer, **to) -> tuple[str, str]:
    for name, value in to.items():
        explorer._boxes[name].value = value
    return explorer.outputs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype", CHOICES["kv_cache_dtype"])
def test_a_position_shows_its_own_cache(layout, kv_cache_dtype):
    shown = look(Position(layout=layout, kv_cache_dtype=kv_cache_dtype, num_layers=3))
    cache = allocate(Position(num_layers=3, kv_cache_dtype=kv_cache_dtype).spec(), layout, "meta")
    assert [record.storage.nbytes for record in shown.view.maps.values()] == [s.numel() for s in cache.storages]
    assert f"cell: {cache.spec.data_bytes} data + {cache.spec.scale_bytes} scale" in shown.arithmetic
    assert (shown.audit is None) == (not cache.spec.is_per_token_head)
    assert shown.audit is None or shown.audit.clean


def test_a_control_changes_map_audit_and_sizes():
    explorer = Explorer("any")
    before = explorer.outputs
    assert "audit: clean" in before[1] and "contested" not in before[0].partition("<script>")[0]
    shape = changed(explorer, carve="shape")
    assert "audit: 6 findings" in shape[1] and "contested" in shape[0].partition("<script>")[0]
    larger = changed(explorer, head_size=32)
    assert "cell: 32 data + 4 scale = 36 bytes" in larger[1] and larger[0] != shape[0]
    cache = allocate(Position(head_size=32).spec(), "cross-layer NHD", "meta")
    found = audit_scales(cache.owners(), cache.writers(cache.carve_scales("shape"))).findings
    assert f"audit: {len(found)} findings" in larger[1]


def test_an_impossible_position_shows_a_sentence_until_it_is_changed():
    explorer = Explorer("any", start=Position(carve="shape"))
    html, text = changed(explorer, layout="BLNHC")
    assert html == "" and "Not possible" in text and "split packing" in text
    html, text = changed(explorer, carve="strides")
    assert html and "audit: clean" in text


def test_the_last_position_is_kept_when_the_cell_runs_again():
    changed(Explorer("kept"), head_size=64, layout="NHD")
    again = Explorer("kept")
    assert (again.position.head_size, again.position.layout) == (64, "NHD")
    assert again._boxes["head_size"].value == 64
    assert Explorer("another").position == Position()
    fewer = Explorer("kept", controls=("layout",))
    assert (fewer.position.head_size, fewer.position.layout) == (16, "NHD")


def test_the_static_copy_equals_the_explorer():
    position = Position(carve="shape", padding=32)
    html = twin("a < b", position).data
    explorer = Explorer("any", start=position)
    assert explorer.outputs[0] in html and explorer.outputs[1] in html and summary_html(look(position)) in html
    assert "a &lt; b" in html and "carve shape, padding 32" in html


def test_each_storage_has_one_map():
    shown = look(Position(layout="NHD", num_layers=8))
    assert len(shown.view.maps) == explorers.MOST_MAPS and "in 8 buffers (4 more like these)" in shown.arithmetic


def test_a_misplaced_scale_is_marked():
    view = look(Position(carve="shape")).view
    assert view.finding.kind == "misplaced" and re.search(r"belongs at byte \d+ and lies at byte \d+", view.html)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Explorer("x", controls=("colour",)), "unknown names: colour. Choose from num_layers"),
        (
            lambda: Explorer("x", start=Position(head_size=17)),
            "the control head_size has no value 17: choose from 8, 16",
        ),
    ],
)
def test_wrong_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
