"""The text of a byte map agrees with the record."""

import re

import pytest

from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.spec import CacheSpec
from kvviz.show.byte_map import ByteMap, byte_map
from kvviz.show.byte_map_text import LEGEND, letter, render_text
from kvviz.show.rows import rows

MARKS = {"contested": "#", "misplaced": "!", "unreached": "_", "unowned": "."}


def drawn(text: str) -> str:
    """Return the letters of all bytes of a rendered map. Rows that were left out are added again."""
    strips: list[str] = []
    for line in text.splitlines()[1:-1]:
        left_out = re.fullmatch(r" +\* (\d+) more such rows?", line)
        if left_out:
            strips += [strips[-1]] * int(left_out[1])
        else:
            strips.append(re.fullmatch(r" *0x[0-9a-f]+ \|(.*)\| ?.*", line)[1])
    return "".join(strips)


def records():
    for name, layout in LAYOUTS.items():
        for carve in ("shape", "strides")[layout.packing == "packed" :]:
            for tail, padded in ((True, None), (False, None), (True, 192)):
                spec = CacheSpec(3, 3, 2, 2, 16, "int8_per_token_head", tail=tail, page_size_padded=padded)
                try:
                    cache = allocate(spec, layout, "meta", one_storage=True)
                except ValueError:  # this layout has heads outside the page, so pages cannot be padded
                    continue
                writers = cache.writers(cache.carve_scales(carve))
                yield pytest.param(byte_map(cache.owners(), writers), id=f"{name}-{carve}-{tail}-{padded}")


@pytest.mark.parametrize("record", list(records()))
@pytest.mark.parametrize("row_bytes", [64, 160])
def test_the_text_has_one_letter_per_byte_as_the_record_counts(record: ByteMap, row_bytes):
    letters = drawn(render_text(record, row_bytes))
    assert letters == "".join(letter(stretch) * (stretch.stop - stretch.start) for stretch in record.ranges)
    for state, mark in MARKS.items():
        assert letters.count(mark) == record.count(state)
    assert sum(letters.count(mark) for mark in "kvs") == record.count("right")


def test_a_small_map_in_full():
    cache = allocate(CacheSpec(2, 2, 1, 1, 8, "int8_per_token_head"), "cross-layer NHD", "meta")
    record = byte_map(cache.owners(), cache.writers(cache.carve_scales("shape")))
    assert render_text(record, 24) == "\n".join(
        [
            "cache: bytes [0, 96) of 96",
            "       0x0 |kkkkkkkk####vvvvvvvv####| block 0 · layer 0",
            "         * 1 more such row",
            "      0x30 |kkkkkkkk____vvvvvvvv____| block 1 · layer 0",
            "         * 1 more such row",
            LEGEND,
        ]
    )


def test_labels_and_offsets_are_those_of_the_rows():
    cache = allocate(CacheSpec(2, 2, 1, 1, 8, "int8_per_token_head"), "cross-layer NHD", "meta")
    record = byte_map(cache.owners(), window=(12, 60))
    text = render_text(record, 10).splitlines()
    for row in rows(record, 10):
        assert any(line.startswith(f"{row.start:>#10x} |") and line.endswith(row.label or "|") for line in text)


def test_a_data_view_that_is_neither_k_nor_v():
    view = View("hidden states", Storage("heap", 4), (4,), (1,))
    assert drawn(render_text(byte_map([view]))) == "dddd"


def test_same_record_same_text():
    cache = allocate(CacheSpec(2, 2, 1, 1, 8, "int8_per_token_head"), "BLHNC", "meta")
    assert render_text(byte_map(cache.owners())) == render_text(byte_map(cache.owners()))
