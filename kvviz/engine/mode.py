"""Where Triton runs: on an NVIDIA GPU, or in Triton's interpreter on the CPU.

Triton reads ``TRITON_INTERPRET`` while ``import triton`` runs, so the choice must fall before anything
imports triton; every module here that needs triton calls :func:`prepare` first.
"""

import importlib.util
import os
import sys

import torch

INSTALL_HINT = (
    "Triton is not installed, and the kernels need it. On Linux: python -m pip install triton. "
    "On Windows and macOS there is no Triton: layouts, audit and drawing work, kernels do not."
)
RESTART_HINT = "restart the kernel (or the process) and run the first cell again"


def prepare() -> str:
    """Choose how kernels run, set ``TRITON_INTERPRET`` if nobody has, and return "gpu" or "interpreter".

    Without a GPU the interpreter is switched on. ``TRITON_INTERPRET=1`` set beforehand keeps the
    interpreter on a machine with a GPU too.

    Raises:
        ImportError: triton is not installed.
        RuntimeError: the only GPU is not NVIDIA's, or triton was imported before the choice was made.
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
    return "gpu" if torch.cuda.is_available() else "interpreter"


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
