"""``kvviz doctor``: checks if this machine can run the notebooks, and says what to do about everything that is missing.

Each check makes one record, which is printed as one line. A missing or broken package gives a line too, and not an
exception. The checks change nothing but the environment variable ``TRITON_INTERPRET``, which
:func:`kvviz.kernels.runtime.prepare` sets.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvviz
from kvviz import environment

STATUSES = ("ok", "note", "fail")
PACKAGES = {
    "": ("numpy", "PIL"),
    "kernels": ("torch", "triton", "psutil"),
    "notebook": (
        "matplotlib", "jupyterlab", "ipywidgets", "ipykernel", "IPython", "jupyter_client", "nbclient", "nbconvert",
        "nbformat", "jinja2", "markupsafe", "bleach", "latex2mathml", "gguf", "tokenizers", "safetensors", "filelock",
        "platformdirs",
    ),
}  # fmt: skip
"""For each extra of pyproject.toml, the modules that it installs. The key "" stands for an installation without
extras."""

ALL_MODULES = tuple(module for modules in PACKAGES.values() for module in modules)
DISTRIBUTIONS = {"PIL": "pillow"}
"""For each module whose package has another name, the name of the package."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "firefox")
FREE_HOST_BYTES = 2 << 30
"""Memory that a notebook with the language model needs, in bytes."""

FREE_GPU_BYTES = 1 << 30
"""GPU memory that a notebook needs, in bytes."""

IMPORT_SECONDS = 180
"""Time limit in seconds for importing all packages in one process. The imports take about 10 s on two CPU cores."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    The status ``ok`` means that nothing is missing. ``note`` means that something is missing that the notebooks do not
    need. ``fail`` means that the notebooks cannot run.
    """

    name: str
    status: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {STATUSES}, not {self.status!r}")
        if (self.status == "ok") != (self.remedy == ""):
            needed = "no remedy" if self.status == "ok" else "a remedy"
            raise ValueError(f"a check with status {self.status!r} must have {needed}: {self}")


Problems = dict[str, str]
"""For each module that cannot be imported, the reason."""


def checks() -> tuple[Check, ...]:
    """Run all checks and return their results, in the order in which they are printed. Raises nothing."""
    made, problems = [], import_problems()
    for name, (check, remedy) in CHECKS.items():
        try:
            made.append(check(name, problems))
        except Exception as error:  # a broken installation may raise anything
            made.append(Check(name, "fail", _message(error), remedy))
    return tuple(made)


def render(checks: tuple[Check, ...]) -> str:
    """Return the checks as text: one line per check, and the remedy in the next line."""
    lines = []
    for check in checks:
        lines.append(f"{check.status:<5} {check.name:<11} {check.text}")
        if check.remedy:
            lines.append(f"{'':<17} -> {check.remedy}")
    return "\n".join(lines)


def ready(checks: tuple[Check, ...]) -> bool:
    """Return True if no check failed, so that the notebooks can run."""
    return all(check.status != "fail" for check in checks)


def main() -> int:
    """Print the checks, and return the exit status: 0 if the notebooks can run, else 1."""
    made = checks()
    print(render(made))
    if ready(made):
        print("\nThe notebooks can run on this machine.")
        if any(check.status == "note" for check in made):
            print('They can run without the things in lines that start with "note".')
        return 0
    print('\nThe notebooks cannot run yet. Correct each line that starts with "fail", then run kvviz doctor again.')
    failed = {check.name for check in made if check.status == "fail"}
    if "audit" not in failed and failed & {"torch", "jupyter"}:
        print("The command kvviz audit works already.")
    return 1


def machine() -> dict[str, str]:
    """Describe this machine for the header of a report, without the name of the host.

    Raises:
        ImportError, RuntimeError: Triton kernels cannot run on this machine. The message says what to do.
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
    """Return the path of the first of :data:`BROWSERS` that is on the PATH. Return None if no browser is."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def install_command(extra: str) -> str:
    """Return the command that installs an extra of kvviz. An editable installation of kvviz stays editable."""
    copied = Path(kvviz.__file__).resolve().is_relative_to(Path(sysconfig.get_path("purelib")).resolve())
    what = f".[{extra}]" if extra else "."
    return f"python -m pip install {'' if copied else '-e '}'{what}' in the folder of kvviz's pyproject.toml"


