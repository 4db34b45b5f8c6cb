"""Views of live tensors: shared memory is found, and the views of a worker like vLLM's contain its bug."""

import inspect
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from kvviz.audit import writer
from kvviz.audit.audit import audit_views
from kvviz.audit.claims import Aligned, Disjoint, Follows, Overlay
from kvviz.audit.collect import usual_claims, views_of, views_of_vllm
from kvviz.audit.view import Storage, View
from kvviz.audit.views_file import read
from kvviz.audit.writer import tensors_of_kv_caches, tensors_of_sglang, tensors_of_vllm, write_views
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.spec import CacheSpec


def geometry(view):
    return view.storage.name, view.shape, view.stride, view.offset, view.itemsize


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_of_one_storage_are_found(device):
    pool, other = torch.zeros(64, device=device), torch.zeros(64, device=device)
    views = views_of({"a": pool[8:16], "b": other, "c": pool.view(8, 8).t(), "bytes": pool.view(torch.uint8)})
    assert [geometry(v) for v in views] == [
        ("storage 0", (8,), (1,), 8, 4),
        ("storage 1", (64,), (1,), 0, 4),
        ("storage 0", (8, 8), (1, 8), 0, 4),
        ("storage 0", (256,), (1,), 0, 1),
    ]
    assert {v.storage for v in views} == {Storage("storage 0", 256), Storage("storage 1", 256)}


def test_arrays_of_one_buffer_are_found():
    base = np.zeros((4, 6), np.int16)
    views = views_of(
        {"rows": base[1:3, ::-1], "other": np.zeros(3), "turned": base.T, "wide": as_strided(base, (9,), (4,))}
    )
    assert [geometry(v) for v in views] == [
        ("storage 0", (2, 6), (6, -1), 11, 2),
        ("storage 1", (3,), (1,), 0, 8),
        ("storage 0", (6, 4), (1, 6), 0, 2),
        ("storage 0", (9,), (2,), 0, 2),
    ]
    assert views[0].storage.nbytes == 48


def test_arrays_and_tensors_over_one_memory_are_one_storage():
    array = np.zeros(32, np.float32)
    tensor = torch.from_numpy(array)
    inner = torch.from_numpy(array[8:])
    views = views_of({"inner": inner, "array": array, "tensor": tensor, "back": tensor[4:].numpy()})
    assert {v.storage for v in views} == {Storage("storage 0", 128)}
    assert [v.offset for v in views] == [8, 0, 0, 4]


def test_fields_of_records_keep_their_bytes():
    records = np.zeros(3, np.dtype([("flag", "u1"), ("value", "<f4")]))
    flag, value = views_of({"flag": records["flag"], "value": records["value"]})
    assert geometry(flag) == ("storage 0", (3,), (5,), 0, 1)
    assert geometry(value) == ("storage 0", (3, 4), (5, 1), 1, 1) and value.axes == ("axis 0", "byte")
    start = records.__array_interface__["data"][0]
    assert [value.start_of((n, 0)) for n in range(3)] == [
        records["value"][n:].__array_interface__["data"][0] - start for n in range(3)
    ]


def test_the_address_of_a_storage_is_known_modulo_2_mib(tmp_path):
    """Alignment depends on the address. A tensor inside a larger buffer begins where its storage begins."""
    array = np.zeros(8192 + 4096, np.uint8)
    start = -array.ctypes.data % 4096 + 64
    pool = torch.from_numpy(array[start : start + 4096 + 64])
    assert pool.data_ptr() % 4096 == 64
    views = views_of({"pool": pool, "meta": torch.zeros(4, device="meta")})
    assert [view.storage.address for view in views] == [pool.data_ptr() % (2 << 20), None]
    write_views(tmp_path / "views.json", {"pool": pool, "meta": torch.zeros(4, device="meta")})
    file = read(tmp_path / "views.json")
    assert [storage.address for storage in file.storages] == [pool.data_ptr() % (2 << 20), None]
    assert str(pool.data_ptr()) not in (tmp_path / "views.json").read_text()
    for given in (views[:1], file.views[:1]):
        rows = View("rows", given[0].storage, (1, 64), (64, 1))
        (finding,) = audit_views([rows], [Aligned("rows", 4096)]).findings
        assert "64 bytes after a multiple of 4096" in finding.text
        assert audit_views([replace(rows, offset=4096 - 64)], [Aligned("rows", 4096)]).clean


