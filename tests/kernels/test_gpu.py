"""On a GPU: that kernels really run compiled there, and leave the bytes that the interpreter leaves."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec
from kvviz.kernels import codec
from kvviz.kernels.attention import paged_attention
from kvviz.kernels.runtime import device
from kvviz.kernels.write import _write_kernel, write_kv

pytestmark = pytest.mark.gpu


def digest(mode: str, layout: str, place: str) -> str:
    """sha256 of a cache into which seeded tokens were written in this process."""
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
    assert device().type == "cuda" and codec.MODE == "gpu"
    digest("int8_per_token_head", "NHD", "cuda")
    assert _write_kernel.device_caches[torch.cuda.current_device()][0], "no kernel was compiled"


@pytest.mark.parametrize("layout", ["NHD", "cross-layer HND", "BLNHC"])
@pytest.mark.parametrize("mode", MODES)
def test_same_bytes_as_the_interpreter(mode, layout):
    code = f"from tests.kernels.test_gpu import digest; print(digest({mode!r}, {layout!r}, 'cpu'))"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert digest(mode, layout, "cuda") == done.stdout.split()[-1]


def test_attention_refuses_a_cache_on_another_device():
    cache = allocate(CacheSpec(1, 1, 16, 1, 64, "bfloat16"), "NHD", "cpu")
    whole = torch.tensor([[0]], dtype=torch.int32, device="cuda")
    ends = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="cuda"):
        paged_attention(torch.ones(1, 1, 64, device="cuda"), cache.kv_caches[0], whole, ends[1:], ends, "bfloat16")
