"""Explorers: what the controls do to map, audit and arithmetic, and that positions survive."""

import re

import pytest

from kvviz.audit.audit import audit_scales
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.show import explorers
from kvviz.show.explorers import CHOICES, Explorer, Position, look, told, twin


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(explorers, "_LAST", {})


def moved(explorer: Explorer, **to) -> tuple[str, str]:
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


def test_a_control_moves_map_audit_and_arithmetic():
    explorer = Explorer("any")
    before = explorer.outputs
    assert "audit: clean" in before[1] and "contested" not in before[0].partition("<script>")[0]
    shape = moved(explorer, carve="shape")
    assert "audit: 6 findings" in shape[1] and "contested" in shape[0].partition("<script>")[0]
    larger = moved(explorer, head_size=32)
    assert "cell: 32 data + 4 scale = 36 bytes" in larger[1] and larger[0] != shape[0]
    cache = allocate(Position(head_size=32).spec(), "cross-layer NHD", "meta")
    found = audit_scales(cache.owners(), cache.writers(cache.carve_scales("shape"))).findings
    assert f"audit: {len(found)} findings" in larger[1]


def test_what_does_not_exist_is_a_sentence_and_mends_itself():
    explorer = Explorer("any", start=Position(carve="shape"))
    html, said = moved(explorer, layout="BLNHC")
    assert html == "" and "Not possible" in said and "packed form" in said
    html, said = moved(explorer, carve="strides")
    assert html and "audit: clean" in said


def test_what_was_chosen_survives_the_cell():
    moved(Explorer("kept"), head_size=64, layout="NHD")
    again = Explorer("kept")
    assert (again.position.head_size, again.position.layout) == (64, "NHD")
    assert again._boxes["head_size"].value == 64
    assert Explorer("another").position == Position()
    fewer = Explorer("kept", controls=("layout",))
    assert (fewer.position.head_size, fewer.position.layout) == (16, "NHD")


def test_the_twin_says_what_the_explorer_says():
    position = Position(carve="shape", padding=32)
    html = twin("a < b", position).data
    explorer = Explorer("any", start=position)
    assert explorer.outputs[0] in html and explorer.outputs[1] in html and told(look(position)) in html
    assert "a &lt; b" in html and "carve shape, padding 32" in html


def test_one_storage_a_layer_is_one_map_a_layer():
    shown = look(Position(layout="NHD", num_layers=8))
    assert len(shown.view.maps) == explorers.MOST_MAPS and "in 8 buffers (4 more like these)" in shown.arithmetic


def test_it_points_at_a_misplaced_scale_if_there_is_one():
    view = look(Position(carve="shape")).view
    assert view.finding.kind == "misplaced" and re.search(r"is meant at byte \d+ and lands at byte \d+", view.html)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Explorer("x", controls=("colour",)), "colour is no control: choose among num_layers"),
        (lambda: Explorer("x", start=Position(head_size=17)), "head_size 17 cannot be chosen: it is one of 8, 16"),
    ],
)
def test_mistakes_are_told(call, said):
    with pytest.raises(ValueError, match=said):
        call()
