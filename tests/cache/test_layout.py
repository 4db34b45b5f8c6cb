"""Strides of all layouts against a walk through memory, axis by axis, padding included."""

from itertools import product

import pytest

from kvviz.cache.layout import AXES, LAYOUTS, Layout, get_layout, released_layout
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec

SHAPES = [(2, 3, 2, 3, 8), (1, 2, 4, 1, 8), (3, 1, 1, 2, 8), (1, 1, 1, 1, 8)]
PADDING = (None, 0, 4, 36)
ORDERS = {
    "NHD": "LBKNHC",
    "HND": "LBKHNC",
    "cross-layer NHD": "BLKNHC",
    "cross-layer HND": "BHLKNC",
    "LBHNC": "LBHNKC",
    "LBNHC": "LBNHKC",
    "LHBNC": "LHBNKC",
    "BLHNC": "BLHNKC",
    "BLNHC": "BLNHKC",
    "BHLNC": "BHLNKC",
}


def walk(order: str, sizes: dict[str, int], page_size_padded: int | None) -> dict[tuple[int, ...], int]:
    """Return the address of each index (in the order of AXES). A padded page starts at a multiple of its size."""
    page_axis = max("LB", key=order.index)
    within = order.index(page_axis) + 1
    addresses, address, page = {}, 0, 0
    for place in product(*(range(sizes[axis]) for axis in order)):
        if page_size_padded is not None and not any(place[within:]):
            address, page = page * page_size_padded, page + 1
        index = dict(zip(order, place, strict=True))
        addresses[tuple(index[axis] for axis in AXES)] = address
        address += 1
    return addresses


def sizes_of(spec: CacheSpec) -> dict[str, int]:
    counts = (spec.num_layers, spec.num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.cell_bytes)
    return dict(zip(AXES, counts, strict=True))


def heads_outside_a_page(name: str) -> bool:
    order = ORDERS[name]
    return order.index("H") < max(order.index("L"), order.index("B"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ORDERS)
def test_strides_lead_where_the_walk_does(name, shape, padding, mode):
    spec = CacheSpec(*shape, mode)
    if padding is not None:
        spec = CacheSpec(*shape, mode, page_size_padded=spec.content_page_size_bytes + padding)
        if heads_outside_a_page(name) and spec.num_kv_heads > 1:
            with pytest.raises(ValueError, match=f"{name} .*{spec.num_kv_heads} KV heads.*{spec.page_size_padded}"):
                get_layout(name).strides_bytes(spec)
            return
    strides = get_layout(name).strides_bytes(spec)
    for index, address in walk(ORDERS[name], sizes_of(spec), spec.page_size_padded).items():
        assert sum(i * strides[axis] for i, axis in zip(index, AXES, strict=True)) == address, index


def test_strides_come_in_the_order_of_the_axes():
    spec = CacheSpec(2, 3, 4, 5, 8)
    assert {tuple(layout.strides_bytes(spec)) for layout in LAYOUTS.values()} == {tuple(AXES)}


def test_which_layouts_there_are():
    assert {name: layout.order for name, layout in LAYOUTS.items()} == ORDERS
    assert {layout.name for layout in LAYOUTS.values()} == set(ORDERS)
    split = {name for name, layout in LAYOUTS.items() if layout.packing == "split"}
    assert split == {"NHD", "HND", "cross-layer NHD", "cross-layer HND"}
    assert {layout.packing for layout in LAYOUTS.values()} == {"split", "packed"}


def test_which_layouts_interleave_layers():
    crossing = {name for name, layout in LAYOUTS.items() if layout.cross_layer}
    assert crossing == {"cross-layer NHD", "cross-layer HND", "BLHNC", "BLNHC", "BHLNC"}


@pytest.mark.parametrize(
    ("given", "near"),
    [("NDH", "NHD"), ("cross layer NHD", "cross-layer NHD"), ("LBHNCX", "LBHNC"), ("BHLNCC", "BHLNC")],
)
def test_an_unknown_layout_gets_a_suggestion(given, near):
    with pytest.raises(ValueError) as caught:
        get_layout(given)
    assert f"layout {given!r} does not exist" in str(caught.value)
    assert str(caught.value).endswith(f"did you mean {near!r}?")


@pytest.mark.parametrize(
    ("older", "cross_layer", "packing", "name"),
    [
        ("NHD", False, "split", "NHD"),
        ("HND", False, "split", "HND"),
        ("NHD", True, "split", "cross-layer NHD"),
        ("HND", True, "split", "cross-layer HND"),
        ("HND", False, "packed", "LBHNC"),
        ("NHD", False, "packed", "LBNHC"),
        ("NHD", True, "packed", "BLNHC"),
        ("HND", True, "packed", "BHLNC"),
    ],
)
def test_what_the_older_names_meant(older, cross_layer, packing, name):
    layout = released_layout(older, cross_layer, packing)
    assert isinstance(layout, Layout) and layout is LAYOUTS[name]
    assert (layout.cross_layer, layout.packing) == (cross_layer, packing)


def test_older_names_mean_the_split_packing_by_default():
    assert released_layout("HND", True).name == "cross-layer HND"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("LBHNC", False), "kv_cache_layout 'LBHNC'"), (("NHD", False, "dense"), "packing 'dense'")],
)
def test_older_names_that_never_were(arguments, said):
    with pytest.raises(ValueError, match=said):
        released_layout(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("dense", "LBKHNC"), "packing 'dense' does not exist"), (("split", "LBKHN"), "LBKHNC exactly once"),
     (("split", "LBKHCN"), "C must be the last letter"), (("packed", "LLBKHC"), "'LLBKHC'")],
)  # fmt: skip
def test_a_layout_of_wrong_parts_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        Layout("new", *arguments)


def test_a_layout_is_returned_as_it_is():
    layout = Layout("HBLNC", "packed", "HBLNKC")
    assert get_layout(layout) is layout and get_layout("NHD") is LAYOUTS["NHD"]
