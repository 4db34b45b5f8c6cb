"""kvviz shows which view each byte of a KV cache belongs to, and finds views that write into the bytes of other views.

Most notebooks import only the names of this module, for example ``from kvviz import CacheSpec, allocate, write_kv``.
Each name is loaded when it is first used. So ``import kvviz`` is quick, and works without torch, Triton or NumPy.

kvviz has nine packages. ``audit`` checks strided views of any program. ``cache`` rebuilds vLLM's KV cache.
``kernels`` write and read this cache, ``engine`` serves a model with it, and ``show`` draws it. ``challenge`` makes
caches with an unknown fault. ``report`` makes pages from notebooks. ``bench`` runs
released engines. ``trace`` watches which bytes change, and follows bytes from one cache to another.
"""

__version__ = "0.2.0"

_PLACES = {
    "CacheSpec": "kvviz.cache.spec:CacheSpec",
    "allocate": "kvviz.cache.buffers:allocate",
    "device": "kvviz.kernels.runtime:device",
    "write_kv": "kvviz.kernels.write:write_kv",
    "paged_attention": "kvviz.kernels.attention:paged_attention",
    "View": "kvviz.audit.view:View",
    "audit_views": "kvviz.audit.audit:audit_views",
    "audit_scales": "kvviz.audit.audit:audit_scales",
    "byte_map": "kvviz.show.byte_map:byte_map",
    "MapView": "kvviz.show.live_map:MapView",
    "load_model": "kvviz.engine.model:load_model",
    "generate": "kvviz.engine.generate:generate",
    "BlockPool": "kvviz.engine.block_pool:BlockPool",
    "Offloader": "kvviz.engine.offload:Offloader",
    "gpu_budget": "kvviz.engine.gpu_budget:",
}
"""For each name, the place where it is defined, as ``module:name``. ``module:`` means the module itself."""

__all__ = sorted([*_PLACES, "__version__"])


def __getattr__(name: str):
    """Load a name when it is first used. Python calls this function for unknown names of a module (PEP 562)."""
    from pkgutil import resolve_name

    if name not in _PLACES:
        raise AttributeError(_unknown(name))
    value = globals()[name] = resolve_name(_PLACES[name])
    return value


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, _PLACES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"module 'kvviz' has no attribute {name!r}: choose one of {', '.join(sorted(_PLACES))}{hint}"


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
