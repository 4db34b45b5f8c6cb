"""Limits the GPU memory of this process, so that several notebooks can share one GPU.

The CUDA context is not counted. The driver uses about half a GiB for the context until the process ends.
"""

import contextlib
import gc
import importlib.util
from collections.abc import Iterator

import torch

from kvviz.kernels.runtime import GPU_GIB, INSTALL_HINT, device

MIB, GIB = 1 << 20, 1 << 30


def keep(gib: float = GPU_GIB) -> str:
    """Limit the GPU memory of this process to ``gib`` GiB, and return a line to print.

    The limit does not count the CUDA context. Without a GPU, nothing is limited. The line then says that kernels run on
    the CPU, or that Triton is missing.

    Raises:
        ValueError: ``gib`` is not more than 0.
    """
    if not gib > 0:
        raise ValueError(f"gib is {gib}, but it must be more than 0.")
    if not _triton():
        return INSTALL_HINT
    if device().type != "cuda":
        return "Kernels run in Triton's interpreter on the CPU. They use no GPU memory."
    total_bytes = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total_bytes))
    return (
        f"Kernels run on: {torch.cuda.get_device_name()}. "
        f"This process uses at most {gib:g} of {total_bytes / GIB:.1f} GiB of GPU memory, plus the CUDA context."
    )


def release() -> str:
    """Free the GPU memory that no tensor uses any more. Return a line that says how much is still in use.

    A tensor keeps its memory while a variable refers to the tensor. To free the weights of a model, call
    :meth:`kvviz.engine.model.LanguageModel.release` first.
    """
    gc.collect()
    if not _triton() or device().type != "cuda":
        return "No GPU memory was used."
    torch.cuda.empty_cache()
    return (
        f"{torch.cuda.memory_reserved() / MIB:.0f} MiB of GPU memory are still in use, plus the CUDA context. "
        "To free the context, shut down this notebook (or end the Python process)."
    )


@contextlib.contextmanager
def within() -> Iterator[None]:
    """Context manager and decorator. If torch has too little GPU memory, raise a short MemoryError instead.

    Raises:
        MemoryError: GPU memory is exhausted. The message says how much this process uses, how much it may use, and how
            much is free.
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
        f"GPU memory is exhausted. This process uses {torch.cuda.memory_reserved() / MIB:,.0f} MiB and may use "
        f"{allowed_bytes / MIB:,.0f} MiB. Of the GPU's {total_bytes / MIB:,.0f} MiB, {free_bytes / MIB:,.0f} MiB are "
        "free. Shut down notebooks that you do not need, or use a smaller cache. To run the kernels on the CPU, set "
        "TRITON_INTERPRET=1 before starting Python."
    )
