"""Types that store several values together: bytes against enumeration, in views files and from tensors."""

import json
import random
from itertools import product

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvviz.audit.audit import audit_views
from kvviz.audit.claims import Disjoint, Follows
from kvviz.audit.collect import views_of
from kvviz.audit.packed import PACKED, elements_of, values_of
from kvviz.audit.view import Storage, View
from kvviz.audit.views_file import ViewsFile, ViewsFileError, anonymous, dump, load


def file_of(*views: dict, nbytes: int = 1 << 20, claims=()) -> ViewsFile:
    views = [{"name": f"v{n}", "storage": "s"} | view for n, view in enumerate(views)]
    head = {"format": "kvviz-views", "version": 1, "storages": [{"name": "s", "nbytes": nbytes}]}
    return load(json.dumps(head | {"views": views, "claims": list(claims)}))


@pytest.mark.parametrize("name", [name for name in PACKED if "_" in name and not name.startswith("float")] + ["mxfp4"])
def test_block_sizes_are_those_of_llama_cpp(name):
    values, bytes_ = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    assert PACKED[name] == (bytes_, values)


def test_bits_are_whole():
    for kind, bits in product(("int", "uint"), range(1, 8)):
        bytes_, values = PACKED[f"{kind}{bits}"]
        assert bytes_ * 8 == values * bits


@pytest.mark.parametrize("seed", range(200))
def test_a_view_in_values_has_the_bytes_of_its_values(seed):
    """Each value is looked up by itself: value number v of the storage lies in element v // values."""
    draw = random.Random(seed)
    name = draw.choice(list(PACKED))
    bytes_, values = PACKED[name]
    inner, outer = draw.randint(1, 3), draw.randint(1, 4)
    step = draw.choice((inner, inner + 2)) * values
    shape, stride, offset = [outer, inner * values], [step, 1], draw.randint(0, 3) * values
    if draw.random() < 0.5:
        shape, stride = shape[::-1], stride[::-1]
    view = file_of({"dtype": name, "shape": shape, "stride": stride, "offset": offset}).views[0]
    numbers = [offset + i * stride[0] + j * stride[1] for i, j in product(*map(range, shape))]
    want = {number // values * bytes_ + byte for number in numbers for byte in range(bytes_)}
    assert sorted(view.all_bytes.tolist()) == sorted(want) and (view.itemsize, view.values) == (bytes_, values)
    elements = elements_of((tuple(shape), tuple(stride), offset), values)
    found, steps, start = values_of(elements, values)
    assert (found, start) == (tuple(shape), offset) and elements_of((found, steps, start), values) == elements
    assert all(a == b for a, b, size in zip(steps, stride, shape, strict=True) if size > 1)


def test_a_file_in_values_is_written_in_values():
    others = [{"dtype": dtype, "shape": [8], "stride": [1]} for dtype in ("int4", {"itemsize": 3, "values": 4})]
    file = file_of({"dtype": "q8_0", "shape": [4, 128], "stride": [160, 1], "offset": 32}, *others)
    assert load(dump(file)) == file and anonymous(file).views[0].values == 32
    written = json.loads(dump(file))["views"]
    assert written[0]["dtype"] == {"itemsize": 34, "values": 32} and written[0]["shape"] == [4, 128]
    assert (written[0]["stride"], written[0]["offset"]) == ([160, 1], 32)
    scalar = ViewsFile.of([View("x", Storage("s", 99), (2,), (3,), itemsize=18, values=32)])
    assert json.loads(dump(scalar))["views"][0]["dtype"] == {"itemsize": 18}  # no axis of stride 1 to count values on


def test_k_and_v_of_q8_0_that_share_bytes():
    """Head size 128: a cell has 4 elements of 34 bytes, 136 bytes. V starts only 128 bytes behind K."""
    cell = {"dtype": "q8_0", "shape": [3, 128], "stride": [256, 1], "axes": ["token", "value"]}
    pool = Storage("s", 3 * 272)
    k = file_of(cell, nbytes=pool.nbytes).views[0]
    v = View("v", pool, (3, 136), (272, 1), 128, axes=("token", "byte"))
    (finding,) = audit_views([k, v], [Disjoint(("v0", "v"))]).findings
    assert (finding.kind, finding.bytes, finding.elements) == ("collision", 3 * 8, 3 + 3 * 8)
    assert str(finding.example[0]) == "v0 [token 0, value 96 to 127] at bytes [102, 136)"


def test_scales_behind_int4_cells():
    """A cell of 64 int4 values has 32 bytes, and its scale lies behind them."""
    file = file_of({"dtype": "int4", "shape": [4, 64], "stride": [72, 1]},
                   {"dtype": "float32", "shape": [4], "stride": [9], "offset": 8}, nbytes=144)  # fmt: skip
    assert audit_views(file.views, [Disjoint(("v0", "v1")), Follows("v1", "v0", 32)]).clean
    (finding,) = audit_views(file.views, [Follows("v1", "v0", 64)]).findings
    assert (finding.kind, finding.elements) == ("misplaced", 4)


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ({"shape": [2, 33], "stride": [64, 1]}, "the size of axis 1 is 33, which is not a multiple of 32"),
        ({"shape": [2, 32], "stride": [40, 1]}, "a stride is 40, which is not a multiple of 32"),
        ({"shape": [2, 32], "stride": [64, 1], "offset": 8}, "the offset is 8, which is not a multiple of 32"),
        ({"shape": [2, 32], "stride": [64, 2]}, "no axis has stride 1, but 32 values that lie side by side are one"),
    ],
)
def test_values_that_are_no_whole_elements_are_refused(view, said):
    with pytest.raises(ViewsFileError, match=said):
        file_of({"dtype": "q8_0"} | view)


