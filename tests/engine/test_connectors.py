"""Tests of preferences and of the decision: complete truth tables, compared with a second version of the rules."""

from dataclasses import dataclass, field
from itertools import product

import pytest

from kvviz.cache.modes import MODES
from kvviz.engine.connectors import (
    EngineConfig,
    MooncakeStoreConnector,
    MultiConnector,
    NixlConnector,
    OffloadingConnector,
    use_uniform_kv_cache,
)

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLASHMLA")
CONFIGS = [
    EngineConfig(mode, layout, backend, by_stride, groups, mamba)
    for mode, layout, backend, by_stride, groups, mamba in product(
        MODES, ("NHD", "HND"), BACKENDS, (True, False), (1, 2), (True, False)
    )
]
SCALED = {name for name, mode in MODES.items() if mode.is_per_token_head}
CONNECTORS = [
    OffloadingConnector(),
    OffloadingConnector(patched=True),
    NixlConnector(),
    NixlConnector(True),
    MooncakeStoreConnector(),
    MooncakeStoreConnector(True),
]


@dataclass
class Readers:
    """A connector as a reader could write it, without a base class. It records the configurations."""

    answer: bool
    asked: list[EngineConfig] = field(default_factory=list)

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        self.asked.append(config)
        return self.answer


class Falsy(Readers):
    def __bool__(self) -> bool:
        return False


def preference(connector, config: EngineConfig) -> bool:
    """Return the preference by a second version of the rules."""
    if isinstance(connector, OffloadingConnector):
        return not connector.patched or config.kv_cache_dtype not in SCALED
    if not connector.enable_cross_layers_blocks:
        return False
    if isinstance(connector, MooncakeStoreConnector):
        return True
    return config.kv_cache_layout == "HND" and not config.has_mamba_group and config.attention_backend != "FLASHMLA"


@pytest.mark.parametrize("connector", CONNECTORS, ids=str)
def test_what_each_connector_prefers(connector):
    wants = [preference(connector, config) for config in CONFIGS]
    assert [connector.prefer_cross_layer_blocks(config) for config in CONFIGS] == wants


def test_each_connector_has_a_table_of_its_own():
    tables = {str(c): tuple(c.prefer_cross_layer_blocks(config) for config in CONFIGS) for c in CONNECTORS}
    assert all(tables["OffloadingConnector(patched=False)"])
    assert not any(tables["NixlConnector(enable_cross_layers_blocks=False)"])
    assert sum(tables["NixlConnector(enable_cross_layers_blocks=True)"]) == len(CONFIGS) // 2 // 2 * 3 // 4
    assert sum(tables["OffloadingConnector(patched=True)"]) == len(CONFIGS) * (len(MODES) - len(SCALED)) // len(MODES)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_prefer_what_all_of_them_prefer(count):
    for members in product(CONNECTORS, repeat=count):
        connector = MultiConnector(members)
        for config in CONFIGS[:: 7 * count]:
            want = all(preference(member, config) for member in members)
            assert connector.prefer_cross_layer_blocks(config) == want


def test_a_multi_connector_may_contain_another():
    config = EngineConfig()
    inner = MultiConnector((OffloadingConnector(), MooncakeStoreConnector(True)))
    assert MultiConnector((inner, OffloadingConnector())).prefer_cross_layer_blocks(config)
    assert not MultiConnector((inner, Readers(False))).prefer_cross_layer_blocks(config)


def test_a_multi_connector_needs_a_member():
    with pytest.raises(ValueError, match="needs at least one member"):
        MultiConnector(())


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("connector", [None, *CONNECTORS], ids=str)
def test_the_decision_takes_every_condition(connector, gate):
    for config in CONFIGS:
        held = [
            connector is not None and preference(connector, config),
            config.num_kv_cache_groups == 1,
            config.indexes_kv_by_block_stride,
        ]
        if gate:
            held.append(config.kv_cache_dtype not in SCALED)
        decision = use_uniform_kv_cache(connector, config, gate=gate)
        assert decision.cross_layer == all(held)
        assert [answer for _, answer in decision.conditions] == held


