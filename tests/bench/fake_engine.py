"""Records of an engine that never ran: the views come from kvviz's own cache, named as in vLLM."""

from kvviz.audit import collect
from kvviz.audit.views_file import ViewsFile, dump
from kvviz.bench.engine_run import EngineSettings, record_of
from kvviz.bench.prediction import predicted_layout, version
from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec

RESULT = {
    "version": "0.25.1", "replaced": [{"part": "sampler", "ours": "PyTorch", "why": "slow"}], "text": "The sky",
    "token_ids": [504, 6376], "prompt_token_ids": [1, 2], "margins": [2.5, 0.25], "probe": None,
    "seconds": {"import": 1.0, "load": 2.0, "generate": 3.0}, "peak_bytes": 3 << 30, "engine_layout": "NHD",
    "layout_names": ["NHD", "HND"], "connector_names_layout": False, "runner": "GPUModelRunner",
    "connectors": {"base": ["prefer_cross_layer_blocks"], "NixlConnector": ["prefer_cross_layer_blocks"]},
    "backend": ["TritonAttentionImpl"], "packages": {"torch": "2.13.0"},
}  # fmt: skip


def views_text(settings: EngineSettings) -> str:
    """Return the views file that the engine is expected to write."""
    spec = CacheSpec(30, 64, 32, 3, 64, settings.kv_cache_dtype)
    cache = allocate(spec, predicted_layout(settings), "meta")
    if spec.is_per_token_head:
        carved = cache.writers(cache.carve_scales("strides" if version(settings.release) >= (0, 26) else "shape"))
        views = (*(view for view in cache.owners() if view.role == "data"), *carved)
    else:
        views = collect.views_of({f"layer {number} KV": kv for number, kv in enumerate(cache.kv_caches)})
    return dump(ViewsFile.of(views, collect.usual_claims(views)))


def fake_record(release="0.25.1", connector="none", mode="fp8_per_token_head", layout="NHD", **changes):
    """Return the record of a run in which everything is as predicted. ``changes`` replace entries of RESULT."""
    settings = EngineSettings(release, mode, connector, layout)
    return record_of(settings, {**RESULT, **changes}, views_text(settings), 7.5)
