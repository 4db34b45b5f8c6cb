"""The recipe for transformers, run against the real paged cache."""

from types import SimpleNamespace

import pytest

from kvviz.audit.views_file import read
from kvviz.audit.writer import pools_of_transformers, tensors_of_transformers, write_views
from tests.engines.versions import needs

transformers = needs("transformers")
torch = pytest.importorskip("torch")


def paged_cache():
    """One full layer and three sliding layers: a block of the full layer is a third of a sliding block."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=100
    )
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config.sliding_window = 8
    settings = ContinuousBatchingConfig(page_size=4, num_blocks=12, max_batch_tokens=8, max_memory_percent=0.5)
    alone = SimpleNamespace(tp_size=1, are_kv_heads_tp_ed=lambda: False)
    return PagedAttentionCache(config, settings, "cpu", alone, dtype=torch.float16)


def test_the_paged_cache_is_clean_with_its_pools_and_has_six_collisions_without(tmp_path):
    cache = paged_cache()
    tensors = tensors_of_transformers(cache)
    write_views(tmp_path / "pools.json", tensors, pools_of_transformers(cache))
    file = read(tmp_path / "pools.json")
    assert file.audit().clean and file.claims[-1].blocks_per_id == (1, 1, 1, 1, 1, 1, 3, 3)
    write_views(tmp_path / "one pool.json", tensors)
    assert len(read(tmp_path / "one pool.json").audit().of_kind("collision")) == 6


def test_a_token_lands_where_the_view_says():
    """The cache writes K of one token through its own update. Exactly the element that the view names changes."""
    cache = paged_cache()
    tensors = tensors_of_transformers(cache)
    for layer, allocator in cache.layer_to_allocator.items():
        blocks = allocator.cache_tensor.numel() * 2 // allocator.bytes_per_block
        block, token = blocks - 2, 3
        slot = (block * len(allocator.layer_indices) * 2) * allocator.tokens_per_page + token
        keys = torch.ones(1, 2, 16, dtype=torch.float16)
        cache.cache_tensor.zero_()
        allocator._kv_token_views[layer][0].index_copy_(0, torch.tensor([slot]), keys)
        view, axes = tensors[f"layer {layer} K data"]
        assert axes == ("block", "token", "head", "element")
        assert view[block, token].eq(1).all() and cache.cache_tensor.count_nonzero() == keys.numel()


def test_a_dynamic_cache_has_its_layers(tmp_path):
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), layer)
    write_views(tmp_path / "views.json", tensors_of_transformers(cache))
    file = read(tmp_path / "views.json")
    assert [view.name for view in file.views] == [f"layer {n} {half} data" for n in range(2) for half in "KV"]
    assert file.audit().clean and file.views[0].axes == ("batch", "head", "token", "element")
