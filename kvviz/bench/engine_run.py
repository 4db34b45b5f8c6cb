"""Runs one released vLLM in a process of its own, and returns a record of the run.

Example: ``run(EngineSettings("0.25.1", "fp8_per_token_head", "prefer-cross-layer"))`` serves one prompt with vLLM
0.25.1, reads the geometry of the live tensors, and audits it.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvviz.audit import diagnosis_text, views_file, writer
from kvviz.audit.arguments import is_integer, one_of
from kvviz.audit.causes import diagnose
from kvviz.audit.findings import Finding
from kvviz.bench.engine_packages import (
    RELEASES,
    EngineError,
    checked_release,
    engine_python,
    engines_folder,
    release_folder,
)
from kvviz.bench.layout_found import LayoutFound, layout_of
from kvviz.bench.model_folder import model_folder
from kvviz.files import write_whole

INSIDE = Path(__file__).with_name("inside_engine.py")
PROMPT = "Explain in three sentences why the sky is blue."
MODES = ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "bfloat16", "auto")
"""Values of ``--kv-cache-dtype``. ``auto`` is a float32 cache, because the engine computes in float32."""

CONNECTORS = ("none", "prefer-cross-layer", "multi-of-two")
LAYOUTS = ("NHD", "HND")
SECONDS = 1200
"""Time limit of one run in seconds. A run takes about one minute on two free CPU cores."""

_PREFERRING = {
    "kv_connector": "PreferCrossLayer", "kv_connector_module_path": "preferring_connector", "kv_role": "kv_both",
}  # fmt: skip
_TRANSFER = {
    "none": None,
    "prefer-cross-layer": _PREFERRING,
    "multi-of-two": {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [_PREFERRING, _PREFERRING]},
    },
}  # fmt: skip
"""The transfer configuration of each connector."""

FLAGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that its tensors can be read
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # only model runner V1 allocates one buffer for all layers
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Environment variables of the engine's process."""


class EngineFailedError(EngineError):
    """The engine was started and failed. ``cause`` is the reason without any path of this machine."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class EngineSettings:
    """What one run serves.

    Args:
        release: a release of vLLM, for example "0.25.1".
        kv_cache_dtype: one of :data:`MODES`.
        connector: one of :data:`CONNECTORS`. The connector states a preference and moves nothing.
        layout: "NHD" (tokens before heads) or "HND".
        tokens: number of tokens of the answer, 1 to 64.

    Raises:
        ValueError: a value is none of these.
    """

    release: str
    kv_cache_dtype: str = "fp8_per_token_head"
    connector: str = "none"
    layout: str = "NHD"
    tokens: int = 6

    def __post_init__(self) -> None:
        checked_release(self.release)
        one_of("kv_cache_dtype", self.kv_cache_dtype, MODES)
        one_of("connector", self.connector, CONNECTORS)
        one_of("layout", self.layout, LAYOUTS)
        if not is_integer(self.tokens, 1) or self.tokens > 64:
            raise ValueError(f"tokens must be an integer from 1 to 64, not {self.tokens!r}")

    def __str__(self) -> str:
        return f"vLLM {self.release}, {self.kv_cache_dtype}, connector {self.connector}, {self.layout}"

    @property
    def llm(self) -> dict[str, Any]:
        """Return the arguments of vLLM's class LLM, without the model."""
        transfer = _TRANSFER[self.connector]
        return {
            "dtype": "float32",  # Triton's interpreter multiplies bfloat16 tiles wrongly
            "kv_cache_dtype": self.kv_cache_dtype, "block_size": 32, "num_gpu_blocks_override": 64,
            "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 128,
            "compilation_config": {"custom_ops": ["none"], "mode": 0},
            **({"kv_transfer_config": transfer} if transfer else {}),
        }  # fmt: skip


