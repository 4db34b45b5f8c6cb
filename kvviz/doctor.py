"""``python -m kvviz doctor``: what this machine has for the notebooks, and what to do about what it lacks.

Each line is a record, made first and rendered second. Nothing that is missing raises, torch included, and nothing
is changed but ``TRITON_INTERPRET``, as :func:`kvviz.kernels.runtime.prepare` chooses it.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import kvviz

STATUSES = ("ok", "note", "fail")
INSTALL = "python -m pip install -r requirements.txt"
NOTEBOOK_PACKAGES = ("jupyterlab", "ipywidgets", "ipykernel", "nbclient", "nbconvert", "nbformat")
OTHER_PACKAGES = ("matplotlib", "latex2mathml", "gguf", "tokenizers")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "firefox")
FREE_HOST_BYTES = 2 << 30
FREE_GPU_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """One line: ``fail`` means that notebooks will not run, ``note`` that something optional is missing."""

    name: str
    status: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {STATUSES}, and is {self.status!r}.")
        if (self.status == "ok") != (self.remedy == ""):
            raise ValueError(f"A check has a remedy when it is not ok, and only then: {self}.")


def checks() -> tuple[Check, ...]:
    """All checks of this machine, in the order in which they are printed. Raises nothing."""
    made = []
    for name, (check, remedy) in CHECKS.items():
        try:
            made.append(check(name))
        except Exception as error:  # a broken installation may raise anything
            made.append(Check(name, "fail", _said(error), remedy))
    return tuple(made)


def render(checks: tuple[Check, ...]) -> str:
    """The checks as text: a line each, and a line below with what to do."""
    lines = []
    for check in checks:
        lines.append(f"{check.status:<5} {check.name:<11} {check.text}")
        if check.remedy:
            lines.append(f"{'':<17} -> {check.remedy}")
    return "\n".join(lines)


def ready(checks: tuple[Check, ...]) -> bool:
    """Whether everything that the notebooks need works."""
    return all(check.status != "fail" for check in checks)


def main() -> int:
    """Print the checks, and return the exit status: 0 if the notebooks can run, else 1."""
    made = checks()
    print(render(made))
    print("\nEverything that the notebooks need is there." if ready(made) else "\nThe lines with fail need care.")
    return 0 if ready(made) else 1


def machine() -> dict[str, str]:
    """Where a report was made, for its header: kernels, machine, torch, triton, python and kvviz. No host name.

    Raises:
        ImportError, RuntimeError: kernels cannot run here; the message says what to do.
    """
    import torch

    from kvviz.kernels import runtime

    on_gpu = runtime.prepare() == "gpu"
    cores = f"{os.cpu_count()} {platform.machine()} cores"
    return {
        "kernels": "GPU" if on_gpu else "interpreter on the CPU",
        "machine": f"{torch.cuda.get_device_name()}, {cores}" if on_gpu else cores,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "python": platform.python_version(),
        "kvviz": kvviz.__version__,
    }


def browser() -> str | None:
    """The path of the first browser of ``BROWSERS`` on the PATH, or None."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def _python(name: str) -> Check:
    return _at_least(name, platform.python_version(), (3, 11), f" ({sys.executable})")


def _kvviz(name: str) -> Check:
    return Check(name, "ok", f"{kvviz.__version__} ({Path(kvviz.__file__).parent})")


def _torch(name: str) -> Check:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU"
    return _at_least(name, torch.__version__, (2, 11), f" ({build} build)")


def _triton(name: str) -> Check:
    from kvviz.kernels import runtime  # its sentence for a missing Triton speaks of each platform

    if importlib.util.find_spec("triton") is None:
        return Check(name, "fail", "not installed", runtime.INSTALL_HINT)
    return _at_least(name, importlib.metadata.version("triton"), (3, 6))


def _kernels(name: str) -> Check:
    from kvviz.kernels import runtime

    if runtime.prepare() == "interpreter":
        full = runtime.full()
        text = f"run in Triton's interpreter on the CPU{': the GPU is full' if full else ''}"
        return Check(name, "note" if full else "ok", text, full)
    import torch

    major, minor = torch.cuda.get_device_capability()
    text = f"run on: {torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    missing = _compiler_missing()
    if missing:
        hint = "Install it, or set TRITON_INTERPRET=1 before starting Python to run kernels on the CPU."
        return Check(name, "fail", f"{text}, but Triton lacks {missing}", hint)
    return Check(name, "ok", text)


def _gpu_memory(name: str) -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check(name, "ok", "no GPU, and none is needed")
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError as error:  # no memory left for a context
        if "out of memory" not in str(error):
            raise
        free, total = 0, torch.cuda.get_device_properties().total_memory
    return _memory(name, free, total, FREE_GPU_BYTES)


def _host_memory(name: str) -> Check:
    import psutil

    from kvviz.cache.buffers import free_host_bytes

    return _memory(name, free_host_bytes(), psutil.virtual_memory().total, FREE_HOST_BYTES)


def _jupyter(name: str) -> Check:
    versions = {package: _version(package) for package in (*NOTEBOOK_PACKAGES, *OTHER_PACKAGES)}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        return Check(name, "fail", f"not installed: {', '.join(missing)}", INSTALL)
    return Check(name, "ok", f"JupyterLab {versions['jupyterlab']}, ipywidgets {versions['ipywidgets']}")


def _model(name: str) -> Check:
    from kvviz.engine import weights

    try:
        wrong = weights.fault()
    except ValueError as error:  # KVVIZ_CACHE is relative
        return Check(name, "fail", str(error), "Then run: python -m kvviz fetch")
    if wrong:
        return Check(name, "fail", f"{weights.model_path()} {wrong}", "python -m kvviz fetch")
    return Check(name, "ok", str(weights.model_path()))


def _browser(name: str) -> Check:
    found = browser()
    if found:
        return Check(name, "ok", found)
    return Check(name, "note", "none on the PATH", "Only the browser tests need one: Chromium, Chrome or Firefox.")


CHECKS: dict[str, tuple[Callable[[str], Check], str]] = {
    "python": (_python, INSTALL),
    "kvviz": (_kvviz, INSTALL),
    "torch": (_torch, INSTALL),
    "triton": (_triton, INSTALL),
    "kernels": (_kernels, "Mend the lines above first; after a change, restart the kernel or the process."),
    "GPU memory": (_gpu_memory, INSTALL),
    "memory": (_host_memory, INSTALL),
    "jupyter": (_jupyter, INSTALL),
    "model": (_model, "python -m kvviz fetch"),
    "browser": (_browser, INSTALL),
}


def _at_least(name: str, version: str, least: tuple[int, int], more: str = "") -> Check:
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < least:
        return Check(name, "fail", f"{version}{more} is older than {least[0]}.{least[1]}", INSTALL)
    return Check(name, "ok", f"{version}{more}")


def _memory(name: str, free_bytes: int, total_bytes: int, least_bytes: int) -> Check:
    free, total, least = (number / 2**30 for number in (free_bytes, total_bytes, least_bytes))
    if free < least:
        remedy = f"The notebooks take about {least:.0f} GiB: close other programs."
        return Check(name, "note", f"{free:.1f} of {total:.1f} GiB free", remedy)
    return Check(name, "ok", f"at least {least:.0f} of {total:.1f} GiB free")


def _compiler_missing() -> str | None:
    """What Triton needs to build its launcher for a GPU, and this machine has not."""
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("gcc", "clang", "cc")):
        return "a C compiler (gcc or clang)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "Python's header files (Python.h, Debian's package python3-dev)"
    return None


def _said(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is not installed"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