def test_lists_and_roles():
    pool = torch.zeros(2, 8, device="meta")
    views = views_of({"k_buffer": [pool[0], pool[1]], "k_scale": torch.zeros(2)})
    assert [(v.name, v.role) for v in views] == [("k_buffer 0", "data"), ("k_buffer 1", "data"), ("k_scale", "scale")]
    assert usual_claims(views)[0].views == ("k_buffer 0", "k_buffer 1") and len(usual_claims(views)) == 1


@pytest.mark.parametrize("thing", [3, "text", None])
def test_what_is_no_tensor_is_refused(thing):
    with pytest.raises(ValueError, match="torch tensors and numpy arrays"):
        views_of({"x": thing})


def test_a_sparse_tensor_is_refused():
    with pytest.raises(ValueError, match="has no strides"):
        views_of({"x": torch.zeros(3, 3).to_sparse()})


def context(carve: str, wrapped: bool = False, layout: str = "cross-layer NHD", padded: int | None = None) -> dict:
    """Return the content of a worker's static forward context."""
    spec = CacheSpec(3, 6, 4, 2, 16, "int8_per_token_head", page_size_padded=padded)
    cache = allocate(spec, layout, "meta")
    layers = {}
    for number, (kv, (k, v)) in enumerate(zip(cache.kv_caches, cache.carve_scales(carve), strict=True)):
        impl = SimpleNamespace(_k_scale_cache=k, _v_scale_cache=v)
        layers[f"model.layers.{number}.attn"] = SimpleNamespace(kv_cache=[kv] if wrapped else kv, impl=impl)
    return layers


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_scale_bug_is_found_with_the_views_of_impl_and_not_without(wrapped):
    views = views_of_vllm(context("shape", wrapped))
    parts = ("K data", "V data", "K scale", "V scale")
    assert [v.name for v in views[:4]] == [f"model.layers.0.attn {part}" for part in parts]
    found = audit_views(views, usual_claims(views))
    assert found.of_kind("collision") and {f.views[0] for f in found.of_kind("misplaced")} == {
        v.name for v in views if v.role == "scale" and v.name.startswith(("model.layers.1", "model.layers.2"))
    } | {"model.layers.0.attn K scale", "model.layers.0.attn V scale"}
    alone = [v for v in views if v.role == "data"]
    assert audit_views(alone, usual_claims(alone)).clean
    right = views_of_vllm(context("strides", wrapped))
    assert audit_views(right, usual_claims(right)).clean


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_each_scale_is_claimed_to_follow_its_data(layout):
    views = views_of_vllm(context("strides", layout=layout))
    claims = usual_claims(views)
    assert [c for c in claims if isinstance(c, Follows)] == [
        Follows(f"model.layers.{n}.attn {half} scale", f"model.layers.{n}.attn {half} data", 16)
        for n in range(3)
        for half in "KV"
    ]
    assert audit_views(views, claims).clean and {v.shape for v in views if v.role == "data"} == {(6, 4, 2, 16)}


def test_scales_that_step_by_the_unpadded_page_are_found_by_the_usual_claims(tmp_path):
    """vLLM issue 49716: scales do not follow their data, and lie on data of other blocks."""
    layers = context("strides", layout="NHD", padded=512)
    for layer in layers.values():
        for half in ("_k_scale_cache", "_v_scale_cache"):
            scale = getattr(layer.impl, half)
            step = 2 * 4 * 2 * 20 // 4  # a page's content, in float32
            setattr(layer.impl, half, scale.as_strided(scale.shape, (step, *scale.stride()[1:])))
    write_views(tmp_path / "views.json", tensors_of_vllm(layers))
    found = read(tmp_path / "views.json").audit()
    assert [f.elements for f in found.of_kind("misplaced")] == [5 * 4 * 2] * 6
    assert {frozenset(view.split()[-1] for view in f.views) for f in found.of_kind("collision")} == {
        frozenset(("data", "scale"))
    }


