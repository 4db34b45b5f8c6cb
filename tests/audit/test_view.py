"""View: the address of each element against plain loops, for views from tensors and views written by hand."""

import random
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch

from kvviz.audit.audit import audit_views
from kvviz.audit.claims import BelongsAt, Follows
from kvviz.audit.rightful import rightful_place
from kvviz.audit.view import MAX_ELEMENTS, Storage, View

STORAGE = Storage("cache", 240)


def walk(shape, stride, offset, itemsize) -> list[int]:
    """Return the first byte of each element. The last index counts fastest."""
    return [
        (offset + sum(i * step for i, step in zip(index, stride, strict=True))) * itemsize
        for index in product(*map(range, shape))
    ]


def random_geometry(seed: int):
    draw = random.Random(seed)
    axes = draw.randint(0, 4)
    shape = tuple(draw.randint(0, 4) for _ in range(axes))
    stride = tuple(draw.randint(-9, 9) for _ in range(axes))
    return shape, stride, draw.randint(-20, 20), draw.choice((1, 2, 4, 8))


@pytest.mark.parametrize("seed", range(60))
def test_starts_are_where_loops_lead(seed):
    shape, stride, offset, itemsize = random_geometry(seed)
    view = View("v", STORAGE, shape, stride, offset, itemsize)
    want = walk(shape, stride, offset, itemsize)
    assert view.starts.ravel().tolist() == want
    assert view.starts.shape == shape and view.num_elements == len(want)
    assert view.all_bytes.tolist() == [start + byte for start in want for byte in range(itemsize)]
    assert [view.index(n) for n in range(len(want))] == list(product(*map(range, shape)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_tensor_gives_its_geometry(dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    base = torch.arange(240, dtype=torch.uint8).view(dtype)
    tensor = base.as_strided((3, 2, 2), (17, 1, 5), 3)
    view = View.of(tensor, "v", STORAGE, ("block", "token", "head"), "scale")
    assert (view.shape, view.stride, view.offset, view.itemsize) == ((3, 2, 2), (17, 1, 5), 3, size)
    assert (view.name, view.axes, view.role) == ("v", ("block", "token", "head"), "scale")
    read = torch.arange(240, dtype=torch.uint8)[torch.from_numpy(view.bytes_of(view.starts))]
    assert torch.equal(read, tensor.contiguous().view(torch.uint8).view(3, 2, 2, size))


def test_a_meta_tensor_gives_its_geometry():
    tensor = torch.empty(240, dtype=torch.uint8, device="meta").as_strided((2, 3), (100, 7), 5)
    assert View.of(tensor, "v", STORAGE).starts.tolist() == [[5, 12, 19], [105, 112, 119]]


def test_a_tensor_must_lie_in_the_storage_named():
    tensor = torch.zeros(100, dtype=torch.uint8)[:50]
    with pytest.raises(ValueError, match="v: storage 'cache' should have 240 bytes, but the tensor's storage has 100"):
        View.of(tensor, "v", STORAGE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((2, 3), (1,)), r"shape \(2, 3\) and stride \(1,\) differ in length"),
        (((2,), (1,), 0, 1, ("a", "b")), r"2 axis names \('a', 'b'\) for 1 axes"),
        (((-2,), (1,)), r"shape \(-2,\) must be at least 0"),
        (((2,), (1,), 0, 0), "itemsize must be at least 1, not 0"),
        (((2,), (1,), 0, -4), "itemsize must be at least 1, not -4"),
        (((2.0,), (1,)), "integers, not 2.0"),
        (((2,), (1.5,)), "integers, not 1.5"),
        (((2,), (1,), 0.5), "integers, not 0.5"),
        (((2,), (1,), 0, "4"), "integers, not '4'"),
        (((None,), (1,)), "integers, not None"),
    ],
)
def test_what_is_no_geometry_is_refused(arguments, said):
    with pytest.raises(ValueError, match=f"^v: .*{said}"):
        View("v", STORAGE, *arguments)


def test_integers_of_numpy_are_integers():
    assert View("v", STORAGE, (np.int64(2),), (np.int32(3),), np.int64(1)).starts.tolist() == [1, 4]


@pytest.mark.parametrize("shape", [(MAX_ELEMENTS + 1,), (1 << 40, 1 << 40)])
def test_too_many_elements_are_counted_but_not_listed(shape):
    view = View("v", STORAGE, shape, (1,) * len(shape))
    assert view.num_elements == int(np.prod(shape, dtype=object))
    with pytest.raises(ValueError, match=f"v: {view.num_elements} elements.*at most {MAX_ELEMENTS}"):
        view.starts  # noqa: B018


def test_no_axes_are_one_element_and_an_empty_axis_is_none():
    assert View("v", STORAGE, (), (), 3, 4).all_bytes.tolist() == [12, 13, 14, 15]
    assert View("v", STORAGE, (), ()).index(0) == ()
    empty = View("v", STORAGE, (2, 0, 3), (1, 1, 1))
    assert (empty.num_elements, empty.all_bytes.tolist()) == (0, [])


def test_starts_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        View("v", STORAGE, (2,), (1,)).starts[0] = 5


def test_a_place_in_words():
    view = View("layer 3 K scale", STORAGE, (2, 2, 3), (6, 3, 1), axes=("block", "token", "head"))
    assert view.where((1, 0, 2)) == "layer 3 K scale [block 1, token 0, head 2]"
    assert View("v", STORAGE, (2, 2), (2, 1)).where((1, 0)) == "v [axis 0 1, axis 1 0]"


def test_views_compare_by_value():
    assert View("v", STORAGE, (2,), (1,)) == View("v", Storage("cache", 240), (2,), (1,))
    assert View("v", STORAGE, (2,), (1,)) != View("v", STORAGE, (2,), (2,))


def test_integers_of_32_bits_do_not_wrap_around():
    """A view of 4.9 GB over 1 GB, written with numpy's int32: products of its strides are larger than 2**31."""
    n = np.int32
    view = View("u", Storage("s", n(10**9)), [n(70_000), n(70_000)], (n(70_000), n(1)), n(0), n(1), ["block", "byte"])
    numbers = (*view.shape, *view.stride, view.offset, view.itemsize, view.storage.nbytes)
    assert {type(number) for number in numbers} == {int}
    assert view.axes == ("block", "byte") and view.start_of((n(69_999), n(69_999))) == 70_000**2 - 1
    (finding,) = audit_views([view]).findings
    assert (finding.kind, finding.bytes) == ("out_of_bounds", 3_900_000_000)


@pytest.mark.parametrize("nbytes", [-1, 1.0, True, None])
def test_a_storage_has_a_number_of_bytes(nbytes):
    with pytest.raises(ValueError, match="storage s: nbytes must be an integer of at least 0"):
        Storage("s", nbytes)
    with pytest.raises(ValueError, match="must be integers, not True"):
        View("v", STORAGE, (True,), (1,))


def test_a_rightful_map_keeps_fields_that_are_added_to_views():
    @dataclass(frozen=True)
    class Traced(View):
        origin: str = ""

    data = View("data", STORAGE, (2, 16), (20, 1))
    scale = Traced("scale", STORAGE, (2,), (5,), 4, 4, ("block",), "scale", origin="layer 0")
    for claim in (Follows("scale", "data", 16), BelongsAt("data", scale)):
        assert rightful_place(claim, {"data": data, "scale": scale}).origin == "layer 0"
