"""The parts of vLLM that kvviz replaces, so that a CPU can run the engine's cache and kernels. Runs inside the engine.

Each stand-in says what it replaces and why. :func:`place_early` and :func:`place` put the stand-ins in place, and
return the list of those that were really needed. The record of a run holds this list.
"""

import os
import types

TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"


def replaced(part, ours, why):
    """Return the entry of one replaced part for the record."""
    return {"part": part, "ours": ours, "why": why}


def place_early():
    """Place what must be there before vLLM is imported. Return the list of replaced parts."""
    import triton.backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
    return [
        replaced("Triton's driver check", "an entry named cpu that says it is active",
                 "vLLM's CPU build uses Triton only if it finds such an entry"),
        replaced("Triton's compiler", "Triton's own interpreter (TRITON_INTERPRET=1)",
                 "Triton has no compiler for CPUs; the interpreter runs the engine's kernels with numpy"),
    ]  # fmt: skip


def place():
    """Place all other stand-ins after vLLM is imported. Return the list of replaced parts."""
    return [*_platform(), *_helpers(), *_attention(), *_sampler()]


def _platform():
    import torch
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *given, **named: TRITON)
    CpuPlatform.num_compute_units = classmethod(lambda cls, *given: 8)
    CpuPlatform.fp8_dtype = classmethod(lambda cls: torch.float8_e4m3fn)
    CpuPlatform.has_device_capability = classmethod(lambda cls, *given, **named: True)
    torch.cuda.get_device_capability = lambda *given: (9, 0)
    return [
        replaced("choice of the attention backend", "always TRITON_ATTN",
                 "the CPU platform would choose CPU_ATTN, which has no scales in the cache"),
        replaced("facts about the device", "8 compute units, capability 9.0, fp8 is e4m3fn",
                 "TRITON_ATTN asks for them, and the CPU platform has no answer"),
    ]  # fmt: skip


def _nothing(*given, **named):
    """Do nothing: the memory of the CPU needs no set-up here."""


def slot_mapping(query_start, positions, block_table, slots, block_size):
    """Compute the slot of each token: block id times block size, plus the token's place in the block.

    Args:
        query_start: int tensor of shape (R + 1,): request r has the tokens from ``query_start[r]`` on.
        positions: int tensor of shape (T,): the position of each token in its request.
        block_table: int tensor of shape (R, M): the block ids of each request.
        slots: int tensor of at least T elements, which is written.
    """
    for request in range(len(query_start) - 1):
        start, stop = int(query_start[request]), int(query_start[request + 1])
        place = positions[start:stop].long()
        slots[start:stop] = block_table[request][place // block_size].long() * block_size + place % block_size


def gated(function):
    """Return the C++ helper ``(out, x)`` that writes ``function(left half of x) * right half of x`` to ``out``."""

    def helper(out, x):
        half = x.shape[-1] // 2
        out.copy_(function(x[..., :half]) * x[..., half:])

    return helper


def _helpers():
    """Replace the C++ helpers that are missing. All are there if the wheel was built for the installed torch."""
    import torch
    import vllm._custom_ops  # noqa: F401  This import loads the C++ part, if it can be loaded.
    from torch.nn.functional import gelu, silu

    wanted = {
        "init_cpu_memory_env": _nothing,
        "compute_slot_mapping_kernel_impl": slot_mapping,
        "silu_and_mul": gated(silu),
        "gelu_and_mul": gated(gelu),
        "gelu_tanh_and_mul": gated(lambda x: gelu(x, approximate="tanh")),
    }
    missing = [name for name in wanted if not hasattr(torch.ops._C, name)]
    for name in missing:
        setattr(torch.ops._C, name, wanted[name])
    why = f"the wheel's C++ part does not load with torch {torch.__version__}"
    return [replaced(f"C++ helper {name}", "the same in Python", why) for name in missing]


def _attention():
    import vllm.v1.attention.backends.triton_attn as backend

    kernel = backend.unified_attention

    def in_one_pass(*given, **named):
        named["seq_threshold_3D"] = None
        return kernel(*given, **named)

    backend.unified_attention = in_one_pass
    return [replaced("choice between the kernels of unified_attention", "always the kernel with one pass",
                     "one pass needs fewer launches; both kernels read the cache in the same way")]  # fmt: skip


def _sampler():
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    if not hasattr(sampler, "apply_top_k_top_p_triton"):
        return []
    sampler.apply_top_k_top_p_triton = sampler.apply_top_k_top_p_pytorch
    return [replaced("the sampler's top-k kernel", "vLLM's own function in PyTorch",
                     "the kernel does not run in Triton's interpreter")]  # fmt: skip


def choose_layout(layout, has_connector):
    """Ask vLLM for the layout NHD or HND. Return True if a connector names the layout itself, as from vLLM 0.29 on."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    os.environ["KVVIZ_LAYOUT"] = layout
    named = has_connector and not hasattr(KVConnectorBase_V1, "prefer_cross_layer_blocks")
    if not named:  # the variable would win over the connector
        os.environ["VLLM_KV_CACHE_LAYOUT"] = layout
    return named
