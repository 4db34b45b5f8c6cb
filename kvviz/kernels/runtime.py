"""Where Triton runs: on an NVIDIA GPU, or in Triton's interpreter on the CPU.

Triton reads ``TRITON_INTERPRET`` while ``import triton`` runs, so the choice must fall before anything
imports triton; every module here that needs triton calls :func:`prepare` first. A GPU on which other processes have
left too little memory counts as none; that is judged once a process, and stays.
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
"""What a notebook may take of a GPU beside the CUDA context, and what must be free there when it starts."""


def prepare() -> str:
    """Choose how kernels run, set ``TRITON_INTERPRET`` if nobody has, and return "gpu" or "interpreter".

    Without a GPU, or beside one that is full, the interpreter is switched on; of a full one a sentence on stderr
    tells. ``TRITON_INTERPRET=1`` set beforehand keeps the interpreter on a machine with a GPU too, without touching it.

    Raises:
        ImportError: triton is not installed.
        RuntimeError: the only GPU is not NVIDIA's, or triton was imported before the choice was made, or the GPU is
            full and ``KVVIZ_REQUIRE_GPU=1``.
    """
    if importlib.util.find_spec("triton") is None:
        raise ImportError(INSTALL_HINT)
    wanted = _wanted()
    if "triton" in sys.modules:
        _check_imported(wanted)
    elif wanted == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    return wanted


def device() -> torch.device:
    """The device on which kernels run in this process: ``cuda`` or ``cpu``."""
    return torch.device("cuda" if prepare() == "gpu" else "cpu")


def _wanted() -> str:
    if _interpreter_asked():
        return "interpreter"
    if torch.version.hip or (hasattr(torch, "xpu") and torch.xpu.is_available()):
        raise RuntimeError(
            "This torch drives a GPU that is not NVIDIA's, and the kernels are tried on NVIDIA GPUs only. "
            "Set TRITON_INTERPRET=1 before starting Python to run everything on the CPU."
        )
    return "gpu" if torch.cuda.is_available() and not full() else "interpreter"


@functools.cache
def full() -> str:
    """Why the GPU cannot be used, as a sentence, printed on stderr too; empty if it can, or is not there or not wanted.

    Asking needs a CUDA context, half a GiB that this process keeps. Memory is free or not at this moment: processes
    that start at the same time do not see what the others are about to take.
    """
    why = _lack() if torch.cuda.is_available() and not _interpreter_asked() else ""
    if not why:
        return ""
    sentence = (
        f"The GPU is full: {why}, and a notebook needs {GPU_GIB * 1024:,.0f}. "
        f"Shut down notebooks that you have finished, and {RESTART_HINT}; "
    )
    if os.environ.get("KVVIZ_REQUIRE_GPU") == "1":
        raise RuntimeError(f"{sentence}without KVVIZ_REQUIRE_GPU=1, kernels run on the CPU.")
    sentence += "until then, kernels run in Triton's interpreter on the CPU."
    print(sentence, file=sys.stderr)
    return sentence


def _lack() -> str:
    """What is free, if that is too little."""
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
    except RuntimeError as error:  # OutOfMemoryError and AcceleratorError are such
        if "out of memory" not in str(error):
            raise
        return "it has no MiB free even for a CUDA context"
    if free_bytes >= GPU_GIB * 2**30:
        return ""
    return f"{free_bytes >> 20:,} of its {total_bytes >> 20:,} MiB are free"


def _interpreter_asked() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _check_imported(wanted: str) -> None:
    import triton.language as tl

    built = "interpreter" if type(tl.max).__name__ == "InterpretedFunction" else "gpu"
    asked = "interpreter" if _interpreter_asked() else "gpu"
    if built != wanted or asked != wanted:
        raise RuntimeError(
            f"Triton was imported for the {built} before kvviz could choose, and this process needs the {wanted} "
            f"(TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')!r}): it is set too late. "
            f"Import kvviz.engine before triton, and {RESTART_HINT}."
        )
