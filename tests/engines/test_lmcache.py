"""The recipe for LMCache: the names of axes agree with what LMCache itself finds out about the same tensors."""

import pytest

from kvviz.audit.collect import views_of
from kvviz.audit.writer import tensors_of_kv_caches
from tests.engines.versions import needs

needs("lmcache")
torch = pytest.importorskip("torch")

# vLLM gives a connector tensors in its logical order of axes. Only the strides say NHD or HND.
CACHES = {
    "blocks first, NHD": ((6, 2, 4, 3, 8), None, "NHD"),
    "blocks first, HND": ((6, 2, 3, 4, 8), (2, 3), "HND"),
    "halves first, NHD": ((2, 6, 4, 3, 8), None, "NHD"),
    "halves first, HND": ((2, 6, 3, 4, 8), (2, 3), "HND"),
    "packed, HND": ((6, 3, 4, 16), None, "HND"),
    "packed, NHD": ((6, 4, 3, 16), (1, 2), "NHD"),
    "latent": ((6, 4, 8), None, "NHD"),
}


@pytest.mark.parametrize("case", CACHES)
def test_axes_are_those_of_lmcache(case):
    from lmcache.utils import EngineType
    from lmcache.v1.gpu_connector import utils

    shape, swapped, order = CACHES[case]
    caches = {f"layer {n}": torch.zeros(shape) for n in range(3)}
    caches = {name: cache.transpose(*swapped) if swapped else cache for name, cache in caches.items()}
    kind, known = utils.normalize_kv_and_discover_format(list(caches.values()), EngineType.VLLM, {"kv_layout": order})
    for view in views_of(tensors_of_kv_caches(caches)):
        size = dict(zip(view.axes, view.shape, strict=True))
        assert size["block"] == utils.get_num_blocks(known, kind) == 6
        assert size["token"] == utils.get_block_size(known, kind) == 4
        assert size.get("head", 1) == utils.get_num_heads(known, kind)
        assert size["element"] == utils.get_head_size(known, kind)
