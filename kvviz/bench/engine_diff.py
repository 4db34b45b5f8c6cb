"""Tells what changed between two releases of vLLM, from one run of each: layouts, views, pages, connectors, answer.

Nothing here knows a release. Every fact comes from the live tensors, or from the engine's own process.
"""

from dataclasses import dataclass
from typing import Any

from kvviz.bench.engine_run import EngineRecord


@dataclass(frozen=True)
class Difference:
    """One fact that two runs do not share: its name, and its value in the first and in the second run."""

    what: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.what}: {_text(self.before)} -> {_text(self.after)}"


ABSENT = "absent"
"""Value of a fact that one of the runs does not have."""


def facts(record: EngineRecord) -> dict[str, Any]:
    """Return what a run says about the engine, by name. Seconds, memory and versions of packages are left out."""
    found, engine = record.found, record.engine
    told = {
        "order of the axes": found.order,
        "packing": found.packing,
        "one buffer for all layers": found.cross_layer,
        "storages": found.storages,
        "bytes of a page": found.page_bytes,
        "bytes of a cell": found.cell_bytes,
        "scale views": found.scale_views,
        "findings of the audit": {kind: one["findings"] for kind, one in record.kinds.items()} or "none",
        "answer": record.text,
        "engine's name of the layout": engine["engine_layout"],
        "layout names that the engine accepts": engine["layout_names"],
        "the connector names a layout": engine["connector_names_layout"],
        "model runner": engine["runner"],
        "attention backend": engine["backend"],
    }
    told |= {f"step of axis {axis} in bytes": step for axis, step in sorted(found.stride_bytes.items())}
    for name, hooks in engine["connectors"].items():
        what = "a connector is asked for" if name == "base" else f"{name} answers"
        told[what] = hooks or "nothing"
    return told


def differences(before: EngineRecord, after: EngineRecord) -> tuple[Difference, ...]:
    """Return every fact that the two runs do not share, in the order of :func:`facts`."""
    first, second = facts(before), facts(after)
    names = dict.fromkeys((*first, *second))
    pairs = ((name, first.get(name, ABSENT), second.get(name, ABSENT)) for name in names)
    return tuple(Difference(*one) for one in pairs if one[1] != one[2])


def diff_text(before: EngineRecord, after: EngineRecord) -> str:
    """Return the differences of two runs as text, one per line."""
    found = differences(before, after)
    head = f"{before.settings}\n{after.settings}"
    if not found:
        return f"{head}\nno differences in {len(facts(before))} facts"
    lines = [f"  {one}" for one in found]
    return "\n".join([head, f"{len(found)} of {len(facts(before))} facts differ:", *lines])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else repr(value) if value == "" else str(value)
