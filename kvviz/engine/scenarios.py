"""Runs the scenarios of the notebooks. For example, "both, cells with a tail" has a quantised cache and offloading.

A scenario says how the engine starts. A run allocates the cache of the scenario and generates text greedily. If cells
have a tail, every run of a scenario gives the same text. If cells have no tail, scales and codes can overlap, and on
a GPU the programs of one launch race for these bytes. Later tokens can then change from run to run, as in vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvviz.audit.arguments import one_of
from kvviz.cache.buffers import KVCache, allocate
from kvviz.cache.footprint import Comparison, observe, predict
from kvviz.cache.layout import released_layout
from kvviz.cache.spec import CacheSpec
from kvviz.engine.connectors import Decision, EngineConfig, KVConnector, OffloadingConnector, use_uniform_kv_cache
from kvviz.engine.generate import Generation, GroupedBackend, PagedBackend, generate
from kvviz.engine.model import LanguageModel, ModelConfig

QUESTION = "Explain in three sentences why the sky is blue."


@dataclass(frozen=True)
class Scenario:
    """One way to start the engine.

    Attributes:
        kv_cache_dtype: name of the cache's mode.
        connector: the KV connector, or None.
        carve: how scale views are carved. ``shape``: as in vLLM up to 0.25.1. ``strides``: as in vLLM 0.26.0 and
            later. Ignored in modes without per-token-head scales.
        tail: True if each cell has room for its scale.
        gate: True if the decision has the condition of PR 49226.
        kv_cache_layout: "NHD" or "HND".
        num_kv_cache_groups: number of groups. Layer ``i`` belongs to group ``i % num_kv_cache_groups``, and each
            group has its own blocks.
        indexes_kv_by_block_stride: True if the backend steps from block to block by the stride of the view.
    """

    kv_cache_dtype: str = "fp8_per_token_head"
    connector: KVConnector | None = None
    carve: str = "shape"
    tail: bool = True
    gate: bool = False
    kv_cache_layout: str = "NHD"
    block_size: int = 16
    num_kv_cache_groups: int = 1
    indexes_kv_by_block_stride: bool = True

    def config(self) -> EngineConfig:
        """Return the settings that the connector and the decision use."""
        return EngineConfig(
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_layout=self.kv_cache_layout,
            indexes_kv_by_block_stride=self.indexes_kv_by_block_stride,
            num_kv_cache_groups=self.num_kv_cache_groups,
        )

    def decide(self) -> Decision:
        """Decide between one buffer for all layers and one buffer per layer."""
        return use_uniform_kv_cache(self.connector, self.config(), gate=self.gate)

    def build(
        self,
        sizes: ModelConfig,
        num_tokens: int,
        device: str | torch.device,
        fill: int = 0,
        decision: Decision | None = None,
    ) -> KVCache:
        """Allocate a cache in the split packing for ``num_tokens`` tokens, with the layout of the decision.

        Args:
            decision: the result of an earlier :meth:`decide`. Default: decide now.

        Raises:
            ValueError: the block size or a number of tokens or groups is below 1, or CacheSpec raises.
        """
        decision = decision or self.decide()
        if self.block_size < 1 or num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens} and block_size is {self.block_size}: both must be at least 1")
        spec = CacheSpec(
            num_layers=sizes.num_layers,
            num_blocks=-(-num_tokens // self.block_size) * self.num_kv_cache_groups,
            block_size=self.block_size,
            num_kv_heads=sizes.num_kv_heads,
            head_size=sizes.head_size,
            kv_cache_dtype=self.kv_cache_dtype,
            tail=self.tail,
        )
        return allocate(spec, released_layout(self.kv_cache_layout, decision.cross_layer), device, fill=fill)

    def start(
        self, model: LanguageModel, num_tokens: int, decision: Decision | None = None
    ) -> PagedBackend | GroupedBackend:
        """Return a backend with a new cache for ``num_tokens`` on the model's device. Scales, if any, start as
        1.0."""
        cache = self.build(model.config, num_tokens, model.device, decision=decision)
        scales = cache.ensure_scale_caches(self.carve) if cache.spec.is_per_token_head else None
        if self.num_kv_cache_groups == 1:
            return PagedBackend(cache, scales)
        blocks, step = range(cache.spec.num_blocks), self.num_kv_cache_groups
        return GroupedBackend([PagedBackend(cache, scales, tuple(blocks[group::step])) for group in range(step)])


SCENARIOS = {
    "plain cache": Scenario("bfloat16"),
    "quantised cache alone": Scenario(),
    "offloading alone": Scenario("bfloat16", OffloadingConnector()),
    "both, cells with a tail": Scenario(connector=OffloadingConnector()),
    "both, cells without a tail": Scenario(connector=OffloadingConnector(), tail=False),
    "both, behind the gate": Scenario(connector=OffloadingConnector(), gate=True),
    "both, views from the strides": Scenario(connector=OffloadingConnector(), carve="strides"),
}
"""The scenarios of the notebooks, by name."""


def scenario(name: str) -> Scenario:
    """Return the scenario with this name. If there is none, raise ValueError with the nearest name."""
    return SCENARIOS[one_of("scenario", name, tuple(SCENARIOS))]


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Args:
        layout: name of the layout of the allocated cache.
        generation: the generated answer.
        reference: token ids of another run to compare with, or ().
    """

    scenario: Scenario
    decision: Decision
    layout: str
    generation: Generation
    reference: tuple[int, ...] = ()

    @property
    def first_wrong(self) -> int | None:
        """Return the number (from 0) of the first token that differs from the reference, or None if all are equal."""
        pairs = enumerate(zip(self.generation.token_ids, self.reference, strict=False))
        return next((number for number, (ours, theirs) in pairs if ours != theirs), None)


def run(
    which: Scenario, model: LanguageModel, prompt: Sequence[int], max_new_tokens: int, reference: Sequence[int] = ()
) -> Outcome:
    """Allocate the cache of a scenario, generate an answer, and return the result.

    Args:
        prompt: token ids.
        reference: token ids of another run to compare with.
    """
    decision = which.decide()
    backend = which.start(model, len(prompt) + max_new_tokens, decision)
    generation = generate(model, backend, list(prompt), max_new_tokens)
    return Outcome(which, decision, backend.cache.layout.name, generation, tuple(reference))


def first_pass_bytes(which: Scenario, model: LanguageModel, prompt: Sequence[int]) -> Comparison:
    """Return the predicted and the observed bytes of the first forward pass: data and scales of all layers.

    Raises:
        ValueError: the scenario has several KV cache groups, or the prompt is empty.
    """
    decision = which.decide()
    if which.num_kv_cache_groups > 1:
        raise ValueError(
            f"bytes can be compared for 1 KV cache group only, but the scenario has {which.num_kv_cache_groups}"
        )
    geometry = which.build(model.config, len(prompt) + 1, "meta", decision=decision)
    writers = geometry.writers(geometry.carve_scales(which.carve)) if geometry.spec.is_per_token_head else ()
    views = [view for view in geometry.owners() if view.role == "data"] + list(writers)

    def first_pass(fill: int) -> dict[str, torch.Tensor]:
        cache = which.build(model.config, len(prompt) + 1, model.device, fill, decision)
        scales = cache.carve_scales(which.carve) if cache.spec.is_per_token_head else None
        generate(model, PagedBackend(cache, scales), list(prompt), 1)
        return cache.storages_by_name()

    return Comparison(predict(views, range(len(prompt))), observe(first_pass))
