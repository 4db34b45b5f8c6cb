"""Predicts what a released vLLM does with the cache, from kvviz's own model of vLLM, before the engine runs.

The prediction uses the decision in ``kvviz.engine.connectors``, the layouts and the two ways to carve scale views in
``kvviz.cache``, and the audit. :func:`disagreements` compares a prediction with a run. A disagreement is a finding
about kvviz: its model of vLLM lacks something.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvviz.audit import audit, collect
from kvviz.bench.engine_run import EngineRecord, EngineSettings, summary
from kvviz.cache import geometry
from kvviz.cache.layout import LAYOUTS, Layout, released_layout
from kvviz.cache.modes import get_mode
from kvviz.cache.spec import CacheSpec
from kvviz.engine.connectors import EngineConfig, MultiConnector, OffloadingConnector, use_uniform_kv_cache

PACKED_SINCE, GATED_SINCE, NAMED_SINCE = (0, 26), (0, 27, 1), (0, 29)
"""The first releases in which K and V cells are adjacent and scale views read strides; in which modes with scales in
the cache get no buffer for all layers (PR 49226); and in which a layout has one of six names."""

_CONNECTORS = {
    "none": None,
    "prefer-cross-layer": OffloadingConnector(),
    "multi-of-two": MultiConnector((OffloadingConnector(), OffloadingConnector())),
}

HARMLESS = {"permuted"}
"""Kinds of findings that do not change a text, because writers and readers use the same order."""


@dataclass(frozen=True)
class Prediction:
    """What kvviz expects of one run.

    Attributes:
        layout: the name of the layout in ``kvviz.cache``.
        order, cross_layer: as in :class:`~kvviz.bench.layout_found.LayoutFound`.
        kinds: the findings of the audit, as :func:`~kvviz.bench.engine_run.summary` returns them.
        text_right: True if no finding can change the text.
    """

    layout: str
    order: str
    cross_layer: bool
    kinds: dict[str, dict[str, int]]
    text_right: bool

    @property
    def clean(self) -> bool:
        """Return True if the audit is expected to have no findings."""
        return not self.kinds


def version(release: str) -> tuple[int, ...]:
    """Return a release as numbers that can be compared: ``(0, 25, 1)``."""
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def predict(settings: EngineSettings, num_layers: int = 30, num_kv_heads: int = 3, head_size: int = 64) -> Prediction:
    """Return what kvviz expects of a run. The other arguments are sizes of the model, here of SmolLM2-135M."""
    layout, mode = predicted_layout(settings), get_mode(_mode(settings))
    counts = (num_layers, settings.llm["num_gpu_blocks_override"], settings.llm["block_size"], num_kv_heads, head_size)
    spec = CacheSpec(*counts, mode.name)
    owners = geometry.owners(spec, layout)
    views = owners
    if mode.is_per_token_head:
        from kvviz.cache.buffers import allocate

        cache = allocate(spec, layout, "meta")
        carve = "strides" if version(settings.release) >= PACKED_SINCE else "shape"
        views = (*(view for view in owners if view.role == "data"), *cache.writers(cache.carve_scales(carve)))
    kinds = summary(audit.audit_views(views, collect.usual_claims(views)).findings)
    return Prediction(layout.name, layout.order, layout.cross_layer, kinds, set(kinds) <= HARMLESS)


def predicted_layout(settings: EngineSettings) -> Layout:
    """Return the layout that a release is expected to choose."""
    release, connector = version(settings.release), _CONNECTORS[settings.connector]
    if release >= NAMED_SINCE:
        cross = connector is not None  # no gate is known for these releases: scale views read strides
        return LAYOUTS[{"NHD": ("LBNHC", "BLNHC"), "HND": ("LBHNC", "BHLNC")}[settings.layout][cross]]
    config = EngineConfig(_mode(settings), settings.layout)
    decision = use_uniform_kv_cache(connector, config, gate=release >= GATED_SINCE)
    packing = "packed" if release >= PACKED_SINCE else "split"
    return released_layout(settings.layout, decision.cross_layer, packing)


def _mode(settings: EngineSettings) -> str:
    """Return the mode. The bench's ``auto`` is float32, which has the layouts of bfloat16 and no scales either."""
    return "bfloat16" if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype


def kit_answer(prompt: Sequence[int], tokens: int) -> tuple[tuple[int, ...], str]:
    """Return the token ids and the text that kvviz's own engine answers, with a cache in float32."""
    from kvviz.engine.generate import PlainBackend, generate
    from kvviz.engine.model import load_model

    answer = generate(load_model("cpu"), PlainBackend(), list(prompt), tokens)
    return answer.token_ids, answer.text


def token_texts(token_ids: Iterable[int]) -> dict[str, str]:
    """Return the text of each token, by its id. JSON has no integer keys, so an id is text here."""
    from kvviz.engine.model import load_model

    model = load_model("cpu")
    return {str(token): model.decode([token]) for token in token_ids}


def is_right(token_ids: Sequence[int], expected: Sequence[int]) -> bool:
    """Return True if the tokens are the first tokens of the expected answer."""
    return tuple(token_ids) == tuple(expected[: len(token_ids)])


def disagreements(prediction: Prediction, record: EngineRecord, text_right: bool) -> tuple[str, ...]:
    """Return one sentence for each point in which a run is not as predicted."""
    found = record.found
    points = (
        ("order of the axes", prediction.order, found.order),
        ("one buffer for all layers", prediction.cross_layer, found.cross_layer),
        ("findings", prediction.kinds, record.kinds),
        ("right text", prediction.text_right, text_right),
    )
    return tuple(f"{what}: predicted {ours}, observed {theirs}" for what, ours, theirs in points if ours != theirs)
