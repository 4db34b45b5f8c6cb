"""Test how the runtime (GPU or interpreter) is chosen. If the order of imports matters, a test starts a new process."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from kvviz.kernels import runtime
from tests.processes import run_python

NO_GPU = "import torch; torch.cuda.is_available = lambda: False\n"
A_GPU = (
    "import torch; torch.cuda.is_available = lambda: True\n"
    "torch.cuda.mem_get_info = lambda device=None: (1 << 30, 8 << 30)\n"
)
A_FULL_GPU = A_GPU + "torch.cuda.mem_get_info = lambda device=None: ((1 << 30) - 1, 8 << 30)\n"
PREPARE = "from kvviz.kernels import runtime; print(runtime.prepare())\n"
VARIABLE = "import os; print(os.environ.get('TRITON_INTERPRET'))\n"
KERNEL = """
from kvviz.kernels.codec import RUNTIME, INTERPRETED
from kvviz.kernels import write
print(RUNTIME, INTERPRETED.value, type(write._write_kernel).__name__)
"""


def printed(source: str, **variables: str) -> list[str]:
    done = run_python(source, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_without_a_gpu_the_interpreter_is_switched_on():
    words = printed(NO_GPU + PREPARE + VARIABLE + KERNEL + PREPARE)
    assert words == ["interpreter", "1", "interpreter", "True", "InterpretedFunction", "interpreter"]


def test_with_a_gpu_nothing_is_set():
    assert printed(A_GPU + PREPARE + VARIABLE + KERNEL + PREPARE) == [
        "gpu",
        "None",
        "gpu",
        "False",
        "JITFunction",
        "gpu",
    ]


def test_the_variable_chooses_the_interpreter_on_a_machine_with_a_gpu():
    words = printed(A_GPU + PREPARE + VARIABLE + KERNEL, TRITON_INTERPRET="1")
    assert words == ["interpreter", "1", "interpreter", "True", "InterpretedFunction"]


def test_with_a_full_gpu_the_interpreter_is_chosen_and_one_line_says_why():
    done = run_python(A_FULL_GPU + PREPARE + VARIABLE + KERNEL + PREPARE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["interpreter", "1", "interpreter", "True", "InterpretedFunction", "interpreter"]
    assert done.stderr.count("\n") == 1
    for words in ("The GPU is full: 1,023 of 8,192 MiB are free", "needs 1,024 MiB.", "shut down", "on the CPU."):
        assert words in done.stderr


NO_CONTEXT = """
def fails(device=None):
    raise torch.{error}("CUDA error: {text}")