def missing_package(module: str) -> str:
    """Say in one sentence that a module is not installed, and which extra of kvviz installs it."""
    root = module.partition(".")[0]
    name = DISTRIBUTIONS.get(root, root)
    extra = next((extra for extra, modules in PACKAGES.items() if root in modules), None)
    if extra is None:
        return f"the package {name} is not installed: run python -m pip install {name}"
    part = f", which belongs to the extra {extra!r} of kvviz," if extra else ""
    return f"the package {name}{part} is not installed: run {install_command(extra)}"


_IMPORT_ALL = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
for module in sys.argv[2:]:
    problem = ""
    try:
        importlib.import_module(module)
    except BaseException as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        problem = "is not installed" if missing else f"raises {type(error).__name__}: {error}"
    print("\\nkvviz " + json.dumps([module, problem]), flush=True)
"""
"""Program that imports modules one after the other, and prints a line with the problem of each module."""


def import_problems(modules: Sequence[str] = ALL_MODULES) -> Problems:
    """Import modules in a new process, and return the reason for each module that cannot be imported.

    The new process has the ``sys.path`` of this process. If a module ends the new process or takes too long, another
    process imports the modules after it.
    """
    command = [sys.executable, "-c", _IMPORT_ALL, json.dumps(sys.path), *modules]
    try:
        done = subprocess.run(command, capture_output=True, timeout=IMPORT_SECONDS)
        printed, end = done.stdout, f"ends Python with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        printed, end = error.stdout or b"", f"is not imported after {IMPORT_SECONDS} s"
    lines = [line for line in printed.decode("utf-8", "replace").splitlines() if line.startswith("kvviz ")]
    found = dict(json.loads(line.removeprefix("kvviz ")) for line in lines)
    left = [module for module in modules if module not in found]
    if left:
        found |= {left[0]: end} | (import_problems(left[1:]) if left[1:] else {})
    return {module: " ".join(problem.split()) for module, problem in found.items() if problem}


def _python(name: str, problems: Problems) -> Check:
    return _at_least(name, platform.python_version(), (3, 11), f" ({sys.executable})", "Install Python 3.11 to 3.14.")


def _kvviz(name: str, problems: Problems) -> Check:
    wrong = environment.wrong_paths()
    if not wrong:
        return Check(name, "ok", f"{kvviz.__version__} ({Path(kvviz.__file__).parent})")
    remedy = "If you moved or copied the folder of kvviz, run make environment there. "
    return Check(name, "fail", wrong, f"{remedy}Without make: python -m pip install --force-reinstall --no-deps -e .")


def _audit(name: str, problems: Problems) -> Check:
    return _packages(name, problems, "", ("numpy", "PIL"))


def _torch(name: str, problems: Problems) -> Check:
    if name in problems:
        return _packages(name, problems, "kernels", (name,))
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU"
    return _at_least(name, torch.__version__, (2, 11), f" ({build} build)", install_command("kernels"))


def _triton(name: str, problems: Problems) -> Check:
    if problems.get(name) == "is not installed" and "torch" not in problems:
        from kvviz.kernels import runtime  # INSTALL_HINT says what works on systems without Triton

        return Check(name, "fail", "triton is not installed", runtime.INSTALL_HINT)
    if name in problems:
        return _packages(name, problems, "kernels", (name,))
    return _at_least(name, importlib.metadata.version(name), (3, 6), "", install_command("kernels"))


def _kernels(name: str, problems: Problems) -> Check:
    broken = [module for module in ("torch", "triton") if module in problems]
    if broken:
        return Check(name, "fail", f"need {' and '.join(broken)}", CHECKS[name][1])
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
        return Check(name, "fail", f"{text}, but Triton needs {missing}", hint)
    return Check(name, "ok", text)


def _gpu_memory(name: str, problems: Problems) -> Check:
    if "torch" in problems:
        return Check(name, "fail", "needs torch", CHECKS["kernels"][1])
    import torch

    if not torch.cuda.is_available():
        return _no_gpu(name)
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError as error:  # raised if no GPU memory is free for this process
        if "out of memory" not in str(error):
            raise
        free, total = 0, torch.cuda.get_device_properties().total_memory
    return _memory(name, free, total, FREE_GPU_BYTES)


def _host_memory(name: str, problems: Problems) -> Check:
    if "psutil" in problems:
        return _packages(name, problems, "kernels", ("psutil",))
    import psutil

    from kvviz.cache.buffers import free_host_bytes

    return _memory(name, free_host_bytes(), psutil.virtual_memory().total, FREE_HOST_BYTES)


def _jupyter(name: str, problems: Problems) -> Check:
    made = _packages(name, problems, "notebook", PACKAGES["notebook"])
    if made.status == "fail":
        return made
    versions = [importlib.metadata.version(package) for package in ("jupyterlab", "ipywidgets")]
    return Check(name, "ok", f"JupyterLab {versions[0]}, ipywidgets {versions[1]}")


def _model(name: str, problems: Problems) -> Check:
    from kvviz.engine import weights

    if "platformdirs" in problems:
        return _packages(name, problems, "notebook", ("platformdirs",))
    try:
        wrong = weights.fault()
    except ValueError as error:  # KVVIZ_CACHE is relative, or there is no home folder
        return Check(name, "fail", str(error), "Then run: kvviz fetch")
    if wrong:
        return Check(name, "fail", f"{weights.model_path()} {wrong}", "kvviz fetch")
    return Check(name, "ok", str(weights.model_path()))


def _browser(name: str, problems: Problems) -> Check:
    found = browser()
    if found:
        return Check(name, "ok", found)
    return Check(name, "note", "none on the PATH", "Only the browser tests need one: Chromium, Chrome or Firefox.")


CHECKS: dict[str, tuple[Callable[[str, Problems], Check], str]] = {
    "python": (_python, "Install Python 3.11 to 3.14."),
    "kvviz": (_kvviz, "Run make environment in the folder of kvviz."),
    "audit": (_audit, "Install numpy and Pillow again."),
    "torch": (_torch, "Install torch again."),
    "triton": (_triton, "Install triton again."),
    "kernels": (_kernels, "Correct the lines above first. Then restart the notebook or the Python process."),
    "GPU memory": (_gpu_memory, "Check the NVIDIA driver with nvidia-smi."),
    "memory": (_host_memory, "Install psutil again."),
    "jupyter": (_jupyter, "Install the packages again."),
    "model": (_model, "kvviz fetch"),
    "browser": (_browser, "Only the browser tests need a browser."),
}
"""For each check: its function, and what to do if the function raises an error."""


def _packages(name: str, problems: Problems, extra: str, modules: tuple[str, ...]) -> Check:
    """Check that some modules of an extra can be imported, and name the modules that cannot."""
    names = {module: DISTRIBUTIONS.get(module, module) for module in modules}
    missing = [names[module] for module in modules if problems.get(module) == "is not installed"]
    if missing:
        return Check(name, "fail", f"not installed: {', '.join(missing)}", install_command(extra))
    broken = [f"{names[module]} {problems[module]}" for module in modules if module in problems]
    if broken:
        again = ", ".join(names[module] for module in modules if module in problems)
        hint = f"If you have a file with the name of the package, rename the file. Otherwise install again: {again}."
        return Check(name, "fail", "; ".join(broken), hint)
    return Check(name, "ok", ", ".join(f"{one} {importlib.metadata.version(one)}" for one in names.values()))


def _at_least(name: str, version: str, least: tuple[int, int], more: str, remedy: str) -> Check:
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < least:
        return Check(name, "fail", f"{version}{more} is older than {least[0]}.{least[1]}", remedy)
    return Check(name, "ok", f"{version}{more}")


def _memory(name: str, free_bytes: int, total_bytes: int, least_bytes: int) -> Check:
    free, total, least = (number / 2**30 for number in (free_bytes, total_bytes, least_bytes))
    if free < least:
        remedy = f"A notebook takes about {least:.0f} GiB: close other programs."
        return Check(name, "note", f"{total:.1f} GiB, of which {free:.1f} GiB are free", remedy)
    return Check(name, "ok", f"{total:.1f} GiB, of which at least {least:.0f} GiB are free")


def _no_gpu(name: str) -> Check:
    """Say whether this machine has an NVIDIA GPU that torch cannot use, and what torch needs."""
    import torch

    if not shutil.which("nvidia-smi") and not Path("/dev/nvidiactl").exists():
        return Check(name, "ok", "this machine has no GPU, and kvviz does not need one")
    if torch.version.cuda is None:
        return Check(name, "note", "torch cannot use the NVIDIA GPU", "Install the CUDA build of torch to use the GPU.")
    remedy = f"Check with nvidia-smi that the driver works and is new enough for CUDA {torch.version.cuda}."
    return Check(name, "note", "torch cannot use the NVIDIA GPU", remedy)


def _compiler_missing() -> str | None:
    """Return what Triton needs on this machine to compile its launcher for a GPU. Return None if it has everything."""
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("gcc", "clang", "cc")):
        return "a C compiler (gcc or clang)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "Python's header files (Python.h, Debian's package python3-dev)"
    return None


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is not installed"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