def test_the_decision_says_why():
    assert str(use_uniform_kv_cache(OffloadingConnector(), EngineConfig(), gate=True)) == (
        "per-layer: a connector prefers cross-layer blocks yes, one KV cache group yes, "
        "the backend indexes by block stride yes, no scales lie inside the cache no"
    )
    assert str(use_uniform_kv_cache(OffloadingConnector(), EngineConfig())).startswith("cross-layer: ")
    assert str(use_uniform_kv_cache(None, EngineConfig())).startswith("per-layer: a connector prefers")


@pytest.mark.parametrize("mode", MODES)
def test_gate_and_patch_agree_where_offloading_is_the_only_one(mode):
    config = EngineConfig(mode)
    patched = use_uniform_kv_cache(OffloadingConnector(patched=True), config).cross_layer
    gated = use_uniform_kv_cache(OffloadingConnector(), config, gate=True).cross_layer
    assert patched == gated == (mode not in SCALED)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "other", [MooncakeStoreConnector(True), NixlConnector(True), Readers(True)], ids=["mooncake", "nixl", "readers"]
)
def test_the_patch_leaves_other_connectors_open_and_the_gate_does_not(other, mode):
    config = EngineConfig(mode, "HND")
    assert use_uniform_kv_cache(other, config).cross_layer
    assert use_uniform_kv_cache(other, config, gate=True).cross_layer == (mode not in SCALED)
    both = MultiConnector((OffloadingConnector(patched=True), other))
    assert use_uniform_kv_cache(both, config).cross_layer == (mode not in SCALED)


@pytest.mark.parametrize("answer", [True, False])
def test_the_preference_of_a_readers_connector_counts(answer):
    connector, config = Readers(answer), EngineConfig("bfloat16")
    assert use_uniform_kv_cache(connector, config).cross_layer == answer
    assert connector.asked == [config]


def test_a_connector_counts_even_if_it_is_falsy():
    assert use_uniform_kv_cache(Falsy(True), EngineConfig()).cross_layer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_cache_dtype": "fp8_per_head"}, "'fp8_per_head'.*did you mean 'fp8_per_token_head'"),
        ({"kv_cache_layout": "NDH"}, "'NDH'.*did you mean 'NHD'"),
        ({"num_kv_cache_groups": 0}, "at least 1, not 0"),
        ({"num_kv_cache_groups": -3}, "at least 1, not -3"),
        ({"num_kv_cache_groups": 1.5}, "at least 1, not 1.5"),
        ({"num_kv_cache_groups": "2"}, "at least 1, not '2'"),
    ],
)
def test_a_wrong_configuration_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(**changes)


@pytest.mark.parametrize("mode", MODES)
def test_the_mode_says_if_scales_are_in_the_cache(mode):
    assert EngineConfig(mode).is_per_token_head == (mode in SCALED)


@pytest.mark.parametrize("answer", [None, "no", 1])
def test_a_preference_must_be_a_bool(answer):
    for connector in (Readers(answer), MultiConnector((Readers(True), Readers(answer)))):
        with pytest.raises(TypeError, match=f"returned {answer!r}, but it must return True or False"):
            use_uniform_kv_cache(connector, EngineConfig())


@pytest.mark.parametrize("connector", ["OffloadingConnector", OffloadingConnector, True, object()])
def test_an_object_that_is_not_a_connector(connector):
    with pytest.raises(TypeError, match="is not a connector: pass an object with a method prefer_cross_layer_blocks"):
        use_uniform_kv_cache(connector, EngineConfig())


def test_an_exception_of_a_connector_is_passed_on():
    class Broken:
        def prefer_cross_layer_blocks(self, config):
            raise OSError("no such host")

    for connector in (Broken(), MultiConnector((OffloadingConnector(), Broken()))):
        with pytest.raises(OSError, match="no such host"):
            use_uniform_kv_cache(connector, EngineConfig())
