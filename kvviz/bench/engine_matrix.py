"""Runs many engines one after the other, and keeps what each one did in ``notebooks/recorded_engines.json``.

A *run of the matrix* is one entry of the file: settings, what kvviz predicted, and what the engine did, or why the
engine cannot run. The file is written after each run. So the matrix can be interrupted and continued at any time:
entries that are in the file are skipped.
"""

import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvviz.bench.engine_packages import RELEASES
from kvviz.bench.engine_run import CONNECTORS, LAYOUTS, PROMPT, EngineFailedError, EngineRecord, EngineSettings, run
from kvviz.bench.prediction import disagreements, is_right, kit_answer, predict, token_texts
from kvviz.files import write_whole

FORMAT = "kvviz-engines"
COMMAND = "kvviz engine matrix"

_FP8 = "fp8_per_token_head"
FIRST = (
    ("0.25.1", _FP8, "none", "NHD"), ("0.25.1", _FP8, "prefer-cross-layer", "NHD"),
    ("0.26.0", _FP8, "prefer-cross-layer", "NHD"), ("0.27.1", _FP8, "prefer-cross-layer", "NHD"),
    ("0.28.0", _FP8, "prefer-cross-layer", "NHD"), ("0.32.0", _FP8, "none", "NHD"),
)  # fmt: skip
"""The runs that show the bug of vLLM issue 48412 and its two repairs."""

OF_ONE_RUN = ("engine_layout", "connector_names_layout", "backend")
"""Facts that an engine tells and that differ from run to run. The file holds all other facts once per release."""

_TELLING = sorted(RELEASES, key=lambda one: (one not in ("0.25.1", "0.26.0", "0.32.0"), one))
"""The releases in the order of the matrix: first the bug, its first repair, and the latest release."""

_MODES = (_FP8, "int8_per_token_head", "int4_per_token_head", "bfloat16")


def cells(tokens: int = 6) -> Iterator[EngineSettings]:
    """Yield the settings of all runs of the matrix: first :data:`FIRST`, then those that resemble it most."""

    def unusual(settings: tuple[str, ...]) -> tuple[int, int]:
        release, mode, connector, layout = settings
        return (mode != _FP8) + (connector == CONNECTORS[2]) + (layout != LAYOUTS[0]), _TELLING.index(release)

    rest = sorted(itertools.product(RELEASES, _MODES, CONNECTORS, LAYOUTS), key=unusual)
    for settings in dict.fromkeys((*FIRST, *rest)):
        yield EngineSettings(*settings, tokens=tokens)


def read_matrix(path: Path) -> dict[str, Any]:
    """Return the content of the file, or an empty matrix if there is no file.

    Raises:
        ValueError: the file has another format.
    """
    if not path.is_file():
        machine = f"{os.cpu_count()} CPU cores, {platform.machine()}"
        return {"format": FORMAT, "command": COMMAND, "machine": machine, "prompt": PROMPT, "runs": [], "releases": {}}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): restore the file, or give another path") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not a file of {COMMAND}: give another path")
    return found


def record_matrix(
    path: Path, wanted: Sequence[EngineSettings], progress: Callable[[str], None] = print, most: int | None = None
) -> int:
    """Run the engines that the file does not have yet, and write the file after each run. Return how many ran.

    Args:
        wanted: the settings of all runs, in order.
        most: the largest number of runs, or None for all.

    Raises:
        EngineError: an engine could not be fetched or installed. What is recorded up to then stays in the file.
    """
    count = 0
    for settings in wanted:
        if most is not None and count >= most:
            break
        if find(read_matrix(path), settings):
            continue
        prediction = predict(settings)
        entry: dict[str, Any] = {**_named(settings), "predicted": asdict(prediction)}
        try:
            record = run(settings, progress)
        except EngineFailedError as error:
            record, entry["cannot"] = None, error.cause
        matrix = read_matrix(path)  # read again, because another process may have written it
        if record:
            answer = _answer(matrix, record)
            right = is_right(record.token_ids, answer["token_ids"])
            entry |= {**_observed(record), "text_right": right}
            entry["disagreements"] = list(disagreements(prediction, record, right))
            told = {name: value for name, value in record.engine.items() if name not in OF_ONE_RUN}
            matrix["releases"][settings.release] = {**told, "replaced": record.replaced}
            texts = matrix.setdefault("token_texts", {})
            texts |= token_texts(token for token in record.token_ids if str(token) not in texts)
        entry["date"] = time.strftime("%Y-%m-%d")
        matrix["runs"].append(entry)
        write_whole(path, (json.dumps(matrix, indent=1) + "\n").encode())
        progress(line_of(entry))
        count += 1
    return count


def find(matrix: dict[str, Any], settings: EngineSettings) -> dict[str, Any] | None:
    """Return the entry of the matrix with these settings, or None. The number of tokens does not matter."""
    named = _named(settings)
    return next((entry for entry in matrix["runs"] if all(entry[key] == named[key] for key in named)), None)


def line_of(entry: dict[str, Any]) -> str:
    """Return one line about an entry of the matrix."""
    name = " ".join(entry[key] for key in ("release", "kv_cache_dtype", "connector", "layout"))
    if "cannot" in entry:
        return f"{name}: cannot run: {entry['cannot']}"
    kind = "cross-layer" if entry["found"]["cross_layer"] else "per layer"
    findings = ", ".join(f"{one['findings']} {kind}" for kind, one in entry["kinds"].items()) or "clean"
    other = "; ".join(entry["disagreements"])
    said = f"{name}: {kind}, {findings}, {entry['text']!r}, {entry['seconds']['total']:.0f} s"
    return f"{said}. Not as predicted: {other}" if other else said


def _named(settings: EngineSettings) -> dict[str, str]:
    return {key: getattr(settings, key) for key in ("release", "kv_cache_dtype", "connector", "layout")}


def _observed(record: EngineRecord) -> dict[str, Any]:
    """Return what the file keeps of a run. The views are left out, because ``found`` is shorter."""
    kept = ("text", "token_ids", "margins", "clean", "kinds", "diagnosis", "seconds", "peak_bytes")
    told = {name: record.engine[name] for name in OF_ONE_RUN}
    return {"found": asdict(record.found), **{name: getattr(record, name) for name in kept}, **told}


def _answer(matrix: dict[str, Any], record: EngineRecord) -> dict[str, Any]:
    """Return the right answer. kvviz's own engine computes the answer once, and the matrix keeps it."""
    prompt = list(record.prompt_token_ids)
    known = matrix.get("answer", {})
    if known.get("prompt_token_ids") != prompt or len(known["token_ids"]) < len(record.token_ids):
        ids, text = kit_answer(prompt, max(len(record.token_ids), 16))
        known = matrix["answer"] = {"prompt_token_ids": prompt, "token_ids": list(ids), "text": text}
    return known
