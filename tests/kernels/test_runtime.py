"""The choice between GPU and interpreter: in fresh processes where the order of imports matters."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvviz.kernels import runtime

ROOT = Path(__file__).parents[2]
NO_GPU = "import torch; torch.cuda.is_available = lambda: False\n"
A_GPU = (
    "import torch; torch.cuda.is_available = lambda: True\n"
    "torch.cuda.mem_get_info = lambda device=None: (1 << 30, 8 << 30)\n"
)
A_FULL_GPU = A_GPU + "torch.cuda.mem_get_info = lambda device=None: ((1 << 30) - 1, 8 << 30)\n"
ASK = "from kvviz.engine import mode; print(runtime.prepare())\n"
TELL = "import os; print(os.environ.get('TRITON_INTERPRET'))\n"
KERNEL = """
from kvviz.kernels.codec import MODE, INTERPRETED
from kvviz.engine import write
print(MODE, INTERPRETED.value, type(write._write_kernel).__name__)
"""


def python(source: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a program in a process of its own, in which TRITON_INTERPRET is unset unless it is given."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", source]
    return subprocess.run(command, cwd=ROOT, env={**kept, **variables}, capture_output=True, text=True, timeout=120)


def said(source: str, **variables: str) -> list[str]:
    done = python(source, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_without_a_gpu_the_interpreter_is_switched_on():
    told = said(NO_GPU + ASK + TELL + KERNEL + ASK)
    assert told == ["interpreter", "1", "interpreter", "True", "InterpretedFunction", "interpreter"]


def test_with_a_gpu_nothing_is_set():
    assert said(A_GPU + ASK + TELL + KERNEL + ASK) == ["gpu", "None", "gpu", "False", "JITFunction", "gpu"]


def test_the_variable_keeps_the_interpreter_beside_a_gpu():
    told = said(A_GPU + ASK + TELL + KERNEL, TRITON_INTERPRET="1")
    assert told == ["interpreter", "1", "interpreter", "True", "InterpretedFunction"]


def test_beside_a_full_gpu_the_interpreter_runs_and_a_sentence_says_why_once():
    done = python(A_FULL_GPU + ASK + TELL + KERNEL + ASK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["interpreter", "1", "interpreter", "True", "InterpretedFunction", "interpreter"]
    assert done.stderr.count("\n") == 1
    for words in ("The GPU is full: 1,023 of its 8,192 MiB are free", "needs 1,024.", "Shut down", "on the CPU."):
        assert words in done.stderr


NO_CONTEXT = """
def fails(device=None):
    raise torch.{error}("CUDA error: {text}")
