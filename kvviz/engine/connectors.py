"""Models how vLLM decides between one buffer for all layers and one buffer per layer.

A KV connector moves blocks, for example to host memory. A connector can *prefer* one buffer for all layers, in which
the blocks are cross-layer. But the engine decides, in :func:`use_uniform_kv_cache`.

The preferences follow vLLM 0.23. The decision follows ``use_uniform_kv_cache`` of vLLM 0.23 to 0.27. The first fix of
issue 48412 changed one connector. The merged fix changes the decision instead (PR 49226).

To add a connector, write a class here with a method ``prefer_cross_layer_blocks(config)``, and a test in
tests/engine/test_connectors.py. Nothing else lists the connectors.
"""

from dataclasses import dataclass
from typing import Protocol

from kvviz.audit.arguments import is_integer, one_of
from kvviz.cache.modes import get_mode

NIXL_CROSS_LAYER_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
"""With these attention backends, the NixlConnector of vLLM 0.23 can prefer cross-layer blocks."""


@dataclass(frozen=True)
class EngineConfig:
    """The settings of the engine that connectors and the decision use.

    Args:
        kv_cache_dtype: name of the mode of the cache.
        kv_cache_layout: "NHD" (tokens outside heads) or "HND" (heads outside tokens).
        attention_backend: the attention backend, named as in vLLM.
        indexes_kv_by_block_stride: True if the backend finds a block by the block stride of the view.
        num_kv_cache_groups: number of groups into which the layers are divided. Each group has its own blocks.
        has_mamba_group: True if one group stores Mamba state instead of K and V.

    Raises:
        ValueError: the mode or the layout does not exist, or ``num_kv_cache_groups`` is less than 1.
    """

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
        """Return True if the cache contains one scale per token and head."""
        return get_mode(self.kv_cache_dtype).is_per_token_head


class KVConnector(Protocol):
    """Any object with the method ``prefer_cross_layer_blocks``. No base class is needed."""

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Return True if this connector prefers one buffer for all layers."""
        ...


@dataclass(frozen=True)
class OffloadingConnector:
    """Moves blocks to host memory. This connector prefers cross-layer blocks.

    If ``patched`` is True, it prefers them only in modes that are not per-token-head.
    """

    patched: bool = False

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Return the preference. ``patched`` is the first fix of issue 48412, which vLLM did not merge."""
        return not (self.patched and config.is_per_token_head)


@dataclass(frozen=True)
class NixlConnector:
    """Moves blocks between machines. This connector prefers cross-layer blocks only under several conditions.

    One condition is its option ``enable_cross_layers_blocks``.
    """

    enable_cross_layers_blocks: bool = False

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Return True if all conditions hold. The last condition is a backend of NIXL_CROSS_LAYER_BACKENDS."""
        return (
            self.enable_cross_layers_blocks
            and config.kv_cache_layout == "HND"
            and not config.has_mamba_group
            and config.attention_backend in NIXL_CROSS_LAYER_BACKENDS
        )


@dataclass(frozen=True)
class MooncakeStoreConnector:
    """Keeps blocks in a shared store. Prefers cross-layer blocks if ``enable_cross_layers_blocks`` is True."""

    enable_cross_layers_blocks: bool = False

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Return ``enable_cross_layers_blocks``."""
        return self.enable_cross_layers_blocks


@dataclass(frozen=True)
class MultiConnector:
    """Combines several connectors. Prefers cross-layer blocks if all members prefer them."""

    members: tuple[KVConnector, ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("members is empty, but a MultiConnector needs at least one member: pass a connector")

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Return True if all members prefer cross-layer blocks."""
        return all(_preference(member, config) for member in self.members)


@dataclass(frozen=True)
class Decision:
    """The decision of the engine, with the reasons.

    Attributes:
        cross_layer: True for one buffer for all layers, False for one buffer per layer.
        conditions: pairs of the name of a condition, and True if the condition holds. ``cross_layer`` is True only if
            all conditions hold.
    """

    cross_layer: bool
    conditions: tuple[tuple[str, bool], ...]

    def __str__(self) -> str:
        """Return the decision and its conditions in one line."""
        kind = "cross-layer" if self.cross_layer else "per-layer"
        return f"{kind}: " + ", ".join(f"{name} {'yes' if held else 'no'}" for name, held in self.conditions)


def _preference(connector: KVConnector, config: EngineConfig) -> bool:
    if isinstance(connector, type) or not callable(getattr(connector, "prefer_cross_layer_blocks", None)):
        raise TypeError(
            f"{connector!r} is not a connector: pass an object with a method prefer_cross_layer_blocks(config)"
        )
    answer = connector.prefer_cross_layer_blocks(config)
    if not isinstance(answer, bool):
        raise TypeError(
            f"prefer_cross_layer_blocks of {connector!r} returned {answer!r}, but it must return True or False"
        )
    return answer


def use_uniform_kv_cache(connector: KVConnector | None, config: EngineConfig, *, gate: bool = False) -> Decision:
    """Decide between one buffer for all layers and one buffer per layer.

    Args:
        connector: the connector, or None. An exception of the connector is not caught.
        gate: True to use the check of vLLM 0.27.1 (PR 49226). With this check, a per-token-head mode never gets one
            buffer for all layers.

    Raises:
        TypeError: the connector has no method ``prefer_cross_layer_blocks``, or the method does not return a bool.
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
