"""The recipe for SGLang, run against the real pools: MHA, MLA, MLA with fp4 scales, and DSA with index keys."""

import pytest

from kvviz.audit.collect import views_of
from kvviz.audit.views_file import read
from kvviz.audit.writer import tensors_of_sglang, write_views
from tests.engines import stand_ins
from tests.engines.versions import needs

needs("sglang")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def pools():
    """SGLang's module of pools. The configurations of its models have no part in it."""
    stand_ins.install()
    import sglang.srt  # noqa: F401

    stand_ins.without_init("sglang.srt.configs")
    from sglang.srt.mem_cache import memory_pool

    return memory_pool


def audited(pool, tmp_path):
    """Write the pool's views file. Return its names, after an audit without findings."""
    tensors = tensors_of_sglang(pool)
    write_views(tmp_path / "views.json", tensors)
    file = read(tmp_path / "views.json")
    assert file.views == views_of(tensors) and file.audit().clean and all(view.axes for view in file.views)
    return {view.name: view for view in file.views}


MLA = {"size": 128, "page_size": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_num": 2, "device": "cpu"}
OFF = {"enable_memory_saver": False}


def test_a_pool_with_k_and_v(pools, tmp_path):
    pool = pools.MHATokenToKVPool(
        size=16,
        page_size=4,
        dtype=torch.float16,
        head_num=2,
        head_dim=8,
        layer_num=3,
        device="cpu",
        start_layer=5,
        **OFF,
    )
    found = audited(pool, tmp_path)
    assert list(found) == [f"layer {n} {half} data" for half in "KV" for n in (5, 6, 7)]
    assert found["layer 5 K data"].shape == tuple(pool.get_key_buffer(5).shape) == (20, 2, 8)


def test_a_pool_with_one_buffer_per_layer(pools, tmp_path):
    pool = pools.MLATokenToKVPool(dtype=torch.bfloat16, **MLA, **OFF)
    found = audited(pool, tmp_path)
    assert list(found) == ["layer 0 KV data", "layer 1 KV data"] and found["layer 0 KV data"].shape == (192, 1, 576)


def test_a_pool_with_scale_buffers(pools, tmp_path):
    pool = pools.MLATokenToKVPoolFP4(dtype=torch.bfloat16, **MLA, **OFF)
    found = audited(pool, tmp_path)
    assert list(found) == [f"layer {n} KV {kind}" for kind in ("data", "scale") for n in (0, 1)]
    assert found["layer 0 KV scale"].shape == (192, 36) and found["layer 0 KV scale"].role == "scale"


def test_a_pool_with_index_keys(pools, tmp_path):
    """A page of index keys holds 64 x 128 bytes of data, and then 64 scales of 4 bytes."""
    pool = pools.DSATokenToKVPool(
        dtype=torch.bfloat16, index_head_dim=128, kv_cache_dim=576, index_buf_size=128, **MLA, **OFF
    )
    found = audited(pool, tmp_path)
    data, scale = found["layer 1 index K data"], found["layer 1 index K scale"]
    assert (data.shape[1:], data.stride, scale.shape[1:]) == ((64, 128), (8448, 128, 1), (64, 4))
    assert data.storage == scale.storage and scale.offset == 8192
    assert data.storage.nbytes == pool.index_k_with_scale_buffer[1].nbytes
