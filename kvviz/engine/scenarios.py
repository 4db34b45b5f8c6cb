"""Runs the scenarios of the notebooks. For example, "both, cells with a tail" has a quantised cache and offloading.

A scenario says how the engine starts. A run allocates the cache of the scenario, and generates text. If cells have a
tail, every run of a scenario gives the same text. If cells have no tail, scales and codes can overlap. On a GPU, the
programs of one launch then race for the shared bytes. So later tokens can change from run to run, as in vLLM.
"""

from collections.abc import Callable, Sequence
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
        kv_cache_dtype: name of the mode of the cache.
        connector: the KV connector, or None.
        carve: how scale views are carved. vLLM up to 0.25.1 uses ``shape``. vLLM 0.26.0 and later use ``strides``. In
            modes without scales in the cache, this attribute has no effect.
        tail: True if each cell has a tail for the scale.
        gate: True to use the check of vLLM 0.27.1 (PR 49226), see ``use_uniform_kv_cache``.
        kv_cache_layout: "NHD" or "HND".
        block_size: number of tokens per block.
        num_kv_cache_groups: number of groups. Layer ``i`` belongs to group ``i % num_kv_cache_groups``. Each group has
            its own blocks.
        indexes_kv_by_block_stride: True if the backend finds a block by the block stride of the view.
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
        """Return the settings of this scenario that the connector and the decision use."""
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
        """Allocate a cache for ``num_tokens`` tokens. The layout has the split packing, and follows the decision.

        Args:
            sizes: the sizes of the model.
            device: the device of the cache.
            fill: the value of all bytes, see ``allocate``.
            decision: the result of an earlier :meth:`decide`. Default: decide now.

        Raises:
            ValueError: ``num_tokens``, ``block_size`` or ``num_kv_cache_groups`` is less than 1. Or a number does not
                fit the mode or the layout.
        """
        decision = decision or self.decide()
        for name, number in (("num_tokens", num_tokens), ("block_size", self.block_size)):
            if number < 1:
                raise ValueError(f"{name} is {number}, but it must be at least 1")
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
        """Return a backend with a new cache for ``num_tokens`` tokens, on the device of the model.

        If the mode has scales in the cache, all scales start as 1.0.
        """
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
    """Return the scenario with this name. If no scenario has this name, raise ValueError with the nearest name."""
    return SCENARIOS[one_of("scenario", name, tuple(SCENARIOS))]


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Args:
        scenario: the scenario of the run.
        decision: the decision between one buffer for all layers and one buffer per layer.
        layout: name of the layout of the cache.
        generation: the generated answer.
        reference: the token ids of another run, for a comparison. Default: ().
    """

    scenario: Scenario
    decision: Decision
    layout: str
    generation: Generation
    reference: tuple[int, ...] = ()

    @property
    def first_wrong(self) -> int | None:
        """Return the number of the first token that differs from the reference. Token 0 is the first token.

        If no token differs, return None.
        """
        pairs = enumerate(zip(self.generation.token_ids, self.reference, strict=False))
        return next((number for number, (ours, theirs) in pairs if ours != theirs), None)


def run(
    which: Scenario,
    model: LanguageModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    reference: Sequence[int] = (),
    on_token: Callable[[str, float], None] | None = None,
) -> Outcome:
    """Allocate the cache of a scenario, generate an answer, and return the result.

    Args:
        which: the scenario.
        prompt: the token ids of the prompt.
        reference: the token ids of another run, for a comparison.
        on_token: called with the text and the margin of each token, when the token is known.
    """
    decision = which.decide()
    backend = which.start(model, len(prompt) + max_new_tokens, decision)
    generation = generate(model, backend, list(prompt), max_new_tokens, on_token=on_token)
    return Outcome(which, decision, backend.cache.layout.name, generation, tuple(reference))


def first_pass_bytes(which: Scenario, model: LanguageModel, prompt: Sequence[int]) -> Comparison:
    """Compare the predicted and the observed bytes of the first forward pass, for data and scales of all layers.

    Raises:
        ValueError: the scenario has several KV cache groups, or the prompt is empty.
    """
    decision = which.decide()
    if which.num_kv_cache_groups > 1:
        raise ValueError(
            f"the scenario has {which.num_kv_cache_groups} KV cache groups, but bytes can be compared only for 1 "
            "group: use a scenario with num_kv_cache_groups=1"
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
