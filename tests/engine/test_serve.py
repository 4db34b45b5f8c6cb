"""Tests of several requests over scattered blocks, with reused blocks: the answers are those of a single request."""

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec
from kvviz.engine.block_pool import BlockError, BlockPool, block_hashes
from kvviz.engine.generate import GroupedBackend, PagedBackend, generate
from kvviz.engine.offload import Offloader, TransferError
from kvviz.engine.scenarios import Scenario
from kvviz.engine.serve import Engine, Request
from kvviz.kernels.runtime import device
from tests.engine.test_offload import assert_sound, fails_after
from tests.engine.tiny import VOCABULARY, tiny_model

BLOCK, BLOCKS = 4, 24
MODES = ("bfloat16", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head")


def requests() -> list[Request]:
    lot = random.Random(11)
    prompts = [tuple(lot.randrange(VOCABULARY) for _ in range(size)) for size in (9, 13, 4)]
    return [Request(f"request {n}", prompt, 5) for n, prompt in enumerate(prompts)]


def engine(mode: str, layout: str, host_blocks: int = 0, seed: int = 0) -> Engine:
    model = tiny_model()
    cache = allocate(CacheSpec(2, BLOCKS, BLOCK, 2, 16, mode), layout, device())
    scales = cache.ensure_scale_caches("strides") if cache.spec.is_per_token_head else None
    order = random.Random(seed).sample(range(BLOCKS), BLOCKS)
    pool = BlockPool(BLOCKS, order)
    return Engine(model, cache, scales, pool, Offloader(cache, pool, host_blocks) if host_blocks else None)


@lru_cache
def alone(mode: str, request: Request):
    """Answer the request alone, with one buffer per layer, in blocks 0, 1, ..."""
    model = tiny_model()
    cache = allocate(CacheSpec(2, BLOCKS, BLOCK, 2, 16, mode), "NHD", device())
    scales = cache.ensure_scale_caches("strides") if cache.spec.is_per_token_head else None
    return generate(model, PagedBackend(cache, scales), list(request.prompt), request.max_new_tokens)


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        *((mode, layout) for mode in MODES for layout in ("NHD", "cross-layer NHD")),
        ("fp8_per_token_head", "BLNHC"),
        ("int8_per_token_head", "cross-layer HND"),
    ],
)
def test_turns_scattered_blocks_offload_reset_restore_change_no_token(mode, layout):
    one = engine(mode, layout, host_blocks=BLOCKS)
    given = requests()
    expected = {request.name: alone(mode, request) for request in given}
    assert min(min(answer.margins) for answer in expected.values()) > 1e-4
    first = one.serve(given)
    assert {name: served.generation.token_ids for name, served in first.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }
    assert all(served.num_cached_tokens == served.num_restored_tokens == 0 for served in first.values())
    cached = one.serve(given)
    assert [served.num_cached_tokens for served in cached.values()] == [8, 12, 0]
    one.pool.reset_prefix_cache()
    for storage in one.cache.storages:
        storage.fill_(0xAB)
    restored = one.serve(given)
    assert [served.num_restored_tokens for served in restored.values()] == [8, 12, 0]
    for served in (cached, restored):
        assert {name: one.generation.token_ids for name, one in served.items()} == {
            name: answer.token_ids for name, answer in expected.items()
        }


