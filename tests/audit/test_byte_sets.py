"""Byte sets of views: no byte occurs twice in a set, and together the sets hold every byte of every element."""

import numpy as np
import pytest

from kvviz.audit.budget import TooMuchWorkError
from kvviz.audit.byte_sets import (
    MAX_SETS,
    ByteSet,
    byte_range,
    byte_sets,
    byte_sets_of_all,
    merge_dims,
    nested_parts,
    start_sets,
)
from kvviz.audit.sweep import Sweep
from kvviz.audit.view import View
from tests.audit.random_views import STORAGE, random_set


def listed(byte_set: ByteSet) -> list[int]:
    """Return every byte of a byte set, in the order of its patterns."""
    found = []
    for p in byte_set:
        copies = p.base + np.arange(p.count)[:, None, None] * p.step
        found += (copies + p.starts[:, None] + np.arange(p.width)).ravel().tolist()
    return found


def test_sets_hold_every_byte_of_every_element():
    for seed in range(500):
        views = random_set(seed)
        for view, sets in zip(views, byte_sets_of_all(views), strict=True):
            bytes_of_sets = [listed(byte_set) for byte_set in sets]
            assert all(len(found) == len(set(found)) for found in bytes_of_sets), seed
            assert sorted(sum(bytes_of_sets, [])) == sorted(view.all_bytes.tolist()), seed


def test_first_bytes_are_counted_once_per_index():
    for seed in range(500):
        for view in random_set(seed):
            regions = Sweep([start_sets(view), [byte_range(-(1 << 20), 1 << 20)]]).regions()
            assert sum(region.elements[0] for region in regions) == view.num_elements


def test_overlapping_rows_are_split():
    assert nested_parts([(1, 4), (2, 3)], 1, "rows") == [(0, [(1, 4), (4, 2)]), (2, [(1, 4)])]
    assert merge_dims([(4, 8), (32, 10), (400, 2)]) == [(4, 80), (400, 2)]


def test_a_million_blocks_are_one_pattern():
    view = View("v", STORAGE, (1_000_000, 2, 4), (2048, 132, 1))
    ((pattern,),) = byte_sets(view)
    assert (pattern.step, pattern.count, pattern.starts.tolist(), pattern.width) == (2048, 1_000_000, [0, 132], 4)


@pytest.mark.parametrize(
    ("shape", "stride", "text"),
    [
        ((5000, 2), (0, 1), "v repeats each element 5000 times .stride 0., and at most 4096 repeats are counted"),
        ((2, MAX_SETS + 1, MAX_SETS + 1), (1, 1, 1), "v: too many overlapping elements to count exactly"),
        ((3000, 3000, 3000), (10**9, 10**5, 3), "v has more than 4000000 byte ranges that do not repeat"),
    ],
)
def test_errors_tell_what_is_too_much(shape, stride, text):
    with pytest.raises(TooMuchWorkError, match=text):
        byte_sets(View("v", STORAGE, shape, stride))