def test_scales_are_claimed_to_lie_apart_from_data(tmp_path):
    """All data of a page come first, then all scales. The scales step as if each scale were in the tail of its cell."""
    found = []
    for offset, strides in ((2, (12, 3)), (8, (12, 1))):
        pages = [torch.zeros(96, dtype=torch.uint8) for _ in range(2)]
        tensors = {}
        for number, page in enumerate(pages):
            tensors[f"layer {number} data"] = page.as_strided((2, 4, 8), (48, 8, 1))
            tensors[f"layer {number} scale"] = page.view(torch.float32).as_strided((2, 4), strides, offset)
        write_views(tmp_path / "views.json", tensors)
        file = read(tmp_path / "views.json")
        assert file.claims == usual_claims(views_of(tensors)) == (Disjoint(tuple(tensors)),)
        found.append(file.audit())
    wrong, right = found
    assert [(f.kind, f.views, f.bytes) for f in wrong.findings] == [
        ("collision", (f"layer {n} data", f"layer {n} scale"), 16) for n in range(2)
    ]
    assert {f.example[1].start_bytes for f in wrong.findings} == {8} and right.clean


def test_scales_in_the_tails_of_whole_cells_are_not_claimed_to_lie_apart(tmp_path):
    """Data views with tails: each scale is the end of its cell. A scale elsewhere in the cell is wrong."""
    pool = torch.zeros(240, dtype=torch.uint8)
    for offset, clean in ((4, True), (3, False)):
        cells, scales = pool.view(2, 6, 20), pool.view(torch.float32).as_strided((2, 6), (30, 5), offset)
        tensors = {"a data": cells, "a scale": scales, "b data": torch.zeros(3), "k_scale": torch.zeros(2)}
        write_views(tmp_path / "views.json", tensors)
        claims = read(tmp_path / "views.json").claims
        assert claims == usual_claims(views_of(tensors)) and claims[-1] == Disjoint(("a scale", "k_scale"))
        assert read(tmp_path / "views.json").audit().clean == clean


def test_permuted_scales_are_found_by_the_usual_claims(tmp_path):
    layers = context("strides", layout="NHD")
    for layer in layers.values():
        k, v = layer.impl._k_scale_cache, layer.impl._v_scale_cache
        layer.impl._k_scale_cache, layer.impl._v_scale_cache = v, k
    write_views(tmp_path / "views.json", tensors_of_vllm(layers))
    found = read(tmp_path / "views.json").audit()
    assert len(found.of_kind("misplaced")) == 6 and not found.of_kind("collision")


def test_nothing_is_claimed_of_scales_where_cells_leave_no_room_or_that_lie_elsewhere(tmp_path):
    pool = torch.zeros(400, dtype=torch.uint8)
    dense = {"a K data": pool[:256].view(4, 4, 16), "a K scale": pool[256:320].view(torch.float32).view(4, 4)}
    apart = {"b data": pool[320:].view(4, 20)[:, :16], "b scale": torch.zeros(4)}
    heads = {
        "c data": pool[:256].view(2, 8, 16).transpose(0, 1),
        "c scale": pool[256:320].view(torch.float32).view(8, 2),
    }
    other = {"d data": pool[320:].view(4, 20)[:, :16], "d scale": torch.zeros(3), "e": torch.tensor(1.0)}
    for tensors in (dense, apart, heads, other, {"f data": pool[:4], "f scale": pool[4]}):
        write_views(tmp_path / "views.json", tensors)
        claims = read(tmp_path / "views.json").claims
        assert claims == usual_claims(views_of(tensors)) and not [c for c in claims if isinstance(c, Follows)]


def test_side_tensors_of_scales_leave_the_cells_whole():
    """The cache has no tails, and its scales lie in separate tensors."""
    kv, scales = torch.zeros(2, 2, 4, 32, dtype=torch.int8), [torch.zeros(2, 4, 2) for _ in "KV"]
    impl = SimpleNamespace(_k_scale_cache=scales[0], _v_scale_cache=scales[1])
    views = views_of_vllm({"a": SimpleNamespace(kv_cache=kv, impl=impl)})
    assert [v.shape for v in views] == [(2, 4, 2, 16)] * 2 + [(2, 4, 2)] * 2
    assert audit_views(views, usual_claims(views)).clean


def test_layers_before_the_first_pass_and_without_a_cache():
    odd = SimpleNamespace(_k_scale_cache=torch.zeros(7), _v_scale_cache=None)
    layers = {
        "fresh": SimpleNamespace(kv_cache=torch.zeros(2, 4), impl=SimpleNamespace(_k_scale_cache=None)),
        "empty": SimpleNamespace(kv_cache=[torch.tensor([])], impl=SimpleNamespace()),
        "mamba": SimpleNamespace(kv_cache=([torch.zeros(3), torch.zeros(5)],)),
        "odd": SimpleNamespace(kv_cache=torch.zeros(2, 2, 4, 2, 20), impl=odd),
        "none": SimpleNamespace(),
    }
    assert [v.name for v in views_of_vllm(layers)] == ["fresh KV", "mamba KV 0", "mamba KV 1", "odd KV", "odd K scale"]


