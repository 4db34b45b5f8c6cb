"""What every test may use: the language model's path, and skips that a machine with a GPU may forbid."""

import importlib.util
import os
from pathlib import Path

import pytest


def gpu_missing() -> str | None:
    """What this machine lacks for tests marked ``gpu``, or None."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    from kvviz.engine import mode

    if mode.prepare() == "interpreter":
        import torch

        return "TRITON_INTERPRET is set" if torch.cuda.is_available() else "torch sees no NVIDIA GPU"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        missing = gpu_missing()
        if missing:
            pytest.skip(f"needs a GPU: {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> pytest.TestReport:
    """With ``KVVIZ_REQUIRE_GPU=1``, a ``gpu`` test that is skipped, wherever and why ever, has failed."""
    report = yield
    if report.skipped and item.get_closest_marker("gpu") and os.environ.get("KVVIZ_REQUIRE_GPU") == "1":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"KVVIZ_REQUIRE_GPU=1 forbids to skip this test, which said: {reason}"
    return report


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The language model's GGUF. Without it the test is skipped, or fails if ``KVVIZ_REQUIRE_MODEL=1``."""
    from kvviz.engine import weights

    try:
        return weights.find()
    except FileNotFoundError as error:
        if os.environ.get("KVVIZ_REQUIRE_MODEL") == "1":
            pytest.fail(f"KVVIZ_REQUIRE_MODEL=1, and: {error}")
        pytest.skip(str(error))