def test_a_restored_prefix_saves_its_forward_passes(monkeypatch):
    one = engine(MODES[1], "cross-layer NHD", host_blocks=BLOCKS)
    (request,) = requests()[1:2]
    seen = []
    forward = one.model.forward
    monkeypatch.setattr(one.model, "forward", lambda part, *rest: seen.append(len(part)) or forward(part, *rest))
    one.serve([request])
    one.pool.reset_prefix_cache()
    one.serve([request])
    assert seen == [13, 1, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_in_chunks_of_a_block_a_restored_prefix_changes_no_bit(mode, monkeypatch):
    one = replace(engine(mode, "cross-layer NHD", host_blocks=BLOCKS), chunk=BLOCK)
    (request,) = requests()[1:2]
    seen = []
    forward = one.model.forward
    monkeypatch.setattr(one.model, "forward", lambda part, *rest: seen.append(len(part)) or forward(part, *rest))
    first = one.serve([request])[request.name].generation
    one.pool.reset_prefix_cache()
    again = one.serve([request])[request.name]
    assert seen == [4, 4, 4, 1, 1, 1, 1, 1] + [1, 1, 1, 1, 1]
    assert again.num_restored_tokens == 12 and again.generation == first


def test_a_lost_scale_is_a_lost_answer():
    """With the narrow width of PR 48411, answers are right until blocks are restored."""
    one = engine("fp8_per_token_head", "NHD")
    spec = one.cache.spec
    narrow = Offloader(one.cache, one.pool, BLOCKS, width_bytes=spec.real_page_size_bytes, check_width=False)
    one = replace(one, offloader=narrow)
    given = requests()
    first = one.serve(given)
    one.pool.reset_prefix_cache()
    for storage in one.cache.storages:
        storage.fill_(0x3C)
    again = one.serve(given)
    wrong = [name for name in first if first[name].generation.token_ids != again[name].generation.token_ids]
    assert wrong and "request 2" not in wrong  # the last prompt has no full block to restore


def test_too_many_requests_for_the_cache():
    one = engine(MODES[0], "NHD")
    with pytest.raises(BlockError, match="blocks, but only 0 of 24 blocks are free"):
        one.serve([Request(str(n), tuple(range(40)), 8) for n in range(3)])


def test_the_pool_is_whole_again_after_serving():
    one = engine(MODES[2], "NHD")
    one.serve(requests())
    assert one.pool.num_free_blocks == BLOCKS
    hashes = block_hashes([*requests()[0].prompt], BLOCK)
    assert len(one.pool.cached(hashes)) == 2
    one.pool.reset_prefix_cache()
    assert one.pool.cached(hashes) == () and one.pool.num_free_blocks == BLOCKS


@pytest.mark.gpu
def test_pinned_memory_and_a_stream_of_its_own():
    one = engine(MODES[1], "cross-layer NHD", host_blocks=4)
    assert one.offloader.host.is_pinned() and one.offloader._stream != torch.cuda.default_stream()


@pytest.mark.parametrize("mode", MODES)
def test_groups_with_their_own_blocks_give_the_same_answer(mode):
    (request,) = requests()[:1]
    which = Scenario(mode, num_kv_cache_groups=2, block_size=BLOCK)
    backend = which.start(tiny_model(), 16)
    assert [group.blocks for group in backend.groups] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert generate(tiny_model(), backend, list(request.prompt), 5).token_ids == alone(mode, request).token_ids


def test_two_groups_cannot_name_one_block():
    cache = engine("bfloat16", "NHD").cache
    with pytest.raises(ValueError, match="two groups have block 1: give each group its own blocks"):
        GroupedBackend([PagedBackend(cache, None, (0, 1)), PagedBackend(cache, None, (1, 2))])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [Request("a", (1, 2), 2), Request("a", (3, 4), 2)],
            "2 requests have the name 'a': give each request another name",
        ),
        ([Request("a", (), 2)], "request 'a' has a prompt of 0 tokens"),
        ([Request("a", tuple(range(9)), 0)], "request 'a' has max_new_tokens 0, but it must be at least 1"),
        ([Request("a", tuple(range(9)), -8)], "request 'a' has max_new_tokens -8, but it must be at least 1"),
        ([Request("held", (1, 2), 2)], r"request 'held' holds blocks \[17\] already"),
        ([Request("a", (1, -2), 2)], "request 'a': token 1 is -2, but the vocabulary has only tokens 0 to 96"),
        ([Request("a", (1, 2.5), 2)], "token 1 is 2.5"),
        ([Request("a", (97,), 2)], "token 0 is 97, but the vocabulary has only tokens 0 to 96"),
        ([Request("a", tuple(range(90)), 8)], "request 'a' needs 25 blocks, but the cache has only 24: shorten"),
        (
            [Request("a", tuple(range(60)), 8), Request("b", tuple(range(60)), 8)],
            "needs 17 blocks, but only 6 of 24 blocks are free",
        ),
    ],
)
def test_requests_that_cannot_be_served_take_nothing(given, said):
    one = engine(MODES[0], "NHD", host_blocks=2)
    one.pool._free.sort(key=lambda block: block != 17)
    one.pool.allocate(1, "held")
    with pytest.raises(ValueError, match=said):
        one.serve(given)
    assert one.pool.num_free_blocks == BLOCKS - 1 and not one.offloader.stored
    assert_sound(one.offloader)