torch.cuda.mem_get_info = fails
"""


@pytest.mark.parametrize("error", ["AcceleratorError", "OutOfMemoryError"])
def test_a_gpu_without_room_for_a_context_is_full_too(error):
    done = run_python(A_GPU + NO_CONTEXT.format(error=error, text="out of memory") + PREPARE)
    assert done.stdout.split() == ["interpreter"] and "no memory free even for a CUDA context" in done.stderr


def test_an_error_of_a_broken_gpu_is_raised():
    done = run_python(A_GPU + NO_CONTEXT.format(error="AcceleratorError", text="unspecified launch failure") + PREPARE)
    assert done.returncode == 1 and done.stderr.strip().endswith("unspecified launch failure")


def test_a_gpu_that_this_process_fills_stays_chosen():
    filled = "torch.cuda.mem_get_info = lambda device=None: (0, 8 << 30)\n"
    assert printed(A_GPU + PREPARE + filled + PREPARE) == ["gpu", "gpu"]


def test_a_gpu_that_is_required_and_full_is_an_error():
    done = run_python(A_FULL_GPU + PREPARE, KVVIZ_REQUIRE_GPU="1")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.strip().splitlines()[-1].startswith("RuntimeError: The GPU is full: 1,023 of 8,192 MiB")


def test_a_requested_interpreter_does_not_touch_the_gpu():
    done = run_python(
        A_GPU + NO_CONTEXT.format(error="AcceleratorError", text="touched") + PREPARE, TRITON_INTERPRET="1"
    )
    assert (done.stdout.split(), done.stderr) == (["interpreter"], "")


SET = "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
UNSET = "import os; del os.environ['TRITON_INTERPRET']\n"


@pytest.mark.parametrize(
    ("source", "imported", "needed", "value"),
    [
        (NO_GPU + "import triton\n" + PREPARE, "gpu", "interpreter", "None"),
        (NO_GPU + "import triton\n" + SET + PREPARE, "gpu", "interpreter", "'1'"),
        (A_GPU + "import triton\n" + SET + PREPARE, "gpu", "interpreter", "'1'"),
        (A_GPU + SET + "import triton\n" + UNSET + PREPARE, "interpreter", "gpu", "None"),
    ],
    ids=["imported first", "set after the import", "set beside a GPU", "unset after the import"],
)
def test_a_triton_imported_for_another_runtime_asks_for_a_restart(source, imported, needed, value):
    done = run_python(source)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(
        f"RuntimeError: Triton was imported for the runtime '{imported}', but this process needs the runtime "
        f"'{needed}' (TRITON_INTERPRET={value}). Triton reads this variable only when it is imported."
    )
    assert last.endswith("Restart the notebook (or the Python process), and import kvviz.kernels before triton.")


def test_a_variable_that_is_unset_after_prepare_asks_for_a_restart():
    done = run_python(NO_GPU + PREPARE + "import triton\n" + UNSET + PREPARE)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(
        "RuntimeError: This process uses the runtime 'interpreter', but TRITON_INTERPRET was changed"
    )
    assert "changed to None. Restart the notebook" in last


def test_a_second_call_returns_the_same_runtime():
    assert runtime.prepare() == runtime.prepare()
    assert runtime.device().type == {"gpu": "cuda", "interpreter": "cpu"}[runtime.prepare()]


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "on", "yes", "Y"])
def test_every_value_that_triton_takes_for_yes(monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert runtime._choose() == "interpreter"


@pytest.mark.parametrize("value", ["0", "false", "off", "no", ""])
def test_any_other_value_leaves_the_gpu(monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "full", lambda: "")
    assert runtime._choose() == "gpu"


def test_a_missing_triton_raises_with_instructions(monkeypatch):
    true_find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else true_find(name))
    with pytest.raises(ImportError) as caught:
        runtime.prepare()
    assert "Triton is not installed" in str(caught.value) and "pip install triton" in str(caught.value)
    assert "Windows and macOS" in str(caught.value)


def test_without_triton_the_cache_works_and_the_kernels_raise():
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
    done = run_python(block + "import kvviz.kernels.write\n")
    assert done.returncode == 1 and done.stdout.split() == ["1"]
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError: Triton is not installed")


@pytest.mark.parametrize("kind", ["AMD", "Intel"])
@pytest.mark.parametrize("requested", [False, True])
def test_a_gpu_that_is_not_nvidias_is_refused_unless_the_interpreter_is_requested(monkeypatch, kind, requested):
    if kind == "AMD":
        monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    else:
        monkeypatch.setattr(torch, "xpu", SimpleNamespace(is_available=lambda: True))
    monkeypatch.setenv("TRITON_INTERPRET", "1" if requested else "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if requested:
        assert runtime._choose() == "interpreter"
    else:
        with pytest.raises(RuntimeError, match="is not an NVIDIA GPU.* set TRITON_INTERPRET=1 before starting Python"):
            runtime.prepare()


def test_processes_do_not_inherit_the_variables_of_the_caller(monkeypatch):
    for name, value in (("KVVIZ_REQUIRE_GPU", "1"), ("TRITON_INTERPRET", "1"), ("KVVIZ_CACHE", "/nonexistent")):
        monkeypatch.setenv(name, value)
    source = "import os; print(*(name for name in os.environ if name.startswith(('KVVIZ_', 'TRITON_'))))"
    assert printed(source) == [] and printed(source, TRITON_DEBUG="0") == ["TRITON_DEBUG"]
    assert printed(A_FULL_GPU + PREPARE) == ["interpreter"]
