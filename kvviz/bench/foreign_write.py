"""Names the first write of a layer into another layer's bytes, observed inside a released vLLM.

``python -m kvviz.bench.foreign_write`` runs two releases and records both results for notebook 12. The engine's process
loads this file too, and calls :func:`probe`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROBE = Path(__file__)
RECORD = Path("notebooks") / "recorded_foreign_write.json"
RELEASES = ("0.25.1", "0.26.0")
"""The last release in which one buffer breaks, and the first in which scale views are computed from strides."""


def probe(generate: Callable[[], str], layers: Mapping[str, Any]) -> dict[str, Any]:
    """Watch the cache during the first forward pass of an answer, one step per layer's write.

    A layer may change its own cells only: the bytes of its ``kv_cache``, with the scales at the ends of its cells.

    Returns:
        ``launches``: number of watched writes. ``first``: launch, layer, storage, byte and text of the first foreign
        write, or None. ``foreign_bytes``: bytes of other layers that changed, over all watched writes.
    """
    from kvviz.trace.watch import Allowed, watch

    caches = {name: _cache(layer) for name, layer in layers.items()}
    with watch(caches) as seen:
        before = {name: layer.impl.do_kv_cache_update for name, layer in layers.items()}

        def watched(name: str) -> Callable[..., Any]:
            def write(*args: Any, **kwargs: Any) -> Any:
                result = before[name](*args, **kwargs)
                if len(seen.steps) < len(layers):  # the first forward pass: one write per layer
                    seen.step(name, Allowed(views=[name]))
                return result

            return write

        for name, layer in layers.items():
            layer.impl.do_kv_cache_update = watched(name)
        try:
            generate()
        finally:
            for layer in layers.values():
                del layer.impl.do_kv_cache_update
    steps = seen.steps[: len(layers)]
    found = next((number for number, step in enumerate(steps) if step.num_forbidden), None)
    first = None
    if found is not None:
        storage, at = next((name, at) for name, at in steps[found].forbidden.items() if len(at))
        first = {
            "launch": found, "layer": steps[found].title, "storage": storage, "byte": int(at[0]),
            "text": steps[found].first_forbidden,
        }  # fmt: skip
    return {"launches": len(steps), "first": first, "foreign_bytes": sum(step.num_forbidden for step in steps)}


def _cache(layer: Any) -> Any:
    """Return the cache of a layer as one tensor. Some releases keep a list with one tensor."""
    cache = layer.kv_cache
    return cache[0] if isinstance(cache, (list, tuple)) else cache


def main() -> None:
    """Run the releases, and write what was observed to :data:`RECORD`."""
    from kvviz.bench.engine_run import EngineSettings, run
    from kvviz.files import write_whole

    found = {
        release: run(EngineSettings(release, connector="prefer-cross-layer", tokens=2), probe=PROBE)
        for release in RELEASES
    }
    data = {"command": "python -m kvviz.bench.foreign_write", "runs": {name: one.probe for name, one in found.items()}}
    write_whole(RECORD, (json.dumps(data, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
