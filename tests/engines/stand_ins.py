"""Empty stand-ins for packages that released engines import, but that have no part in their caches.

Example: vLLM imports xgrammar for structured output, and SGLang imports torchvision for images. With the stand-ins, the
real classes of the caches can be imported from wheels that were installed without their dependencies.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from unittest.mock import MagicMock

STAND_INS = (
    "torchvision", "xgrammar", "llguidance", "partial_json_parser", "opentelemetry", "sentencepiece",
    "compressed_tensors", "mistral_common",
)  # fmt: skip
"""Packages that have a stand-in. No cache of an engine uses them."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a mock for each package of STAND_INS that is not installed."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in STAND_INS else None

    def create_module(self, spec):
        return MagicMock(name=spec.name, __version__="0", __path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


def install() -> None:
    """Make the stand-ins importable, after everything that is installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def without_init(name: str) -> None:
    """Import modules of a package without running its ``__init__``. A name that it should define is an empty class."""
    spec = importlib.util.find_spec(name)
    package = types.ModuleType(name)
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec

    def missing(attribute: str) -> type:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return type(attribute, (), {"model_type": attribute})

    package.__getattr__ = missing
    sys.modules[name] = package
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, package)
