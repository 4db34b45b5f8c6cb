"""KV connectors as far as this story needs them: what each prefers, and who decides on the allocation.

A connector only *prefers* cross-layer blocks; the runner decides. Preferences as in vLLM 0.23, the decision as
``use_uniform_kv_cache`` took it from 0.23 to 0.27. The fix of issue 48412 was first put into one connector, and
landed in the decision (PR 49226).
"""

from dataclasses import dataclass
from typing import Protocol

from kvviz.audit.arguments import is_integer, one_of
from kvviz.cache.modes import get_mode

NIXL_CROSS_LAYER_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")


@dataclass(frozen=True)
class EngineConfig:
    """What connectors and the runner look at when buffers are about to be allocated."""

    kv_cache_dtype: str = "fp8_per_token_head"
    kv_cache_layout: str = "NHD"
    attention_backend: str = "TRITON_ATTN"
    indexes_kv_by_block_stride: bool = True
    num_kv_cache_groups: int = 1
    has_mamba_group: bool = False

    def __post_init__(self) -> None:
        get_mode(self.kv_cache_dtype)
        one_of("kv_cache_layout", self.kv_cache_layout, ("NHD", "HND"))
        count = self.num_kv_cache_groups
        if not is_integer(count, 1):
            raise ValueError(f"num_kv_cache_groups must be an integer of at least 1, not {count!r}")

    @property
    def is_per_token_head(self) -> bool:
        """Whether scales lie inline in the cache."""
        return get_mode(self.kv_cache_dtype).is_per_token_head


class KVConnector(Protocol):
    """Anything that can say whether it would like one buffer for all layers."""

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """True to ask for a cross-layer allocation."""
        ...


@dataclass(frozen=True)
class OffloadingConnector:
    """Moves blocks to host memory. Prefers cross-layer blocks always; ``patched``: not in per-token-head modes."""

    patched: bool = False

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """The first fix of issue 48412 was this condition; review moved it."""
        return not (self.patched and config.is_per_token_head)


@dataclass(frozen=True)
class NixlConnector:
    """Moves blocks between machines. Prefers cross-layer blocks on request, where backend and layout allow it."""

    enable_cross_layers_blocks: bool = False

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Asked for, HND, no Mamba group, and one of three backends."""
        return (
            self.enable_cross_layers_blocks
            and config.kv_cache_layout == "HND"
            and not config.has_mamba_group
            and config.attention_backend in NIXL_CROSS_LAYER_BACKENDS
        )


@dataclass(frozen=True)
class MooncakeStoreConnector:
    """Keeps blocks in a shared store. Prefers cross-layer blocks when its option says so."""

    enable_cross_layers_blocks: bool = False

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """The option alone decides."""
        return self.enable_cross_layers_blocks


@dataclass(frozen=True)
class MultiConnector:
    """Several connectors at once. Prefers cross-layer blocks when all of its members do."""

    members: tuple[KVConnector, ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("a MultiConnector needs at least one member")

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """All of them, or not."""
        return all(_preference(member, config) for member in self.members)


@dataclass(frozen=True)
class Decision:
    """The runner's answer, and each condition with whether it held."""

    cross_layer: bool
    conditions: tuple[tuple[str, bool], ...]

    def __str__(self) -> str:
        kind = "cross-layer" if self.cross_layer else "per-layer"
        return f"{kind}: " + ", ".join(f"{name} {'yes' if held else 'no'}" for name, held in self.conditions)


def _preference(connector: KVConnector, config: EngineConfig) -> bool:
    if isinstance(connector, type) or not callable(getattr(connector, "prefer_cross_layer_blocks", None)):
        raise TypeError(
            f"{connector!r} is no connector: give an object with a method prefer_cross_layer_blocks(config)"
        )
    answer = connector.prefer_cross_layer_blocks(config)
    if not isinstance(answer, bool):
        raise TypeError(f"{connector!r} prefers {answer!r}: prefer_cross_layer_blocks must return True or False")
    return answer


def use_uniform_kv_cache(connector: KVConnector | None, config: EngineConfig, *, gate: bool = False) -> Decision:
    """Decide whether one buffer serves all layers.

    Args:
        connector: None where there is none. What it raises is passed on.
        gate: whether the allocation refuses per-token-head modes whoever asks, as vLLM 0.27.1 does (PR 49226).

    Raises:
        TypeError: a connector without the method, or one that answers neither True nor False.
    """
    preferred = connector is not None and _preference(connector, config)
    conditions = [
        ("a connector prefers cross-layer blocks", preferred),
        ("one KV cache group", config.num_kv_cache_groups == 1),
        ("the backend indexes by block stride", config.indexes_kv_by_block_stride),
    ]
    if gate:
        conditions.append(("no scales lie inside the cache", not config.is_per_token_head))
    return Decision(all(held for _, held in conditions), tuple(conditions))
