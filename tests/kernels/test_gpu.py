"""Test on a GPU that kernels run compiled there, and that they write the same bytes as the interpreter."""

import hashlib

import pytest
import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec
from kvviz.kernels import codec
from kvviz.kernels.attention import paged_attention
from kvviz.kernels.runtime import device
from kvviz.kernels.write import _write_kernel, write_kv
from tests.processes import run_python

pytestmark = pytest.mark.gpu


def digest(mode: str, layout: str, place: str) -> str:
    """Write seeded tokens into a cache, and return the sha256 of its bytes."""
    spec = CacheSpec(2, 6, 16, 4, 128, mode)
    cache = allocate(spec, layout, place)
    generator = torch.Generator().manual_seed(7)
    slots = torch.randperm(96, generator=generator)[:50].to(place)
    for layer, kv in enumerate(cache.kv_caches):
        key, value = torch.randn(2, 50, 4, 128, generator=generator).to(torch.bfloat16).to(place)
        scales = cache.carve_scales()[layer] if spec.is_per_token_head else (None, None)
        write_kv(key, value, kv, slots, mode, *scales)
    return hashlib.sha256(b"".join(s.cpu().numpy().tobytes() for s in cache.storages)).hexdigest()


def test_kernels_are_compiled_for_this_gpu():
    assert device().type == "cuda" and codec.RUNTIME == "gpu"
    digest("int8_per_token_head", "NHD", "cuda")
    assert _write_kernel.device_caches[torch.cuda.current_device()][0], "no kernel was compiled"


@pytest.mark.parametrize("layout", ["NHD", "cross-layer HND", "BLNHC"])
@pytest.mark.parametrize("mode", MODES)
def test_same_bytes_as_the_interpreter(mode, layout):
    code = f"from tests.kernels.test_gpu import digest; print(digest({mode!r}, {layout!r}, 'cpu'))"
    done = run_python(code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert digest(mode, layout, "cuda") == done.stdout.split()[-1]


def test_attention_refuses_a_cache_on_another_device():
    cache = allocate(CacheSpec(1, 1, 16, 1, 64, "bfloat16"), "NHD", "cpu")
    whole = torch.tensor([[0]], dtype=torch.int32, device="cuda")
    ends = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="kv_cache is on cpu"):
        paged_attention(torch.ones(1, 1, 64, device="cuda"), cache.kv_caches[0], whole, ends[1:], ends, "bfloat16")


def test_a_cache_on_the_cpu_is_refused():
    """The kernels are compiled for the GPU, so they cannot reach the memory of the CPU."""
    cache = allocate(CacheSpec(1, 1, 16, 1, 64, "bfloat16"), "NHD", "cpu")
    key = torch.ones(1, 1, 64)
    with pytest.raises(ValueError, match="kv_cache is on cpu, but the kernels of this process run on the GPU"):
        write_kv(key, key, cache.kv_caches[0], torch.zeros(1, dtype=torch.int64), "bfloat16")
