"""Start Python in a process of its own, independent of the variables with which the tests were started.

For example, a test of the default runtime must give the same result under ``TRITON_INTERPRET=1``.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PREFIXES = ("KVVIZ_", "TRITON_", "PYTHON")


def clean_environment(**variables: str) -> dict[str, str]:
    """Return the caller's variables without those that change kvviz, Triton or Python, plus the given ``variables``.

    ``PYTHONPATH`` stays, because it can say which copy of kvviz is tested.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES) or name == "PYTHONPATH"}
    return {**kept, **variables}


def run_python(source: str, *arguments: str, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess:
    """Run a program text with arguments, in the root of the project and a clean environment; return its output."""
    command = [sys.executable, "-c", source, *arguments]
    environment = clean_environment(**variables)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
