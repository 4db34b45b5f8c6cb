"""Views from real things: memory that is shared is found, and the views of a vLLM-like worker hold its bug."""

import inspect
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from kvviz.memory.audit import audit
from kvviz.memory.buffers import allocate
from kvviz.memory.collect import usual_claims, views_of, views_of_vllm, write_views
from kvviz.memory.spec import CacheSpec
from kvviz.memory.view import Storage
from kvviz.memory.viewsfile import read


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
    with pytest.raises(ValueError, match="no strides to look at"):
        views_of({"x": torch.zeros(3, 3).to_sparse()})


def context(carve: str, wrapped: bool = False) -> dict:
    """What a worker's static forward context holds, for a cross-layer cache."""
    cache = allocate(CacheSpec(3, 6, 4, 2, 16, "int8_per_token_head"), "cross-layer NHD", "meta")
    layers = {}
    for number, (kv, (k, v)) in enumerate(zip(cache.kv_caches, cache.carve_scales(carve), strict=True)):
        impl = SimpleNamespace(_k_scale_cache=k, _v_scale_cache=v)
        layers[f"model.layers.{number}.attn"] = SimpleNamespace(kv_cache=[kv] if wrapped else kv, impl=impl)
    return layers


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_scale_bug_is_found_with_the_views_of_impl_and_not_without(wrapped):
    views = views_of_vllm(context("shape", wrapped))
    assert [v.name for v in views[:3]] == [f"model.layers.0.attn {part}" for part in ("KV", "K scale", "V scale")]
    found = audit(views, usual_claims(views))
    assert found.of_kind("collision") and {"model.layers.2.attn K scale"} & set(found.findings[0].views)
    alone = [v for v in views if v.role == "data"]
    assert audit(alone, usual_claims(alone)).clean
    right = views_of_vllm(context("strides", wrapped))
    assert audit(right, usual_claims(right)).clean


def test_layers_before_the_first_pass_and_without_a_cache():
    layers = {
        "fresh": SimpleNamespace(kv_cache=torch.zeros(2, 4), impl=SimpleNamespace(_k_scale_cache=None)),
        "empty": SimpleNamespace(kv_cache=[torch.tensor([])], impl=SimpleNamespace()),
        "mamba": SimpleNamespace(kv_cache=([torch.zeros(3), torch.zeros(5)],)),
        "none": SimpleNamespace(),
    }
    assert [v.name for v in views_of_vllm(layers)] == ["fresh KV", "mamba KV 0", "mamba KV 1"]


def tensors_of(layers: dict) -> dict:
    found = {}
    for name, layer in layers.items():
        kv = layer.kv_cache
        found |= {f"{name} KV": kv, f"{name} K scale": layer.impl._k_scale_cache}
        found[f"{name} V scale"] = layer.impl._v_scale_cache
    return found


@pytest.mark.parametrize("carve", ["shape", "strides"])
def test_a_written_file_is_judged_elsewhere_as_here(carve, tmp_path):
    layers = context(carve)
    write_views(tmp_path / "views.json", tensors_of(layers))
    views = views_of_vllm(layers)
    assert read(tmp_path / "views.json").views == views
    assert read(tmp_path / "views.json").audit() == audit(views, usual_claims(views))


def test_the_writer_can_be_pasted_and_takes_milliseconds(tmp_path):
    source = inspect.getsource(write_views)
    assert len(source.splitlines()) <= 30
    room: dict = {}
    exec(source, room)
    pool = torch.zeros(200, 64, 2, 16, dtype=torch.float16)
    kinds = (torch.float8_e4m3fn, torch.bfloat16, torch.uint8, torch.bool, torch.complex64)
    tensors = {f"layer {n}": pool[n] for n in range(195)} | {str(k): torch.zeros(3, dtype=k) for k in kinds}
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        room["write_views"](tmp_path / "views.json", tensors)
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.05
    assert read(tmp_path / "views.json").views == views_of(tensors)


def test_collecting_imports_neither_torch_nor_numpys_friends():
    code = "import sys; import kvviz.memory.collect; sys.exit(bool({'torch', 'triton', 'vllm'} & sys.modules.keys()))"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


@pytest.mark.parametrize("cut", [(0, 100, 0, 50), (10, 20, 15, 30)])
def test_the_pasteable_writer_joins_memories_that_overlap(tmp_path, cut):
    """Two imports of one pool have storages of their own; the file must see what ``views_of`` sees."""
    pool = np.zeros(100, np.uint8)
    tensors = {"x": torch.from_numpy(pool[cut[0] : cut[1]]), "y": torch.from_numpy(pool[cut[2] : cut[3]])}
    write_views(tmp_path / "w.json", tensors)
    (finding,) = read(tmp_path / "w.json").audit().findings
    assert (finding.kind, finding.bytes) == ("collision", min(cut[1], cut[3]) - max(cut[0], cut[2]))