@pytest.mark.parametrize("carve", ["shape", "strides"])
def test_a_written_file_is_judged_elsewhere_as_here(carve, tmp_path):
    layers = context(carve)
    write_views(tmp_path / "views.json", tensors_of_vllm(layers))
    views = views_of_vllm(layers)
    assert read(tmp_path / "views.json").views == views
    assert read(tmp_path / "views.json").claims == usual_claims(views)
    assert read(tmp_path / "views.json").audit() == audit_views(views, usual_claims(views))


def test_the_writer_can_be_pasted(tmp_path):
    room: dict = {}
    exec(inspect.getsource(writer), room)
    pool = torch.zeros(200, 64, 2, 16, dtype=torch.float16)
    kinds = (torch.float8_e4m3fn, torch.bfloat16, torch.uint8, torch.bool, torch.complex64)
    tensors = {f"layer {n}": pool[n] for n in range(195)} | {str(k): torch.zeros(3, dtype=k) for k in kinds}
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        room["write_views"](tmp_path / "views.json", tensors)
        times.append(time.perf_counter() - begun)
    print(f"{len(tensors)} tensors written in {1e3 * min(times):.1f} ms")
    assert read(tmp_path / "views.json").views == views_of(tensors)
    assert room["tensors_of_vllm"](context("strides")).keys() == tensors_of_vllm(context("strides")).keys()


def test_collecting_imports_neither_torch_nor_numpys_friends():
    code = "import sys; import kvviz.audit.collect; sys.exit(bool({'torch', 'triton', 'vllm'} & sys.modules.keys()))"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


@pytest.mark.parametrize("cut", [(0, 100, 0, 50), (10, 20, 15, 30)])
def test_the_pasteable_writer_joins_memories_that_overlap(tmp_path, cut):
    """Two tensors over one pool have separate storages. The file must merge these storages, as ``views_of`` does."""
    pool = np.zeros(100, np.uint8)
    tensors = {"x": torch.from_numpy(pool[cut[0] : cut[1]]), "y": torch.from_numpy(pool[cut[2] : cut[3]])}
    write_views(tmp_path / "w.json", tensors)
    (finding,) = read(tmp_path / "w.json").audit().findings
    assert (finding.kind, finding.bytes) == ("collision", min(cut[1], cut[3]) - max(cut[0], cut[2]))


def test_what_the_page_on_audits_shows_runs(tmp_path):
    """Run the calls for each engine, and the lines that add claims to a file."""
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    blocks = [inspect.cleandoc("\n" + part) for part in re.findall(r" {3}```python\n(.*?) {3}```", text, re.DOTALL)]
    vllm, others, more = (block.replace("/tmp/views-", f"{tmp_path}/views-") for block in blocks)
    torch_ = SimpleNamespace(distributed=SimpleNamespace(get_rank=lambda: 0))
    held = SimpleNamespace(static_forward_context=context("strides"))
    pool = SimpleNamespace(k_buffer=[torch.zeros(4, 2, 8)], v_buffer=[torch.zeros(4, 2, 8)])
    room = {"torch": torch_, **vars(writer), "cache": SimpleNamespace(cache_allocators={})}
    room |= {"runner": SimpleNamespace(compilation_config=held), "kv_caches": {"a": pool.k_buffer[0]}}
    room["model_runner"] = SimpleNamespace(token_to_kv_pool=pool)
    exec(vllm, room)
    exec(more.replace("more.json", str(tmp_path / "more.json")), room)
    more_claims = read(tmp_path / "more.json").claims
    assert len(more_claims) == len(read(tmp_path / "views-rank0.json").claims) + 12 == 19
    assert read(tmp_path / "more.json").audit().clean
    written = []
    for line in others.splitlines():
        exec(line, room)
        written.append([view.name for view in read(tmp_path / "views-rank0.json").views])
    assert written == [["layer 0 K data", "layer 0 V data"], ["a KV"], []]


def sglang_pool(**buffers) -> SimpleNamespace:
    return SimpleNamespace(start_layer=3, **buffers)


