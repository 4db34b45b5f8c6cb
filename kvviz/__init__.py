"""kvviz: which bytes of a KV cache belong to whom, and who is writing on whom.

The names below are what most notebooks need: ``from kvviz import CacheSpec, allocate, write_kv``. Each is loaded
when it is first used, so that ``import kvviz`` needs neither torch nor Triton.

Rooms: ``audit`` judges strided views, anybody's. ``cache`` is vLLM's KV cache, rebuilt. ``kernels`` write and read
it, ``engine`` serves a model over it, ``show`` draws it. ``challenge`` makes unknown caches, ``report`` makes pages.
"""

from importlib import import_module

__version__ = "0.2.0"

_HOMES = {
    "CacheSpec": "kvviz.cache.spec",
    "allocate": "kvviz.cache.buffers",
    "device": "kvviz.kernels.runtime",
    "write_kv": "kvviz.kernels.write",
    "paged_attention": "kvviz.kernels.attention",
    "View": "kvviz.audit.view",
    "audit_views": "kvviz.audit.audit",
    "audit_scales": "kvviz.audit.audit",
    "byte_map": "kvviz.show.byte_map",
    "MapView": "kvviz.show.live_map",
    "load_model": "kvviz.engine.model",
    "generate": "kvviz.engine.generate",
    "BlockPool": "kvviz.engine.block_pool",
    "Offloader": "kvviz.engine.offload",
    "gpu_budget": "kvviz.engine",
}
"""The module that each name is loaded from."""

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'kvviz' has no attribute {name!r}: it offers {', '.join(sorted(_HOMES))}")
    home = import_module(f"{_HOMES[name]}.{name}" if name == "gpu_budget" else _HOMES[name])
    found = home if name == "gpu_budget" else getattr(home, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
