"""Tests of the scenarios with the real model: the first wrong token, and the bytes that are written."""

from functools import lru_cache

import pytest
import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec
from kvviz.engine.connectors import MooncakeStoreConnector, OffloadingConnector
from kvviz.engine.generate import Generation, PagedBackend, generate
from kvviz.engine.scenarios import SCENARIOS, Outcome, Scenario, first_pass_bytes, run, scenario
from tests.engine.test_model import PROMPT, SIZES, load_once, model, plain_run  # noqa: F401
from tests.engine.tiny import tiny_model

OFFLOADING = OffloadingConnector()
PER_LAYER = Scenario()
CROSS_LAYER = Scenario(connector=OFFLOADING)
NO_TAIL = Scenario(connector=OFFLOADING, tail=False)
STRIDES = Scenario(connector=OFFLOADING, carve="strides")
GATED = Scenario(connector=OFFLOADING, gate=True)
ON_HND = Scenario(connector=OFFLOADING, kv_cache_layout="HND")
needs_model = pytest.mark.usefixtures("model")


@lru_cache
def outcome_of(which: Scenario, count: int) -> Outcome:
    """Run a scenario once, and compare with the run over plain tensors."""
    return run(which, load_once(), PROMPT, count, plain_run(torch.float32, 8).token_ids)


@needs_model
@pytest.mark.slow
class TestRight:
    def test_a_bfloat16_cache_says_what_plain_tensors_say(self):
        reference = plain_run(torch.bfloat16, 8)
        ours = outcome_of(Scenario("bfloat16"), 8).generation
        assert min(reference.margins) > 1e-3
        assert (ours.token_ids, ours.text) == (reference.token_ids, reference.text)
        assert ours.margins == pytest.approx(reference.margins, abs=0.1)

    def test_an_fp8_cache_says_the_same(self):
        outcome = outcome_of(PER_LAYER, 6)
        assert outcome.generation.token_ids == plain_run(torch.float32, 8).token_ids[:6]
        assert (outcome.layout, outcome.decision.cross_layer, outcome.first_wrong) == ("NHD", False, None)

    @pytest.mark.parametrize("mode", ["int8_per_token_head", "int4_per_token_head"])
    def test_integer_caches_begin_the_same(self, mode):
        assert outcome_of(Scenario(mode), 2).generation.token_ids == plain_run(torch.float32, 8).token_ids[:2]

    def test_views_from_the_strides_make_a_cross_layer_buffer_as_good_as_per_layer(self):
        ours, theirs = outcome_of(STRIDES, 4), outcome_of(PER_LAYER, 6)
        assert (ours.layout, ours.decision.cross_layer) == ("cross-layer NHD", True)
        assert ours.generation.token_ids == theirs.generation.token_ids[:4]
        assert ours.generation.margins == theirs.generation.margins[:4]

    def test_the_gate_restores(self):
        ours, theirs = outcome_of(GATED, 2), outcome_of(PER_LAYER, 6)
        assert (ours.layout, ours.decision.cross_layer) == ("NHD", False)
        assert ours.generation.token_ids == theirs.generation.token_ids[:2]
        assert ours.generation.margins == theirs.generation.margins[:2]

    def test_scattered_blocks_change_nothing(self, model):  # noqa: F811
        spec = CacheSpec(30, 5, 8, 3, 64, "bfloat16")
        backend = PagedBackend(allocate(spec, "BLNHC", model.device), None, blocks=(4, 0, 2))
        answer = generate(model, backend, PROMPT, 2)
        assert answer.token_ids == plain_run(torch.bfloat16, 8).token_ids[:2]


@needs_model
@pytest.mark.slow
class TestWrong:
    def test_with_a_tail_the_first_token_is_right_and_no_more(self):
        outcome = outcome_of(CROSS_LAYER, 3)
        assert outcome.first_wrong == 1 and outcome.layout == "cross-layer NHD"
        right = plain_run(torch.float32, 8).token_ids
        assert [ours == theirs for ours, theirs in zip(outcome.generation.token_ids, right, strict=False)] == [
            True, False, False,
        ]  # fmt: skip

    def test_with_a_tail_the_garbage_is_always_the_same(self):
        again = run(CROSS_LAYER, load_once(), PROMPT, 3).generation
        assert again == outcome_of(CROSS_LAYER, 3).generation and len(again.token_ids) == 3

    def test_with_a_tail_both_layouts_say_the_same(self):
        ours, theirs = outcome_of(ON_HND, 3), outcome_of(CROSS_LAYER, 3)
        assert (ours.layout, theirs.layout) == ("cross-layer HND", "cross-layer NHD")
        assert ours.generation.text == theirs.generation.text and ours.first_wrong == 1

    @pytest.mark.parametrize("kv_cache_layout", ["NHD", "HND"])
    def test_without_a_tail_the_first_token_is_wrong(self, kv_cache_layout):
        which = Scenario(connector=OFFLOADING, tail=False, kv_cache_layout=kv_cache_layout)
        assert outcome_of(which, 1).first_wrong == 0


