"""Records how a small random Gemma-4 model behaves in vLLM 0.26.0, layer by layer, for notebook 13.

The command is ``python benchmarks/open_case.py``. It writes ``notebooks/recorded_open_case.json``. It needs Linux, two
CPU cores and about 30 minutes. The engine runs in the environment of ``kvviz engine``, with vLLM's Triton kernels in
Triton's interpreter: see docs/engine.md.

Two shapes of the model run, each with a float32 cache (the control) and with ``int8_per_token_head``:

- ``shared``: as many KV heads in full layers as in sliding layers. The last two layers read caches of earlier layers.
- ``unequal``: four KV heads in sliding layers and one in full layers. No layer shares a cache.

Then the engine ``together`` serves six prompts of equal length at once, so that their windows free blocks in one step.
The engine ``repaired`` does the same with one changed line in the attention kernel.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from kvviz.audit import writer
from kvviz.bench import engine_packages, stand_ins
from kvviz.bench.engine_run import FLAGS
from kvviz.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "notebooks" / "recorded_open_case.json"
INSIDE = Path(__file__).with_name("open_case_inside.py")
RELEASE = "0.26.0"
OLDER = ("transformers==5.8.1", "tokenizers==0.22.2", "huggingface-hub==1.33.0")
"""Newer transformers refuse a head size per layer for this release."""

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW, BLOCK, CHUNK = 32, 16, 32
"""The sliding window, the block, and the largest number of tokens of one step, in tokens."""

COMMON = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": 2048,
    "vocab_size_per_layer_input": 2048, "hidden_size": 256, "hidden_size_per_layer_input": 0, "intermediate_size": 512,
    "num_attention_heads": 4, "head_dim": 256, "global_head_dim": 512, "sliding_window": WINDOW,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "dtype": "float32", "bos_token_id": 2,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SHAPES = {
    "shared": {
        **COMMON, "num_key_value_heads": 2, "num_hidden_layers": 8, "num_kv_shared_layers": 2,
        "layer_types": [*[SLIDING] * 5, FULL, SLIDING, FULL],
    },
    "unequal": {
        **COMMON, "num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "num_hidden_layers": 6, "num_kv_shared_layers": 0, "layer_types": [*[SLIDING] * 5, FULL],
    },
}  # fmt: skip


def runs_of(shape: str, dtype: str) -> list[dict]:
    """Return what one engine serves, in order.

    ``cold`` says what happens before a run: "no" nothing, "reset" the scale views are forgotten, as after a start.
    The first run of an engine is cold without help.
    """
    lengths = range(16, 49) if shape == "shared" else range(16, 32)
    runs = [{"lengths": [20], "new": 3, "cold": "no"}]
    runs += [{"lengths": [length], "new": 2, "cold": "no"} for length in lengths]
    runs += [{"lengths": [46], "new": 6, "cold": "no", "plant": True}]
    if dtype != "auto":
        runs += [{"lengths": [length], "new": 2, "cold": "reset"} for length in range(16, 32)]
        runs += [{"lengths": [40] * 3, "new": 12, "cold": "no"}]
    return runs


TOGETHER = [{"lengths": [20], "new": 3, "cold": "no"}]
TOGETHER += [{"lengths": [40] * 6, "new": 20, "cold": "no", "seed": seed} for seed in range(2)]

ENGINES = {
    f"{shape}-{dtype}": (shape, dtype, CHUNK, 4, runs_of(shape, dtype))
    for shape in SHAPES
    for dtype in ("auto", "int8_per_token_head")
}
ENGINES["together-int8_per_token_head"] = ("shared", "int8_per_token_head", 256, 6, TOGETHER)
ENGINES["repaired-int8_per_token_head"] = ENGINES["together-int8_per_token_head"]
"""Name of an engine: shape of the model, type of the cache, tokens of one step, requests at once, what it serves."""


REPAIR = (
    "P_v = (P * v_token_head_scales[None, :]).to(V.dtype)",
    "P_v = tl.where(P > 0.0, P * v_token_head_scales[None, :], 0.0).to(V.dtype)",
)
"""A line of the attention kernel, and the line of the engine ``repaired``: no scale counts without weight."""


def arguments_of(model: Path, dtype: str, chunk: int, requests: int) -> dict:
    """Return the arguments of vLLM's class LLM: those of the report that matter here."""
    return {
        "model": str(model), "dtype": "float32", "kv_cache_dtype": dtype, "block_size": BLOCK, "enforce_eager": True,
        "enable_prefix_caching": False, "enable_chunked_prefill": True, "kv_sharing_fast_prefill": True,
        "max_model_len": 128, "max_num_seqs": requests, "max_num_batched_tokens": chunk, "num_gpu_blocks_override": 256,
        "compilation_config": {"custom_ops": ["none"], "mode": 0}, "load_format": "dummy", "skip_tokenizer_init": True,
        "seed": 0,
    }  # fmt: skip


