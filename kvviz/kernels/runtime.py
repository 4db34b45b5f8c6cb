"""Choose the runtime of the Triton kernels: an NVIDIA GPU, or Triton's interpreter on the CPU.

Triton reads ``TRITON_INTERPRET`` once, while ``import triton`` runs. The runtime must therefore be chosen before any
module imports triton. Every module of this package that needs triton calls :func:`prepare` first.

A GPU whose memory is almost full is not used. This is checked once per process, and the answer does not change later.
"""

import functools
import importlib.util
import os
import sys

import torch

INSTALL_HINT = (
    "Triton is not installed, and the kernels need it. On Linux: python -m pip install triton. "
    "On Windows and macOS there is no Triton: layouts, audit and drawing work, kernels do not."
)
RESTART_HINT = "restart the kernel (or the process) and run the first cell again"
GPU_GIB = 1.0
"""GiB of GPU memory that one notebook may use, without the CUDA context. This much must be free when it starts."""


def prepare() -> str:
    """Choose the runtime and return its name: "gpu" or "interpreter".

    The interpreter is chosen if there is no GPU, or if the GPU is full. A full GPU is reported on stderr. This function
    then sets ``TRITON_INTERPRET=1``. If ``TRITON_INTERPRET=1`` is set before, the interpreter is chosen on a machine
    with a GPU too, and the GPU is not touched.

    Raises:
        ImportError: triton is not installed.
        RuntimeError: the only GPU is not made by NVIDIA; or triton was imported before the runtime was chosen; or the
            GPU is full and ``KVVIZ_REQUIRE_GPU=1``.
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
    """Return the device on which the kernels of this process run: ``cuda`` or ``cpu``."""
    return torch.device("cuda" if prepare() == "gpu" else "cpu")


def _choose() -> str:
    if _interpreter_requested():
        return "interpreter"
    if torch.version.hip or (hasattr(torch, "xpu") and torch.xpu.is_available()):
        raise RuntimeError(
            "This torch uses a GPU that is not NVIDIA's, and the kernels support NVIDIA GPUs only. "
            "Set TRITON_INTERPRET=1 before starting Python to run everything on the CPU."
        )
    return "gpu" if torch.cuda.is_available() and not full() else "interpreter"


@functools.cache
def full() -> str:
    """Return a sentence that says why the GPU is full, and print it on stderr; return "" if the GPU can be used.

    The result is "" too if there is no GPU, or if ``TRITON_INTERPRET=1`` is set.

    Reading the free memory creates a CUDA context. The context takes about half a GiB as long as this process lives.
    Processes that start at the same time do not see the memory that the other processes will take.
    """
    shortage = _memory_shortage() if torch.cuda.is_available() and not _interpreter_requested() else ""
    if not shortage:
        return ""
    sentence = (
        f"The GPU is full: {shortage}, and a notebook needs {GPU_GIB * 1024:,.0f}. "
        f"Shut down notebooks that you have finished, and {RESTART_HINT}; "
    )
    if os.environ.get("KVVIZ_REQUIRE_GPU") == "1":
        raise RuntimeError(f"{sentence}without KVVIZ_REQUIRE_GPU=1, kernels run on the CPU.")
    sentence += "until then, kernels run in Triton's interpreter on the CPU."
    print(sentence, file=sys.stderr)
    return sentence


def _memory_shortage() -> str:
    """Return how much GPU memory is free, in words, if it is less than GPU_GIB; else ""."""
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
    except RuntimeError as error:  # OutOfMemoryError and AcceleratorError are subclasses of RuntimeError
        if "out of memory" not in str(error):
            raise
        return "it has no MiB free even for a CUDA context"
    if free_bytes >= GPU_GIB * 2**30:
        return ""
    return f"{free_bytes >> 20:,} of its {total_bytes >> 20:,} MiB are free"


def _interpreter_requested() -> bool:
    """Return True if ``TRITON_INTERPRET`` has a value that turns on the interpreter of Triton."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _check_imported_triton(runtime: str) -> None:
    """Raise a RuntimeError if triton was imported for another runtime, or if the variable has changed since."""
    import triton.language as tl

    imported = "interpreter" if type(tl.max).__name__ == "InterpretedFunction" else "gpu"
    requested = "interpreter" if _interpreter_requested() else "gpu"
    if imported != runtime or requested != runtime:
        raise RuntimeError(
            f"Triton was imported for the runtime {imported!r}, but this process needs the runtime {runtime!r} "
            f"(TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')!r}). Triton reads this variable only when it is "
            f"imported. Import kvviz.kernels before triton, and {RESTART_HINT}."
        )