torch.cuda.mem_get_info = fails
"""


@pytest.mark.parametrize("error", ["AcceleratorError", "OutOfMemoryError"])
def test_a_gpu_without_room_for_a_context_is_full_too(error):
    done = python(A_GPU + NO_CONTEXT.format(error=error, text="out of memory") + ASK)
    assert done.stdout.split() == ["interpreter"] and "no MiB free even for a CUDA context" in done.stderr


def test_a_gpu_that_is_broken_is_not_taken_for_full():
    done = python(A_GPU + NO_CONTEXT.format(error="AcceleratorError", text="unspecified launch failure") + ASK)
    assert done.returncode == 1 and done.stderr.strip().endswith("unspecified launch failure")


def test_a_gpu_that_is_filled_by_this_process_is_kept():
    filled = "torch.cuda.mem_get_info = lambda device=None: (0, 8 << 30)\n"
    assert said(A_GPU + ASK + filled + ASK) == ["gpu", "gpu"]


def test_a_gpu_that_is_required_and_full_is_an_error():
    done = python(A_FULL_GPU + ASK, KVVIZ_REQUIRE_GPU="1")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.strip().splitlines()[-1].startswith("RuntimeError: The GPU is full: 1,023 of its 8,192 MiB")


def test_the_interpreter_that_was_asked_for_leaves_the_gpu_alone():
    done = python(A_GPU + NO_CONTEXT.format(error="AcceleratorError", text="touched") + ASK, TRITON_INTERPRET="1")
    assert (done.stdout.split(), done.stderr) == (["interpreter"], "")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (NO_GPU + "import triton\n" + ASK, ["for the gpu", "needs the interpreter", "TRITON_INTERPRET=None"]),
        (
            NO_GPU + "import triton, os; os.environ['TRITON_INTERPRET'] = '1'\n" + ASK,
            ["for the gpu", "needs the interpreter", "TRITON_INTERPRET='1'", "too late"],
        ),
        (
            A_GPU + "import triton, os; os.environ['TRITON_INTERPRET'] = '1'\n" + ASK,
            ["for the gpu", "needs the interpreter", "TRITON_INTERPRET='1'", "too late"],
        ),
        (
            A_GPU + "import os; os.environ['TRITON_INTERPRET'] = '1'\nimport triton\n"
            "del os.environ['TRITON_INTERPRET']\n" + ASK,
            ["for the interpreter", "needs the gpu", "TRITON_INTERPRET=None"],
        ),
        (
            NO_GPU + ASK + "import triton, os; del os.environ['TRITON_INTERPRET']\n" + ASK,
            ["for the interpreter", "needs the interpreter", "TRITON_INTERPRET=None"],
        ),
    ],
    ids=["imported first", "set after the import", "set beside a GPU", "unset again", "unset behind our back"],
)  # fmt: skip
def test_a_triton_that_was_imported_for_something_else_asks_for_a_restart(source, words):
    done = python(source)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("RuntimeError: Triton was imported for the")
    assert [word for word in [*words, "restart the kernel"] if word not in last] == []


def test_asking_twice_gives_the_same_answer():
    assert runtime.prepare() == runtime.prepare()
    assert runtime.device().type == {"gpu": "cuda", "interpreter": "cpu"}[runtime.prepare()]


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "on", "yes", "Y"])
def test_every_yes_of_triton_is_a_yes(monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert runtime._wanted() == "interpreter"


@pytest.mark.parametrize("value", ["0", "false", "off", "no", ""])
def test_any_other_value_leaves_the_gpu(monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "full", lambda: "")
    assert runtime._wanted() == "gpu"


def test_an_absent_triton_is_a_sentence(monkeypatch):
    true_find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else true_find(name))
    with pytest.raises(ImportError) as caught:
        runtime.prepare()
    assert "Triton is not installed" in str(caught.value) and "pip install triton" in str(caught.value)
    assert "Windows and macOS" in str(caught.value)


def test_an_absent_triton_stops_the_engine_and_not_the_memory():
    block = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'triton': raise ModuleNotFoundError(name)\n"
        "import importlib.util as util\n"
        "true = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'triton' else true(name, *more)\n"
        "import kvviz.cache.buffers as buffers\n"
        "from kvviz.cache.spec import CacheSpec\n"
        "sys.meta_path.insert(0, Block())\n"
        "print(len(buffers.allocate(CacheSpec(1, 1, 1, 1, 8), 'NHD').kv_caches), flush=True)\n"
    )
    done = python(block + "import kvviz.kernels.write\n")
    assert done.returncode == 1 and done.stdout.split() == ["1"]
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError: Triton is not installed")


@pytest.mark.parametrize("kind", ["AMD", "Intel"])
@pytest.mark.parametrize("asked", [False, True])
def test_a_gpu_of_another_maker_is_refused_unless_the_interpreter_is_asked_for(monkeypatch, kind, asked):
    if kind == "AMD":
        monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    else:
        monkeypatch.setattr(torch, "xpu", SimpleNamespace(is_available=lambda: True))
    monkeypatch.setenv("TRITON_INTERPRET", "1" if asked else "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if asked:
        assert runtime._wanted() == "interpreter"
    else:
        with pytest.raises(RuntimeError, match="not NVIDIA's.*Set TRITON_INTERPRET=1 before starting Python"):
            runtime.prepare()