def older_packages() -> Path:
    """Return the folder of the older packages. Fetch them if the folder is absent."""
    target = engine_packages.engines_folder() / f"packages-{OLDER[0].replace('==', '-')}"
    if not target.is_dir():
        with engine_packages.made_whole(target, 200 << 20) as part:
            wheels = part.with_name("wheels")
            command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), *OLDER]
            subprocess.run([sys.executable, "-m", "pip", *command], check=True)
            for wheel in wheels.glob("*.whl"):
                with zipfile.ZipFile(wheel) as packed:
                    packed.extractall(part)
    return target


def run(name: str) -> dict:
    """Run one engine and return its record."""
    shape, dtype, chunk, requests, runs = ENGINES[name]
    python = engine_packages.engine_python()
    path = [older_packages(), engine_packages.release_folder(RELEASE)]
    with tempfile.TemporaryDirectory(prefix="kvviz-open-case-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(SHAPES[shape]))
        job = {
            "llm": arguments_of(folder / "model", dtype, chunk, requests), "runs": runs,
            "repair": REPAIR if name.startswith("repaired") else None, "stand_ins": stand_ins.__file__,
            "writer": writer.__file__, "views": str(folder / "views.json"),
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_", "TRITON_"))
        }
        own = {"VLLM_CACHE_ROOT": folder, "VLLM_CONFIG_ROOT": folder, "TMPDIR": folder, "PYTHONSAFEPATH": 1}
        own |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONNOUSERSITE": 1}
        variables = {**kept, **FLAGS, **{name: str(value) for name, value in own.items()}}
        started = time.monotonic()
        subprocess.run([str(python), str(INSIDE), str(folder / "job.json")], cwd=folder, env=variables, check=True)
        found = json.loads((folder / "result.json").read_text())
        views = json.loads((folder / "views.json").read_text())
    del job["llm"]["model"]
    for one in found["runs"]:
        if not (one["summary"]["wrong_read"] or one.get("plant")):
            del one["layers"]  # all is right in every layer
        if one["cold"] == "reset":
            del one["fills"]  # as in the first run
    return {"shape": shape, "dtype": dtype, "arguments": job["llm"], "config": SHAPES[shape], **found, "views": views,
            "seconds": round(time.monotonic() - started, 1)}  # fmt: skip


def main() -> None:
    """Run the engines, and write the record after each one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RECORD, help="the file to write (default: %(default)s)")
    parser.add_argument("--again", nargs="*", default=[], help="for example shared-auto: run this engine again")
    given = parser.parse_args()
    record = json.loads(given.output.read_text()) if given.output.exists() else {"engines": {}}
    record.update(command="python benchmarks/open_case.py", release=RELEASE, window=WINDOW, block=BLOCK, chunk=CHUNK)
    for name in ENGINES:
        if name in given.again or name not in record["engines"]:
            print(f"Running {name} ...", flush=True)
            record["engines"][name] = run(name)
            write_whole(given.output, json.dumps(record, separators=(",", ":")).encode())


if __name__ == "__main__":
    main()