@needs_model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "nbytes"),
    [
        (PER_LAYER, 30 * 19 * 3 * 2 * (64 + 4)),
        (CROSS_LAYER, 30 * 19 * 3 * 2 * 64 + 19 * 3 * 2 * 4),
        (NO_TAIL, 30 * 19 * 3 * 2 * 64),
    ],
    ids=["per layer", "cross-layer, with a tail", "cross-layer, without a tail"],
)
def test_the_first_pass_reaches_the_bytes_that_its_views_claim(model, which, nbytes):  # noqa: F811
    """Count the data of 19 tokens in 30 layers, and scales: per layer, shared by all layers, or on the data."""
    result = first_pass_bytes(which, model, PROMPT)
    assert result.equal and (result.unpredicted, result.unreached) == (0, 0)
    assert sum(int(mask.sum()) for mask in result.observed.values()) == nbytes


@pytest.mark.parametrize(
    ("name", "layout", "one_storage", "cell"),
    [
        ("plain cache", "NHD", False, 128),
        ("quantised cache alone", "NHD", False, 68),
        ("offloading alone", "cross-layer NHD", True, 128),
        ("both, cells with a tail", "cross-layer NHD", True, 68),
        ("both, cells without a tail", "cross-layer NHD", True, 64),
        ("both, behind the gate", "NHD", False, 68),
        ("both, views from the strides", "cross-layer NHD", True, 68),
    ],
)
def test_what_each_scenario_allocates(name, layout, one_storage, cell):
    cache = scenario(name).build(SIZES, 33, "meta")
    assert (cache.layout.name, len(cache.storages) == 1, cache.spec.cell_bytes) == (layout, one_storage, cell)
    assert (cache.spec.num_blocks, cache.spec.num_layers, cache.spec.num_kv_heads) == (3, 30, 3)
    assert cache.layout.cross_layer == scenario(name).decide().cross_layer


def test_all_scenarios_differ():
    assert len(set(SCENARIOS.values())) == len(SCENARIOS) == 7


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ValueError, match="scenario 'plain' does not exist.*did you mean 'plain cache'"):
        scenario("plain")


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_are_counted_up(num_tokens, num_blocks):
    assert PER_LAYER.build(SIZES, num_tokens, "meta").spec.num_blocks == num_blocks


def test_another_connector_has_the_same_effect():
    which = Scenario(connector=MooncakeStoreConnector(True), kv_cache_layout="HND")
    assert which.build(SIZES, 1, "meta").layout.name == "cross-layer HND"


@pytest.mark.parametrize(
    ("token_ids", "reference", "first_wrong"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (1, 2, 3, 4), None),
        ((1, 2, 9), (1, 2, 3, 4), 2),
        ((9, 2, 3), (1, 2, 3), 0),
        ((1, 9), (1, 2, 3), 1),
        ((1, 2), (), None),
    ],
)
def test_the_first_wrong_token_is_counted_from_zero(token_ids, reference, first_wrong):
    outcome = Outcome(PER_LAYER, PER_LAYER.decide(), "NHD", Generation(token_ids, "", ()), reference)
    assert outcome.first_wrong == first_wrong


class Fickle:
    """A connector that returns True once, and then False."""

    def __init__(self) -> None:
        self.asked = 0

    def prefer_cross_layer_blocks(self, config) -> bool:
        self.asked += 1
        return self.asked == 1


def test_a_run_asks_its_connector_once_and_reports_what_was_allocated():
    connector = Fickle()
    outcome = run(Scenario("bfloat16", connector), tiny_model(), [1, 2, 3], 1)
    assert (outcome.decision.cross_layer, outcome.layout, connector.asked) == (True, "cross-layer NHD", 1)
    connector = Fickle()
    assert first_pass_bytes(Scenario("bfloat16", connector), tiny_model(), [1, 2, 3]).equal and connector.asked == 1


@pytest.mark.parametrize(
    ("changes", "num_tokens", "said"),
    [
        ({"num_kv_cache_groups": 0}, 9, "num_kv_cache_groups must be an integer of at least 1, not 0"),
        ({"block_size": 0}, 9, "block_size is 0, but it must be at least 1"),
        ({"block_size": -16}, 9, "block_size is -16, but it must be at least 1"),
        ({}, 0, "num_tokens is 0, but it must be at least 1"),
        ({}, -40, "num_tokens is -40, but it must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_built(changes, num_tokens, said):
    with pytest.raises(ValueError, match=said):
        Scenario(**changes).build(SIZES, num_tokens, "meta")


def test_the_bytes_of_several_groups_are_not_compared():
    with pytest.raises(ValueError, match="the scenario has 2 KV cache groups, but bytes can be compared only"):
        first_pass_bytes(Scenario("bfloat16", num_kv_cache_groups=2), tiny_model(), [1, 2])