def test_pools_of_sglang_with_one_buffer_with_scales_and_with_index_keys():
    """A DSA pool: 64 tokens per page, 128 bytes per index key, then 4 bytes per scale."""
    pool = sglang_pool(
        kv_buffer=[torch.zeros(128, 1, 656, dtype=torch.uint8)] * 2, kv_scale_buffer=None, index_page_size=64,
        index_head_dim=128,
        index_k_with_scale_buffer=[torch.zeros(2, 64 * 132, dtype=torch.uint8), torch.zeros(0, 64 * 132)],
    )  # fmt: skip
    found = tensors_of_sglang(pool)
    assert list(found) == ["layer 3 KV data", "layer 4 KV data", "layer 3 index K data", "layer 3 index K scale"]
    data, scale = (views_of(found)[n] for n in (2, 3))
    assert (data.shape, data.stride, scale.shape, scale.offset) == ((2, 64, 128), (8448, 128, 1), (2, 64, 4), 8192)
    assert scale.where((1, 2, 3)) == "layer 3 index K scale [page 1, token 2, byte 3]"
    fp4 = {f"{half}_buffer": [torch.zeros(8, 2, 32, dtype=torch.uint8)] for half in "kv"}
    fp4 |= {f"{half}_scale_buffer": [torch.zeros(8, 8, dtype=torch.uint8)] for half in "kv"}
    inner = sglang_pool(**fp4)
    names = [f"layer 3 {half} {kind}" for kind in ("data", "scale") for half in "KV"]
    assert list(tensors_of_sglang(inner)) == names
    both = tensors_of_sglang(SimpleNamespace(full_kv_pool=inner, swa_kv_pool=sglang_pool(**fp4)))
    assert list(both) == [f"{kind} {name}" for kind in ("full", "swa") for name in names]


def test_written_axes_have_names(tmp_path):
    """A finding says "block 0, token 0, head 0" and never "axis 0 0"."""
    for name, tensors in (
        ("vllm", tensors_of_vllm(context("shape"))),
        ("caches", tensors_of_kv_caches({"a": torch.zeros(3, 2, 4, 2, 8), "b": [torch.zeros(3, 2, 4, 8)]})),
        ("mla", tensors_of_kv_caches({"a": torch.zeros(3, 4, 8), "half first": torch.zeros(2, 3, 4, 2, 8)})),
    ):
        write_views(tmp_path / name, tensors)
        file = read(tmp_path / name)
        assert all(view.axes for view in file.views) and file.views == views_of(tensors)
        assert "axis" not in str(file.audit())
    assert "[block 0, token 0, head 0]" in str(read(tmp_path / "vllm").audit())
    (unknown,) = views_of(tensors_of_kv_caches({"two blocks": torch.zeros(2, 2, 4, 2, 8)}))
    assert unknown.axes == ()  # the shape does not show which axis counts K and V
    with pytest.raises(ValueError, match="x: 1 axis names .* for a tensor of 2 axes"):
        write_views(tmp_path / "x", {"x": (torch.zeros(2, 2), ("block",))})


def test_groups_of_a_pool_are_written_as_an_overlay(tmp_path):
    """One id is one sliding block of 96 bytes, or three full blocks of 32 bytes."""
    pool = torch.zeros(576, dtype=torch.uint8)
    tensors = {"sliding 0": pool.view(6, 96)[:, :48], "sliding 1": pool.view(6, 96)[:, 48:], "full": pool.view(18, 32)}
    groups = [(["sliding 0", "sliding 1"], 1), (["full"], 3)]
    write_views(tmp_path / "views.json", tensors | {"other": torch.zeros(3)}, groups)
    file = read(tmp_path / "views.json")
    assert file.claims == (Disjoint(("sliding 0", "sliding 1")), Overlay(("sliding 0", "sliding 1", "full"), (1, 1, 3)))
    assert file.audit().clean
    write_views(tmp_path / "views.json", tensors)
    assert len(read(tmp_path / "views.json").audit().of_kind("collision")) == 2


def test_a_role_is_read_off_the_last_word_alone():
    tensors = {"multiscale.l0 KV": torch.zeros(4), "multiscale.l1": torch.zeros(4), "l0._k_scale_cache": torch.zeros(2)}
    assert [view.role for view in views_of(tensors)] == ["data", "data", "scale"]


def test_two_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tensors would get the name 'a 0'"):
        views_of({"a": [torch.zeros(2), torch.zeros(2)], "a 0": torch.zeros(2)})
