"""Limits the GPU memory of this process, so that several notebooks can share one GPU.

The CUDA context is not counted. It takes about half a GiB, belongs to the driver, and is freed when the process ends.
"""

import contextlib
import gc
import importlib.util
from collections.abc import Iterator

import torch

from kvviz.kernels.runtime import GPU_GIB, INSTALL_HINT, device

MIB, GIB = 1 << 20, 1 << 30


def keep(gib: float = GPU_GIB) -> str:
    """Limit this process to ``gib`` GiB of GPU memory besides its CUDA context. Return a line to print.

    Without a GPU, nothing is limited. The line then says where kernels run, or that Triton is missing.

    Raises:
        ValueError: ``gib`` is not positive.
    """
    if not gib > 0:
        raise ValueError(f"gib must be more than 0, but is {gib}.")
    if not _triton():
        return INSTALL_HINT
    if device().type != "cuda":
        return "Kernels run in Triton's interpreter on the CPU. They use no GPU memory."
    total_bytes = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total_bytes))
    return (
        f"Kernels run on: {torch.cuda.get_device_name()}. "
        f"This process uses at most {gib:g} of its {total_bytes / GIB:.1f} GiB, besides the CUDA context."
    )


def release() -> str:
    """Free the GPU memory that this process no longer uses. Return a line that says how much is still in use.

    A tensor stays as long as a variable refers to it. To free the weights of a model, call
    :meth:`kvviz.engine.model.LanguageModel.release` first.
    """
    gc.collect()
    if not _triton() or device().type != "cuda":
        return "No GPU memory was used."
    torch.cuda.empty_cache()
    return (
        f"{torch.cuda.memory_reserved() / MIB:.0f} MiB of GPU memory are still in use, besides the CUDA context. "
        "Shut down the kernel to free the context."
    )


@contextlib.contextmanager
def within() -> Iterator[None]:
    """Raise a short MemoryError in place of torch's error when GPU memory is exhausted.

    This function works with ``with`` and as a decorator.

    Raises:
        MemoryError: the message says how much memory this process holds, how much it may use, and how much is free.
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
        f"GPU memory is exhausted: this process uses {torch.cuda.memory_reserved() / MIB:,.0f} MiB of at most "
        f"{allowed_bytes / MIB:,.0f} MiB, and {free_bytes / MIB:,.0f} of the GPU's {total_bytes / MIB:,.0f} MiB are "
        "free. Shut down notebooks that you have finished, or use a smaller cache. To run everything on the CPU, set "
        "TRITON_INTERPRET=1 before Python starts."
    )