def test_tensors_of_bytes_with_a_type():
    pool = torch.zeros(4, 272, dtype=torch.uint8)
    views = views_of({"K data": pool[:, :136], "V data": pool[:, 136:]}, dtypes={"K data": "q8_0", "V data": "q8_0"})
    assert [(v.shape, v.stride, v.offset, v.itemsize, v.values) for v in views] == [
        ((4, 4), (8, 1), 0, 34, 32), ((4, 4), (8, 1), 4, 34, 32)
    ]  # fmt: skip
    assert audit_views(views, [Disjoint(("K data", "V data"))]).clean
    (packed,) = views_of({"K": [pool[:, :64]]}, dtypes={"K": "int4"})
    assert packed.name == "K 0" and packed.where((1, 3)) == "K 0 [axis 0 1, axis 1 6 to 7]"


def test_quantised_tensors_of_torch_have_their_bytes():
    """The shape of quint4x2 counts values. A row of 5 values has 3 bytes."""
    make = torch._empty_per_channel_affine_quantized
    for dtype, row in ((torch.quint4x2, 3), (torch.quint2x4, 2)):
        tensor = make((3, 5), scales=torch.ones(3), zero_points=torch.zeros(3), axis=0, dtype=dtype)
        (view,) = views_of({"w": tensor})
        assert view.shape == (3, row) and view.storage.nbytes == 3 * row and audit_views([view]).clean


@pytest.mark.parametrize(
    ("dtypes", "said"),
    [
        ({"K": "q8"}, "K: type 'q8' does not exist: it is one of"),
        ({"X": "q8_0"}, "dtypes names 'X', but no tensor has this name"),
        ({"K": "q8_0"}, "K: the size of axis 1 is 40, which is not a multiple of 34: 34 bytes are one element"),
        ({"wide": "int4"}, "wide has elements of 4 bytes: a tensor of type int4 must have bytes"),
    ],
)
def test_types_that_do_not_fit_are_refused(dtypes, said):
    with pytest.raises(ValueError, match=said):
        views_of({"K": torch.zeros(2, 40, dtype=torch.uint8), "wide": torch.zeros(2)}, dtypes=dtypes)
