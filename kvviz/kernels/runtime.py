"""Choose the runtime of the Triton kernels, which is an NVIDIA GPU, or Triton's interpreter on the CPU.

Triton reads ``TRITON_INTERPRET`` once, when triton is imported. So the runtime must be chosen before that. Every module
of this package that imports triton calls :func:`prepare` first.

If the memory of the GPU is almost full, the GPU is not used. This is checked only once per process.
"""

import functools
import importlib.util
import os
import sys

import torch

INSTALL_HINT = (
    "Triton is not installed, but the kernels need Triton. On Linux, run: python -m pip install triton. "
    "For Windows and macOS, Triton is not available. Layouts, audit and drawing work there, but kernels do not."
)
GPU_GIB = 1.0
"""The most GPU memory that one notebook uses, in GiB. The CUDA context is not counted. To start a notebook on the GPU,
this much memory must be free."""


def prepare() -> str:
    """Choose the runtime and return its name, "gpu" or "interpreter".

    If ``TRITON_INTERPRET=1`` is set, this function returns "interpreter" without using the GPU. It also returns
    "interpreter" if there is no GPU, or if the GPU is full. Then it sets ``TRITON_INTERPRET=1`` itself. If the GPU is
    full, a sentence on stderr says so.

    Raises:
        ImportError: triton is not installed.
        RuntimeError: the GPU is not made by NVIDIA. Or triton was imported earlier for another runtime. Or the GPU is
            full and ``KVVIZ_REQUIRE_GPU=1`` is set.
    """
    if importlib.util.find_spec("triton") is None:
        raise ImportError(INSTALL_HINT)
    runtime = _choose()
    if "triton" in sys.modules:
        _check_imported_triton(runtime)
    elif runtime == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    return runtime


def device() -> torch.device:
    """Return the device on which the kernels of this process run. It is ``cuda`` or ``cpu``."""
    return torch.device("cuda" if prepare() == "gpu" else "cpu")


def _choose() -> str:
    if _interpreter_requested():
        return "interpreter"
    if torch.version.hip or (hasattr(torch, "xpu") and torch.xpu.is_available()):
        raise RuntimeError(
            "The GPU of this torch is not an NVIDIA GPU, but the kernels support only NVIDIA GPUs. "
            "To run the kernels on the CPU, set TRITON_INTERPRET=1 before starting Python."
        )
    return "gpu" if torch.cuda.is_available() and not full() else "interpreter"


@functools.cache
def full() -> str:
    """If the GPU is full, print a text that says why on stderr, and return this text. Otherwise return "".

    Without a GPU the result is "". If ``TRITON_INTERPRET=1`` is set, the result is "" too.

    To read the free memory, this function creates a CUDA context. The context uses about half a GiB until the process
    ends. If several processes start at the same time, they can all find the same memory free.
    """
    shortage = _memory_shortage() if torch.cuda.is_available() and not _interpreter_requested() else ""
    if not shortage:
        return ""
    sentence = (
        f"The GPU is full: {shortage}, but a notebook needs {GPU_GIB * 1024:,.0f} MiB. To use the GPU, shut down "
        "notebooks that you do not need, and restart this notebook (or the Python process). "
    )
    if os.environ.get("KVVIZ_REQUIRE_GPU") == "1":
        raise RuntimeError(f"{sentence}To use the CPU instead, unset KVVIZ_REQUIRE_GPU.")
    sentence += "Until then, the kernels of this process run in Triton's interpreter on the CPU."
    print(sentence, file=sys.stderr)
    return sentence


def _memory_shortage() -> str:
    """If less than GPU_GIB of GPU memory is free, say in words how much is free. Otherwise return ""."""
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
    except RuntimeError as error:  # OutOfMemoryError and AcceleratorError are subclasses of RuntimeError
        if "out of memory" not in str(error):
            raise
        return "there is no memory free even for a CUDA context"
    if free_bytes >= GPU_GIB * 2**30:
        return ""
    return f"{free_bytes >> 20:,} of {total_bytes >> 20:,} MiB are free"


def _interpreter_requested() -> bool:
    """Return True if ``TRITON_INTERPRET`` has a value that turns on the interpreter of Triton."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _check_imported_triton(runtime: str) -> None:
    """Raise RuntimeError if triton was imported for another runtime, or if ``TRITON_INTERPRET`` was changed since."""
    import triton.language as tl

    imported = "interpreter" if type(tl.max).__name__ == "InterpretedFunction" else "gpu"
    requested = "interpreter" if _interpreter_requested() else "gpu"
    if imported != runtime:
        raise RuntimeError(
            f"Triton was imported for the runtime {imported!r}, but this process needs the runtime {runtime!r} "
            f"(TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')!r}). Triton reads this variable only when it is "
            "imported. Restart the notebook (or the Python process), and import kvviz.kernels before triton."
        )
    if requested != runtime:
        raise RuntimeError(
            f"This process uses the runtime {runtime!r}, but TRITON_INTERPRET was changed to "
            f"{os.environ.get('TRITON_INTERPRET')!r}. Restart the notebook (or the Python process), and do not change "
            "TRITON_INTERPRET after the start."
        )
