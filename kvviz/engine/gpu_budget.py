"""GPU memory in a room: how much this process may take, and how it gives it back.

A CUDA context (about half a GiB, the driver's) is not counted: it goes with the process, and only then.
"""

import contextlib
import gc
import importlib.util
from collections.abc import Iterator

import torch

from kvviz.kernels.runtime import GPU_GIB, INSTALL_HINT, device

MIB, GIB = 1 << 20, 1 << 30


def keep(gib: float = GPU_GIB) -> str:
    """Let this process take at most ``gib`` GiB of GPU memory beside its context, and say so in a line to print.

    Without a GPU nothing is limited, and the line says where kernels run, or that there is no Triton to run them.
    Whoever never calls this is not limited.

    Raises:
        ValueError: not a positive number of GiB.
    """
    if not gib > 0:
        raise ValueError(f"a budget must be more than 0 GiB, and is {gib}.")
    if not _triton():
        return INSTALL_HINT
    if device().type != "cuda":
        return "Kernels run in Triton's interpreter on the CPU, and take no GPU memory."
    total_bytes = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total_bytes))
    return (
        f"Kernels run on: {torch.cuda.get_device_name()}. "
        f"This process takes at most {gib:g} of its {total_bytes / GIB:.1f} GiB, beside the CUDA context."
    )


def release() -> str:
    """Give GPU memory that nobody uses any more back to the others, and say in a line what is still held.

    Tensors that a name still refers to stay: see :meth:`kvviz.engine.model.LanguageModel.release`.
    """
    gc.collect()
    if not _triton() or device().type != "cuda":
        return "No GPU memory was taken."
    torch.cuda.empty_cache()
    return (
        f"{torch.cuda.memory_reserved() / MIB:.0f} MiB of GPU memory are still held beside the CUDA context, "
        "which goes when the kernel is shut down."
    )


@contextlib.contextmanager
def within() -> Iterator[None]:
    """Turn torch's report of exhausted GPU memory into a sentence. Usable with ``with`` and as a decorator.

    Raises:
        MemoryError: with what is held, allowed and free.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(_exhausted()) from error


def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _exhausted() -> str:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    allowed_bytes = torch.cuda.get_per_process_memory_fraction() * total_bytes
    return (
        f"GPU memory is exhausted: this process holds {torch.cuda.memory_reserved() / MIB:,.0f} MiB of at most "
        f"{allowed_bytes / MIB:,.0f} MiB, and {free_bytes / MIB:,.0f} of the GPU's {total_bytes / MIB:,.0f} MiB are "
        "free: shut down notebooks that you have finished, take a smaller cache, or set TRITON_INTERPRET=1 before "
        "Python starts to run everything on the CPU."
    )
