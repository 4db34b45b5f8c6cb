"""The byte map agrees with a plain count of every byte."""

import contextlib
import itertools
import random
import re
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvviz.audit.audit import audit_views
from kvviz.audit.claims import Disjoint
from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.spec import CacheSpec
from kvviz.show.audit_page import render_html
from kvviz.show.byte_map import MAX_WINDOW_BYTES, ByteMap, Part, _cells_by_byte, byte_map, byte_maps
from kvviz.show.describe import alt_text
from kvviz.show.pointing import claim_of
from kvviz.show.rows import rows
from kvviz.show.states import STATES

INT8 = "int8_per_token_head"


def cells_of(view: View) -> dict[int, Part]:
    """Return the cell of each byte, computed index by index. If cells overlap, the last one counts."""
    cells = {}
    in_bytes = view.axes[-1:] == ("byte",)
    for index in itertools.product(*map(range, view.shape)):
        first = (view.offset + sum(i * s for i, s in zip(index, view.stride, strict=True))) * view.itemsize
        cell = index[:-1] if in_bytes else index
        for byte in range(first, first + view.itemsize):
            cells[byte] = Part(view.name, view.role, cell, view.axes[: len(cell)])
    return cells


def brute_force(owners, writers, start: int, stop: int) -> list[tuple]:
    """Return (owner, writers, state) of each byte. If data and scale both own a byte, data is the owner."""
    replaced = {view.name for view in writers}
    own = [cells_of(view) for view in owners]
    write = [cells_of(view) for view in [*(v for v in owners if v.name not in replaced), *writers]]
    answer = []
    for byte in range(start, stop):
        mine = [cells[byte] for cells in own if byte in cells]
        found = tuple(cells[byte] for cells in write if byte in cells)
        owner = next((part for part in mine if part.role == "data"), mine[0] if mine else None)
        if len(found) > 1:
            state = "contested"
        elif found:
            state = "right" if found[0] in mine else "misplaced"
        else:
            state = "unreached" if mine else "unowned"
        answer.append((owner, found, state))
    return answer


def per_byte(record: ByteMap) -> list[tuple]:
    return [(r.owner, r.writers, r.state) for r in record.ranges for _ in range(r.start, r.stop)]


def views_of(cache, carve: str | None, storage: Storage):
    writers = cache.writers(cache.carve_scales(carve)) if carve else ()
    return [v for v in cache.owners() if v.storage == storage], [v for v in writers if v.storage == storage]


def caches():
    """Yield every layout with every way to carve scales, with and without tail and padding. Sizes are random."""
    lot = random.Random(48412)
    for name, carve, tail, padded in itertools.product(LAYOUTS, ("shape", "strides", None), (True, False), (0, 12)):
        layout = LAYOUTS[name]
        if layout.packing == "packed" and carve == "shape":
            continue
        mode = "bfloat16" if carve is None else lot.choice((INT8, "fp8_per_token_head", "int4_per_token_head"))
        if carve is None and not tail:
            continue
        sizes = [lot.randint(1, 3), lot.randint(1, 3), lot.randint(1, 2), lot.randint(1, 2)]
        spec = CacheSpec(*sizes, 16, mode, tail=tail)
        if padded:
            spec = replace(spec, page_size_padded=spec.content_page_size_bytes + padded)
        with contextlib.suppress(ValueError):  # this layout has heads outside the page, so pages cannot be padded
            yield pytest.param(allocate(spec, layout, "meta"), carve, id=f"{name}-{carve}-tail{tail}-pad{padded}")


@pytest.mark.parametrize("cache, carve", list(caches()))
def test_the_map_equals_a_plain_count(cache, carve):
    storage = cache.storage_of(cache.spec.num_layers - 1)
    owners, writers = views_of(cache, carve, storage)
    record = byte_map(owners, writers)
    assert per_byte(record) == brute_force(owners, writers, 0, storage.nbytes)
    assert [r.start for r in record.ranges] == [0, *(r.stop for r in record.ranges[:-1])]
    assert record.ranges[-1].stop == storage.nbytes == sum(record.count(state) for state in STATES)


@pytest.mark.parametrize("seed", range(40))
def test_the_map_equals_a_plain_count_for_views_of_any_shape(seed):
    lot = random.Random(seed)
    storage = Storage("heap", 96)

    def view(name: str, role: str) -> View:
        while True:
            shape = tuple(lot.randint(1, 3) for _ in range(2))
            stride, itemsize = tuple(lot.randint(3, 9) for _ in range(2)), lot.choice((1, 2, 4))
            made = View(name, storage, shape, stride, lot.randint(0, 6), itemsize, ("block", "token"), role)
            if max(made.all_bytes) < storage.nbytes and len(set(made.all_bytes)) == len(made.all_bytes):
                return made

    owners = [view("layer 0 K data", "data"), view("layer 0 K scale", "scale"), view("other", "scale")]
    writers = [view("layer 0 K scale", "scale"), view("other", "scale")][: lot.randint(0, 2)]
    start = lot.randint(0, 60)
    stop = lot.randint(start + 1, 96)
    record = byte_map(owners, writers, window=(start, stop))
    assert per_byte(record) == brute_force(owners, writers, start, stop)


