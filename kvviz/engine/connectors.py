"""Models how vLLM decides between one buffer for all layers and one buffer per layer.

A KV connector moves blocks, for example to host memory. A connector only *prefers* one buffer for all layers
(cross-layer blocks). The engine makes the decision in :func:`use_uniform_kv_cache`.

Preferences follow vLLM 0.23. The decision follows ``use_uniform_kv_cache`` of vLLM 0.23 to 0.27. The fix of issue
48412 was first written for one connector. The merged version changes the decision instead (PR 49226).

To add a connector, write a class here with a method ``prefer_cross_layer_blocks(config)``, and a test in
tests/engine/test_connectors.py. Nothing else lists the connectors.
"""

from dataclasses import dataclass
from typing import Protocol

from kvviz.audit.arguments import is_integer, one_of
from kvviz.cache.modes import get_mode

NIXL_CROSS_LAYER_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
"""Attention backends for which vLLM's NixlConnector may prefer cross-layer blocks (vLLM 0.23)."""


@dataclass(frozen=True)
class EngineConfig:
    """The settings of the engine that connectors and the decision use.

    Args:
        kv_cache_dtype: name of the cache's mode.
        kv_cache_layout: "NHD" (tokens before heads) or "HND".
        attention_backend: vLLM's name of the attention backend.
        indexes_kv_by_block_stride: True if the backend steps from block to block by the stride of the view.
        num_kv_cache_groups: number of groups into which the layers are divided. Each group has its own blocks.
        has_mamba_group: True if one group holds Mamba state instead of K and V.

    Raises:
        ValueError: the mode or the layout does not exist, or there are fewer than 1 group.
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
    """An object with a method that returns its preference. No base class is needed."""

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Return True to ask for one buffer for all layers."""
        ...


@dataclass(frozen=True)
class OffloadingConnector:
    """Moves blocks to host memory. Prefers cross-layer blocks. If ``patched`` is True, it does not prefer them in
    per-token-head modes."""

    patched: bool = False

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Return the preference. The condition ``patched`` was the first fix of issue 48412, and was not merged."""
        return not (self.patched and config.is_per_token_head)


@dataclass(frozen=True)
class NixlConnector:
    """Moves blocks between machines. Prefers cross-layer blocks if its option, the layout and the backend allow it."""

    enable_cross_layers_blocks: bool = False

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Return True if the option is set, the layout is HND, no group is a Mamba group, and the backend is listed."""
        return (
            self.enable_cross_layers_blocks
            and config.kv_cache_layout == "HND"
            and not config.has_mamba_group
            and config.attention_backend in NIXL_CROSS_LAYER_BACKENDS
        )


@dataclass(frozen=True)
class MooncakeStoreConnector:
    """Keeps blocks in a shared store. Prefers cross-layer blocks if its option is set."""

    enable_cross_layers_blocks: bool = False

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Return the option."""
        return self.enable_cross_layers_blocks


@dataclass(frozen=True)
class MultiConnector:
    """Combines several connectors. Prefers cross-layer blocks if all members do."""

    members: tuple[KVConnector, ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("members is empty: a MultiConnector needs at least one member")

    def prefer_cross_layer_blocks(self, config: EngineConfig) -> bool:
        """Return True if all members prefer cross-layer blocks."""
        return all(_preference(member, config) for member in self.members)


@dataclass(frozen=True)
class Decision:
    """The decision: True for one buffer, and each condition as a pair (name, True if the condition holds)."""

    cross_layer: bool
    conditions: tuple[tuple[str, bool], ...]

    def __str__(self) -> str:
        """Return the decision and its conditions in one line."""
        kind = "cross-layer" if self.cross_layer else "per-layer"
        return f"{kind}: " + ", ".join(f"{name} {'yes' if held else 'no'}" for name, held in self.conditions)


def _preference(connector: KVConnector, config: EngineConfig) -> bool:
    if isinstance(connector, type) or not callable(getattr(connector, "prefer_cross_layer_blocks", None)):
        raise TypeError(
            f"{connector!r} is not a connector: give an object with a method prefer_cross_layer_blocks(config)"
        )
    answer = connector.prefer_cross_layer_blocks(config)
    if not isinstance(answer, bool):
        raise TypeError(
            f"prefer_cross_layer_blocks of {connector!r} returned {answer!r}, but must return True or False"
        )
    return answer


def use_uniform_kv_cache(connector: KVConnector | None, config: EngineConfig, *, gate: bool = False) -> Decision:
    """Decide between one buffer for all layers and one buffer per layer.

    Args:
        connector: the connector, or None. If the connector raises an exception, the exception is passed on.
        gate: if True, modes with per-token-head scales never get one buffer for all layers, whatever the connector
            prefers. vLLM 0.27.1 has this condition (PR 49226).

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
