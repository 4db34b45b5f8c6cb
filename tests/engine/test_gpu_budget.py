"""Tests of the GPU memory limit, with a fake GPU, and in the last test with a real GPU."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvviz.cache.buffers import check_fits
from kvviz.engine import gpu_budget
from kvviz.engine.model import LanguageModel
from tests.engine.tiny import tiny_model

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU of 8 GiB. 3 GiB are free, this process has reserved 512 MiB and uses 400 MiB of them."""
    made = SimpleNamespace(fraction=1.0, free=3 * GIB, total=8 * GIB, held=512 << 20, used=400 << 20, emptied=0)

    def empty():
        made.emptied += 1

    fakes = {
        "mem_get_info": lambda device=None: (made.free, made.total),
        "set_per_process_memory_fraction": lambda fraction: setattr(made, "fraction", fraction),
        "get_per_process_memory_fraction": lambda index=None: made.fraction,
        "memory_reserved": lambda device=None: made.held,
        "memory_allocated": lambda device=None: made.used,
        "get_device_name": lambda: "NVIDIA Made Up",
        "empty_cache": empty,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(gpu_budget, "device", lambda: torch.device("cuda"))
    return made


def test_the_default_limit_is_one_gib(gpu):
    said = gpu_budget.keep()
    assert gpu.fraction == 1 / 8
    assert said == (
        "Kernels run on: NVIDIA Made Up. This process uses at most 1 of 8.0 GiB of GPU memory, plus the CUDA context."
    )


@pytest.mark.parametrize(("gib", "fraction"), [(0.5, 1 / 16), (8, 1.0), (100, 1.0)])
def test_another_limit_is_at_most_the_whole_gpu(gpu, gib, fraction):
    gpu_budget.keep(gib)
    assert gpu.fraction == fraction


def test_without_triton_a_notebook_goes_on_as_far_as_it_can(monkeypatch):
    monkeypatch.setattr(gpu_budget.importlib.util, "find_spec", lambda name: None)
    assert gpu_budget.keep().startswith("Triton is not installed, but the kernels need Triton.")
    assert gpu_budget.release() == "No GPU memory was used."


@pytest.mark.parametrize("gib", [0, -1, float("nan")])
def test_a_limit_must_be_positive(gib):
    with pytest.raises(ValueError, match=f"gib is {gib}, but it must be more than 0"):
        gpu_budget.keep(gib)


def test_without_a_gpu_nothing_is_limited(monkeypatch):
    monkeypatch.setattr(gpu_budget, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", None)
    assert "interpreter on the CPU" in gpu_budget.keep()
    assert gpu_budget.release() == "No GPU memory was used."


def test_release_frees_memory_and_returns_the_rest(gpu):
    gpu.held = 34 << 20
    assert gpu_budget.release().startswith("34 MiB of GPU memory are still in use, plus the CUDA context")
    assert gpu.emptied == 1


def test_exhausted_memory_is_one_sentence_with_the_numbers(gpu):
    gpu_budget.keep()
    with pytest.raises(MemoryError) as caught, gpu_budget.within():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
    said = str(caught.value)
    assert "uses 512 MiB and may use 1,024 MiB. Of the GPU's 8,192 MiB, 3,072 MiB are free" in said
    assert "TRITON_INTERPRET=1" in said and "\n" not in said


def test_other_errors_pass(gpu):
    with pytest.raises(RuntimeError, match="^another$"), gpu_budget.within():
        raise RuntimeError("another")


def test_a_forward_pass_that_exhausts_memory_says_so(gpu):
    def attend(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = tiny_model()
    ids = torch.zeros(1, dtype=torch.int64, device=model.device)
    with pytest.raises(MemoryError, match="GPU memory is exhausted"):
        model.forward(ids, ids, attend)


def test_a_cache_may_take_what_is_left_of_the_share(gpu):
    """Of the limit of 1,024 MiB, 400 are used. Memory that is reserved but unused can be used again."""
    gpu_budget.keep()
    check_fits(624 << 20, "cuda")
    with pytest.raises(MemoryError, match=f"cuda has {624 << 20} bytes free"):
        check_fits((624 << 20) + 1, "cuda")
    gpu.free = 100 << 20
    check_fits(212 << 20, "cuda")
    with pytest.raises(MemoryError, match=f"cuda:0 has {212 << 20} bytes free"):
        check_fits((212 << 20) + 1, "cuda:0")


def test_a_released_model_cannot_be_used():
    model: LanguageModel = tiny_model()
    model.release()
    for use in (lambda: model.device, lambda: model.forward(torch.zeros(1, dtype=torch.int64), torch.zeros(1), None)):
        with pytest.raises(
            RuntimeError,
            match=r"release\(\) has freed the weights of this model: load the model again with load_model\(\)",
        ):
            use()


ON_A_GPU = """if True:
    import torch
    from kvviz.engine import gpu_budget
    from kvviz.cache.buffers import allocate
    from kvviz.cache.spec import CacheSpec
    print(gpu_budget.keep())
    kept = torch.empty(900 << 20, dtype=torch.uint8, device="cuda")
    try:
        with gpu_budget.within():
            torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
    except MemoryError as error:
        print(error)
    try:
        allocate(CacheSpec(1, 200 << 10, 1, 1, 512, "fp8"), "NHD", "cuda")
    except MemoryError as error:
        print(error)
    del kept
    print(gpu_budget.release())
    allocate(CacheSpec(1, 200 << 10, 1, 1, 512, "fp8"), "NHD", "cuda")
"""


@pytest.mark.gpu
def test_a_real_gpu_keeps_the_budget():
    """Run in another process, because a limit cannot be removed."""
    done = subprocess.run([sys.executable, "-c", ON_A_GPU], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kept, exhausted, refused, released = done.stdout.splitlines()
    assert "at most 1 of its" in kept and "uses 900 MiB of at most 1,024 MiB" in exhausted
    assert refused.startswith("the cache needs 209715200 bytes and cuda has ")
    assert released.startswith("0 MiB of GPU memory are still in use")