def listed(view: View, start: int, stop: int) -> list[int]:
    """For each byte, return the flat number of the element that holds the byte, or -1. List all elements for this."""
    starts = view.starts.ravel()
    row = np.full(stop - start, -1)
    for byte in range(view.itemsize):
        at = starts + byte - start
        inside = (at >= 0) & (at < stop - start)
        row[at[inside]] = np.flatnonzero(inside)
    return row.tolist()


@pytest.mark.parametrize("seed", range(300))
def test_a_window_has_the_elements_of_a_full_list(seed):
    lot = random.Random(seed)
    shape = tuple(lot.randint(0 if lot.random() < 0.1 else 1, 4) for _ in range(lot.randint(0, 4)))
    stride = tuple(lot.choice((-37, -16, -7, -3, -1, 0, 0, 1, 2, 5, 16, 40)) for _ in shape)
    view = View("any", Storage("heap", 1 << 20), shape, stride, lot.randint(200, 300), lot.choice((1, 2, 4)))
    start = lot.randint(0, 1200)
    stop = start + lot.randint(1, 200)
    found, cells = _cells_by_byte([view], start, stop)
    assert (cells[0].tolist() if found else [-1] * (stop - start)) == listed(view, start, stop)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_small_window_of_a_large_cache_costs_little(layout):
    spec = CacheSpec(28, 5000, 16, 8, 128, "fp8_per_token_head")
    cache = allocate(spec, layout, "meta")
    storage = cache.storage_of(27)
    owners, writers = views_of(cache, "strides", storage)
    at = storage.nbytes // 2
    tracemalloc.start()
    record = byte_map(owners, writers, window=(at, at + 64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert record.count("right") == 64 and peak < 4 << 20


def test_every_state_occurs_in_these_tests():
    seen = set()
    for case in caches():
        cache, carve = case.values
        owners, writers = views_of(cache, carve, cache.storage_of(0))
        seen |= {stretch.state for stretch in byte_map(owners, writers).ranges}
    assert seen == set(STATES)


@pytest.fixture
def story():
    """Return the cache of the corruption: 4 layers, 4 blocks, cross-layer."""
    return allocate(CacheSpec(4, 4, 2, 2, 16, INT8), "cross-layer NHD")


def test_counts_of_the_story(story):
    record = byte_map(*views_of(story, "shape", story.storage_of(0)))
    assert [record.count(state) for state in STATES] == [2048, 128, 0, 384, 0]
    stretch = record.at(16)
    assert (stretch.start, stretch.stop, stretch.state) == (16, 20, "contested")
    assert [part.layer for part in stretch.writers] == [0, 1, 2, 3]
    assert str(stretch) == (
        "[16, 20) contested: layer 0 K scale [block 0, token 0, head 0] <- layer 1 K scale [block 0, token 0, head 0]; "
        "layer 2 K scale [block 0, token 0, head 0], and 1 more"
    )


@pytest.mark.parametrize("window", [(0, 1), (17, 19), (155, 805), (2559, 2560)])
def test_a_window_is_a_part_of_the_whole(story, window):
    owners, writers = views_of(story, "shape", story.storage_of(0))
    whole, part = byte_map(owners, writers), byte_map(owners, writers, window=window)
    assert per_byte(part) == per_byte(whole)[slice(*window)]
    assert (part.start, part.stop) == (part.ranges[0].start, part.ranges[-1].stop) == window


def test_values_are_the_bytes_of_the_window(story):
    owners = story.owners()
    story.storages[0].copy_(torch.arange(2560, dtype=torch.int32).to(torch.uint8))
    assert byte_map(owners, values=story.storages[0], window=(250, 260)).values == bytes(
        [250, 251, 252, 253, 254, 255, 0, 1, 2, 3]
    )
    assert byte_map(owners).values is None
    assert byte_map(owners, values=story.storages[0].to("meta")).values is None
    assert byte_map(owners, values=story.storages[0].numpy(), window=(0, 2)).values == bytes([0, 1])


def test_values_may_be_plain_bytes_and_windows_numpy_integers(story):
    raw = bytes(range(256)) * 10
    for values in (raw, bytearray(raw), memoryview(raw), np.frombuffer(raw, np.uint8), torch.tensor(list(raw)).byte()):
        record = byte_map(story.owners(), values=values, window=(np.int64(250), np.uint16(260)))
        assert record.values == raw[250:260] and (record.start, record.stop) == (250, 260)
        assert type(record.start) is int


@pytest.mark.parametrize(
    "values, found",
    [
        (bytes, "<class 'bytes'>"),
        ("text", "'text'"),
        (7, "7"),
        ({}, "{}"),
        (torch.zeros(2560), r"Tensor of float32 with shape \(2560,\)"),
        (torch.zeros(16, 160, dtype=torch.uint8), r"Tensor of uint8 with shape \(16, 160\)"),
        (np.zeros((), np.uint8), r"ndarray of uint8 with shape \(\)"),
        (np.zeros(2560, np.int16), r"ndarray of int16 with shape \(2560,\)"),
    ],
)
def test_values_of_a_wrong_kind_raise(story, values, found):
    with pytest.raises(
        ValueError, match=f"values must be bytes, or a uint8 tensor or array with one axis, not {found}"
    ):
        byte_map(story.owners(), values=values)


@pytest.mark.parametrize("window", [(0.0, 4), (1,), 5, "ab", (None, 4)])
def test_a_window_that_is_not_two_integers_raises(story, window):
    with pytest.raises(ValueError, match="window must be two integers"):
        byte_map(story.owners(), window=window)


def test_an_unknown_mode_raises_and_names_the_nearest(story):
    with pytest.raises(ValueError, match="did you mean 'int8_per_token_head'"):
        byte_map(story.owners(), kv_cache_dtype="int8_per_tokn_head")


@pytest.mark.parametrize("row_bytes", [1, 7, 160, 5000])
def test_rows_hold_every_byte_once(story, row_bytes):
    record = byte_map(*views_of(story, "shape", story.storage_of(0)), window=(33, 1111))
    cut = rows(record, row_bytes)
    assert [row.start for row in cut] == list(range(33, 1111, row_bytes))
    ranges = [stretch for row in cut for stretch in row.ranges]
    assert [(r.owner, r.writers, r.state) for r in ranges for _ in range(r.start, r.stop)] == per_byte(record)
    for row in cut:
        assert all(row.start <= r.start < r.stop <= row.start + row_bytes for r in row.ranges)


def test_rows_of_a_page_name_block_and_layer(story):
    labels = [row.label for row in rows(byte_map(story.owners()), 160)]
    assert labels == [f"block {block} · layer {layer}" for block in range(4) for layer in range(4)]
    assert [row.mixed for row in rows(byte_map(story.owners()), 160)] == [False] * 16
    row = rows(byte_map(story.owners()), 320)[0]
    assert (row.label, row.mixed) == ("block 0 · layers 0–1", True)
    assert rows(byte_map(story.owners()), 5000)[0].label == "blocks 0–3 · layers 0–3"


def test_rows_without_block_and_layer_have_no_label():
    heap = Storage("heap", 16)
    (row,) = rows(byte_map([View("weights", heap, (8,), (1,))]), 16)
    assert (row.label, row.mixed) == ("", True)
    (row,) = rows(byte_map([View("layer 3 state", heap, (8,), (1,))]), 16)
    assert (row.label, row.mixed) == ("layer 3", False)


def test_a_view_of_another_name_is_a_part_without_layer():
    part = Part("someone's K", "data", (3,), ("row",))
    assert (part.layer, part.half, str(part)) == (None, "K", "someone's K [row 3]")


def test_errors_name_the_values(story):
    owners = story.owners()
    with pytest.raises(ValueError, match=r"window \[0, 9999\) is not inside the storage 'cache' of 2560 bytes"):
        byte_map(owners, window=(0, 9999))
    with pytest.raises(ValueError, match=r"window \[-1, 5\) is not inside the storage 'cache' of 2560 bytes"):
        byte_map(owners, window=(-1, 5))
    with pytest.raises(ValueError, match=r"window \[5, 5\) is empty"):
        byte_map(owners, window=(5, 5))
    with pytest.raises(ValueError, match="there are 0 views to map"):
        byte_map(())
    with pytest.raises(ValueError, match=r"views lie in 4 \(layer 0, layer 1, layer 2, layer 3\)"):
        byte_map(allocate(story.spec, "NHD", "meta").owners())
    with pytest.raises(ValueError, match="values has 3 bytes, but the storage 'cache' has 2560"):
        byte_map(owners, values=torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="byte 2560 is outside the map's window"):
        byte_map(owners).at(2560)
    with pytest.raises(ValueError, match="row_bytes must be at least 1, not 0"):
        rows(byte_map(owners), 0)
    huge = View("all", Storage("huge", MAX_WINDOW_BYTES + 1), (1,), (1,))
    with pytest.raises(ValueError, match=f"{MAX_WINDOW_BYTES + 1} bytes is too large.* at most {MAX_WINDOW_BYTES}"):
        byte_map([huge])


def test_a_map_for_each_storage():
    cache = allocate(CacheSpec(3, 2, 2, 2, 16, INT8), "NHD", "cpu")
    cache.storages[1].fill_(7)
    writers = cache.writers(cache.carve_scales("strides"))
    maps = byte_maps(cache.owners(), writers, most_bytes=100, values=cache.storages_by_name(), kv_cache_dtype=INT8)
    assert list(maps) == ["layer 0", "layer 1", "layer 2"]
    assert {(record.start, record.stop) for record in maps.values()} == {(0, 100)}
    assert maps["layer 1"].values == bytes([7]) * 100 and maps["layer 2"].values == bytes(100)
    assert {stretch.owner.layer for stretch in maps["layer 2"].ranges} == {2}


def test_views_without_bytes_raise():
    nothing = View("v", Storage("none", 0), (0,), (1,))
    with pytest.raises(ValueError, match="the 1 views lie in storages without bytes"):
        byte_maps([nothing])
    with pytest.raises(ValueError, match="the storage 'none' has 0 bytes"):
        byte_map([nothing])


def test_a_storage_that_was_freed_is_not_read():
    buffer = torch.zeros(64, dtype=torch.uint8)
    views = [View("v", Storage("pool", 64), (64,), (1,))]
    buffer.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="'pool' was freed, and now has 0 of 64 bytes"):
        byte_map(views, values=buffer)


class Watched:
    """A buffer that records which parts of it are read."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.reads = nbytes, []

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> np.ndarray:
        self.reads.append((part.start, part.stop))
        return np.zeros(part.stop - part.start, np.uint8)


def test_only_the_window_is_read():
    buffer = Watched(1 << 45)
    views = [View("v", Storage("pool", 1 << 45), (1 << 30, 64), (1 << 15, 1))]
    record = byte_map(views, window=(1 << 40, (1 << 40) + 256), values=buffer)
    assert buffer.reads == [(1 << 40, (1 << 40) + 256)] and record.values == bytes(256)


@pytest.mark.gpu
def test_only_the_window_leaves_the_gpu():
    buffer = torch.arange(1 << 20, dtype=torch.int32, device="cuda").view(torch.uint8)
    views = [View("v", Storage("pool", buffer.numel()), (buffer.numel(),), (1,))]
    assert byte_map(views, window=(400, 404), values=buffer).values == (100).to_bytes(4, "little")


def test_a_reader_neither_writes_nor_owns():
    """Two readers share bytes with each other and with a writer. No text says that a reader writes."""
    storage = Storage("s", 16)
    writer, *readers = (View(name, storage, (8,), (1,), n * 4, read_only=n > 0) for n, name in enumerate("wrq"))
    record = byte_map([writer, *readers], readers)
    assert [(one.start, one.stop, one.state) for one in record.ranges] == [(n, n + 1, "right") for n in range(8)] + [
        (8, 16, "unowned")
    ]
    (first,) = audit_views([writer, *readers], [Disjoint(("w", "r", "q"))]).findings
    assert claim_of(first, 4) == "1 view writes and 1 reads these 4 bytes: w, r"
    third = replace(first, views=("w", "r", "q"), readers=("r", "q"))
    assert claim_of(third, 4) == "1 view writes and 2 read these 4 bytes: w, r, q"
    assert "Marked: 1 view writes and 1 reads bytes [4, 5)" in alt_text({"map": record}, first)
    layers = replace(first, views=("layer 0 K", "layer 1 K"), readers=("layer 1 K",))
    assert claim_of(layers, 4) == "1 view writes and 1 reads these 4 bytes: the K of 2 layers"


def test_the_page_shows_readers_as_users_and_two_readers_do_not_collide():
    storage = Storage("s", 64)
    views = [View(name, storage, (8,), (1,), n * 4, read_only=n > 0) for n, name in enumerate("wr")]
    views.append(replace(views[1], name="q", offset=6))
    record = byte_map(views, views, readers=True)
    assert record.at(4).state == "contested" and [part.view for part in record.at(4).writers] == ["w", "r"]
    assert record.at(9).state == "right" and [part.view for part in record.at(9).writers] == ["r", "q"]
    claims = [Disjoint(("w", "r", "q"))]
    page = render_html(audit_views(views, claims), views, claims)
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL))
    assert "1 view writes here; only read: r" in text
    assert not re.search(r"[2-9] (views|layers)? ?write|written by", text)
