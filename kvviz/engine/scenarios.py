"""The story's runs by name: what is switched on, what is allocated then, and what the model says.

Everything is greedy. With tails one scenario and prompt has one outcome; without, programs of one launch may race for
the same bytes on a GPU, so that later tokens can differ from run to run (upstream's kernels race there too).
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
        connector: or None.
        carve: ``shape``, the carving of vLLM up to 0.25.1, or ``strides``, of 0.26.0 and later. Ignored in modes
            without per-token-head scales.
        tail: whether cells have room for their scale.
        gate: whether the allocation gate of PR 49226 is in place.
        num_kv_cache_groups: groups that the layers are split into, in turn; each has blocks of its own.
        indexes_kv_by_block_stride: whether the backend steps from block to block by the view's own stride.
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
        """What the connector and the runner look at."""
        return EngineConfig(
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_layout=self.kv_cache_layout,
            indexes_kv_by_block_stride=self.indexes_kv_by_block_stride,
            num_kv_cache_groups=self.num_kv_cache_groups,
        )

    def decide(self) -> Decision:
        """Per-layer or cross-layer, and why."""
        return use_uniform_kv_cache(self.connector, self.config(), gate=self.gate)

    def build(
        self,
        sizes: ModelConfig,
        num_tokens: int,
        device: str | torch.device,
        fill: int = 0,
        decision: Decision | None = None,
    ) -> KVCache:
        """Allocate a cache for ``num_tokens`` of a model in the split packing, as the decision says.

        Args:
            decision: one that was taken already, so that the connector is not asked again.

        Raises:
            ValueError: a block size or a number of tokens or groups below 1, or whatever CacheSpec refuses.
        """
        decision = decision or self.decide()
        if self.block_size < 1 or num_tokens < 1:
            raise ValueError(
                f"{num_tokens} tokens in blocks of {self.block_size} cannot be held: both must be at least 1"
            )
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
        """A cache for ``num_tokens`` on the model's device, with its scale views carved and filled with 1.0."""
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
"""The runs of the story, by name."""


def scenario(name: str) -> Scenario:
    """The scenario of that name. Raises ValueError naming the nearest one."""
    return SCENARIOS[one_of("scenario", name, tuple(SCENARIOS))]


@dataclass(frozen=True)
class Outcome:
    """What a scenario gave, beside the reference's tokens if there are any."""

    scenario: Scenario
    decision: Decision
    layout: str
    generation: Generation
    reference: tuple[int, ...] = ()

    @property
    def first_wrong(self) -> int | None:
        """Number of the first token (from 0) that differs from the reference, or None if none does."""
        pairs = enumerate(zip(self.generation.token_ids, self.reference, strict=False))
        return next((number for number, (ours, theirs) in pairs if ours != theirs), None)


def run(
    which: Scenario, model: LanguageModel, prompt: Sequence[int], max_new_tokens: int, reference: Sequence[int] = ()
) -> Outcome:
    """Generate with the model over the cache that a scenario allocates.

    Args:
        prompt: token ids.
        reference: token ids of a run to compare with.
    """
    decision = which.decide()
    backend = which.start(model, len(prompt) + max_new_tokens, decision)
    generation = generate(model, backend, list(prompt), max_new_tokens)
    return Outcome(which, decision, backend.cache.layout.name, generation, tuple(reference))


def first_pass_bytes(which: Scenario, model: LanguageModel, prompt: Sequence[int]) -> Comparison:
    """Predicted and observed bytes of the first forward pass, over all layers: K and V data, and their scales.

    Raises:
        ValueError: several KV cache groups, whose tokens lie in different slots, or an empty prompt.
    """
    decision = which.decide()
    if which.num_kv_cache_groups > 1:
        raise ValueError(f"the bytes of one KV cache group can be compared, not of {which.num_kv_cache_groups}")
    geometry = which.build(model.config, len(prompt) + 1, "meta", decision=decision)
    claims = geometry.writers(geometry.carve_scales(which.carve)) if geometry.spec.is_per_token_head else ()
    views = [view for view in geometry.owners() if view.role == "data"] + list(claims)

    def first_pass(fill: int) -> dict[str, torch.Tensor]:
        cache = which.build(model.config, len(prompt) + 1, model.device, fill, decision)
        scales = cache.carve_scales(which.carve) if cache.spec.is_per_token_head else None
        generate(model, PagedBackend(cache, scales), list(prompt), 1)
        return cache.storages_by_name()

    return Comparison(predict(views, range(len(prompt))), observe(first_pass))