@dataclass(frozen=True)
class EngineRecord:
    """What one run of an engine did.

    Attributes:
        settings: what was run.
        flags: the arguments of LLM, and the environment variables.
        found: the layout of the live tensors.
        engine: facts that the engine told: its name for the layout, the names that it accepts, runner, backend,
            versions of packages, connectors and their questions about layouts.
        replaced: the parts of vLLM that kvviz replaced: ``part``, ``ours`` and ``why``.
        prompt_token_ids: the prompt with the chat template, as token ids.
        text, token_ids: the answer.
        margins: for each token, how far the second most likely token was behind, as a difference of natural logarithms.
        views: the text of the views file of the live tensors.
        clean: True if the audit of these views has no error.
        kinds: for each kind of finding, the number of ``findings`` and their ``first_byte``: see :func:`summary`.
        diagnosis: the text that ``kvviz audit`` prints about the views.
        seconds: time of ``import``, ``load``, ``generate``, and of the whole process as ``total``.
        peak_bytes: the largest memory of the process in bytes.
        probe: what the probe returned, or None.
    """

    settings: EngineSettings
    flags: dict[str, Any]
    found: LayoutFound
    engine: dict[str, Any]
    replaced: tuple[dict[str, str], ...]
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]
    views: str
    clean: bool
    kinds: dict[str, dict[str, int]]
    diagnosis: str
    seconds: dict[str, float]
    peak_bytes: int
    probe: Any = None

    def __str__(self) -> str:
        lines = [
            str(self.settings),
            f"layout   {self.found}",
            f"text     {self.text!r}",
            f"margins  {', '.join(f'{margin:.2f}' for margin in self.margins)} (natural logarithms)",
            *self.diagnosis.splitlines(),
            f"seconds  {', '.join(f'{name} {value}' for name, value in self.seconds.items())}",
            f"memory   {self.peak_bytes / 1e9:.1f} GB at most",
            f"ours     {len(self.replaced)} parts of vLLM are replaced:",
            *(f"         {one['part']}: {one['ours']}" for one in self.replaced),
        ]
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold."""
        return asdict(self)


def run(
    settings: EngineSettings,
    progress: Callable[[str], None] = print,
    seconds: float = SECONDS,
    probe: Path | None = None,
) -> EngineRecord:
    """Run one engine and return its record. Make the environment and fetch the wheel if they are absent.

    Args:
        progress: called with one sentence per step.
        seconds: time limit of the engine's process, in seconds.
        probe: a Python file with a function ``probe(generate, layers)``. It is called in the engine's process, where
            it can import kvviz. ``generate()`` makes the engine answer. ``layers`` are the layers of vLLM. The
            record holds what the function returns, which must be data for JSON.

    Raises:
        EngineError: the engine cannot be fetched, installed or run.
        ModelMissingError: the language model was not fetched.
    """
    model = model_folder(progress)
    release, python = release_folder(settings.release, progress), engine_python(progress)
    progress(f"Running {settings} (about one minute on two free CPU cores) ...")
    with tempfile.TemporaryDirectory(prefix="kvviz-engine-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job = {
            "llm": {"model": str(model), **settings.llm}, "layout": settings.layout,
            "prompt": PROMPT, "tokens": settings.tokens, "writer": writer.__file__, "views": str(folder / "views.json"),
            "probe": str(probe.resolve()) if probe else None, "kvviz": str(Path(__file__).resolve().parents[1]),
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        started = time.monotonic()
        _run_process([str(python), str(INSIDE), str(folder / "job.json")], folder, release, settings, seconds)
        total = round(time.monotonic() - started, 1)
        result = json.loads((folder / "result.json").read_text())
        views = (folder / "views.json").read_text()
    return record_of(settings, result, views, total)


def record_of(settings: EngineSettings, result: dict[str, Any], views: str, total_seconds: float) -> EngineRecord:
    """Return the record of a run, from the result and the views file that the engine's process wrote."""
    given = views_file.load(views)
    audit = given.audit()
    diagnoses = diagnose(given.views, given.claims, audit)
    about = ("version", "engine_layout", "layout_names", "connector_names_layout", "connectors", "runner", "backend",
             "packages")  # fmt: skip
    return EngineRecord(
        settings=settings,
        flags={"llm": settings.llm, "environment": FLAGS},
        found=layout_of(given.views),
        engine={name: result[name] for name in about},
        replaced=tuple(result["replaced"]),
        prompt_token_ids=tuple(result["prompt_token_ids"]),
        text=result["text"],
        token_ids=tuple(result["token_ids"]),
        margins=tuple(result["margins"]),
        views=views,
        clean=audit.clean,
        kinds=summary(audit.findings),
        diagnosis=diagnosis_text.audit_text(audit, diagnoses),
        seconds={**result["seconds"], "total": total_seconds},
        peak_bytes=result["peak_bytes"],
        probe=result["probe"],
    )


def summary(findings: Sequence[Finding]) -> dict[str, dict[str, int]]:
    """Return for each kind the number of findings, and the lowest byte at which an element is wrong.

    Of a collision, this is the first byte that two views share.
    """
    found: dict[str, dict[str, int]] = {}
    for finding in findings:
        known = found.setdefault(finding.kind, {"findings": 0})
        known["findings"] += 1
        if finding.example:
            places = finding.example[:2] if finding.kind == "collision" else finding.example[:1]
            byte = max(place.start_bytes for place in places)
            known["first_byte"] = min(known.get("first_byte", byte), byte)
    return found


def _run_process(command: list[str], folder: Path, release: Path, settings: EngineSettings, seconds: float) -> None:
    """Run the engine's process. All its temporary files lie in ``folder``. If we are interrupted, end the process.

    The environment variables name the folder of the release, because vLLM starts processes of its own. vLLM's cache is
    kept for the next run. It holds facts about the classes of models, which take 20 s to collect.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_", "TRITON_"))}
    cache = engines_folder() / "vllm-cache" / settings.release
    own = {"VLLM_CACHE_ROOT": cache, "VLLM_CONFIG_ROOT": cache, "TMPDIR": folder}
    own |= {"PYTHONPATH": release, "PYTHONSAFEPATH": 1, "PYTHONNOUSERSITE": 1}
    variables = {**kept, **FLAGS, **{name: str(value) for name, value in own.items()}}
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise EngineError(
                f"{settings} did not end within {seconds:.0f} s and was ended: give a larger --seconds, or fewer "
                f"--tokens."
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status:
        said = log.read_text(errors="replace")
        kept_at = engines_folder() / "last_failure.log"
        write_whole(kept_at, said.encode())
        raise EngineFailedError(failure_sentence(settings, status, said, kept_at), cause_of(status, said))


def failure_sentence(settings: EngineSettings, status: int, said: str, log: Path) -> str:
    """Return one sentence about an engine that failed, from its exit status and from what it printed."""
    remedy = "Check that 6 GB of memory are free. " if status < 0 else ""
    tried = "" if settings.release in RELEASES else f" The bench was tried with the releases {', '.join(RELEASES)}."
    return f"{settings} cannot run here ({cause_of(status, said)}). {remedy}Its output is in {log}.{tried}"


def cause_of(status: int, said: str) -> str:
    """Return the cause of a failure: the signal, or the last error that the engine printed, with the field it names."""
    if status < 0:
        return f"ended by signal {-status}, {signal.Signals(-status).name}"
    errors = re.findall(
        r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt)\b.*(?:\n\w+(?=\n ))?(?:\n +\S.*)?)$", said, re.MULTILINE
    )
    return " ".join(errors[-1].split())[:300] if errors else f"exit status {status}"