def expected_of(mode: str) -> dict:
    return {request.name: alone(mode, request).token_ids for request in requests()}


def assert_serves(one: Engine) -> None:
    """Assert that the engine answers all requests rightly after a failure."""
    served = one.serve(requests())
    assert {name: each.generation.token_ids for name, each in served.items()} == expected_of(MODES[1])
    assert one.pool.num_free_blocks == BLOCKS
    assert_sound(one.offloader)


@pytest.mark.parametrize("thrown", [RuntimeError("the kernel failed"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("passes", [0, 1, 4])
def test_a_pass_that_fails_gives_every_block_back(thrown, passes, monkeypatch):
    one = engine(MODES[1], "cross-layer NHD", host_blocks=BLOCKS)
    forward, left = one.model.forward, [passes]

    def fails(*call):
        left[0] -= 1
        if left[0] < 0:
            raise thrown
        return forward(*call)

    with monkeypatch.context() as patch:
        patch.setattr(one.model, "forward", fails)
        with pytest.raises(type(thrown)):
            one.serve(requests())
    assert one.pool.num_free_blocks == BLOCKS and not one.offloader.stored and not one.pool._prefix
    assert_sound(one.offloader)
    assert_serves(one)


@pytest.mark.parametrize("copies", [0, 1, 3])
def test_a_store_that_fails_gives_every_block_back(copies, monkeypatch):
    one = engine(MODES[1], "cross-layer NHD", host_blocks=BLOCKS)
    with monkeypatch.context() as patch:
        fails_after(one.offloader, patch, copies)
        with pytest.raises(TransferError, match="failed midway"):
            one.serve(requests())
    assert one.pool.num_free_blocks == BLOCKS
    assert_sound(one.offloader)
    assert_serves(one)


@pytest.mark.parametrize("copies", [0, 1, 3])
def test_a_restore_that_fails_is_not_read(copies, monkeypatch):
    one = engine(MODES[1], "cross-layer NHD", host_blocks=BLOCKS)
    one.serve(requests())
    stored = one.offloader.stored
    one.pool.reset_prefix_cache()
    for storage in one.cache.storages:
        storage.fill_(0xAB)
    with monkeypatch.context() as patch:
        fails_after(one.offloader, patch, copies)
        with pytest.raises(TransferError, match="back from host memory failed midway"):
            one.serve(requests())
    assert one.pool.num_free_blocks == BLOCKS and one.offloader.stored == stored
    assert_sound(one.offloader)
    assert_serves(one)


def test_host_memory_without_room_gives_every_block_back():
    one = engine(MODES[1], "cross-layer NHD", host_blocks=4)
    with pytest.raises(
        BlockError, match=r"4 blocks must be stored, but only 1 of the 4 blocks of host memory are free"
    ):
        one.serve([*requests()[:1], *(replace(request, name="again") for request in requests()[1:2])])
    assert one.pool.num_free_blocks == BLOCKS
    assert_sound(one.offloader)


def test_an_engines_parts_must_belong_together():
    one, other = engine(MODES[0], "NHD", 1), engine(MODES[0], "NHD", 1)
    with pytest.raises(ValueError, match="the offloader has another cache than this engine"):
        replace(one, offloader=other.offloader)
    with pytest.raises(ValueError, match="the pool has 3 blocks, but the cache has 24"):
        replace(one, pool=BlockPool(3), offloader=None)


def test_a_grouped_backend_needs_a_group():
    with pytest.raises(ValueError, match="0 groups are given"):
        GroupedBackend([])
