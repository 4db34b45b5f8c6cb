"""Who imports whom, read from the source: rooms in one direction, no cycle, and light rooms that stay light."""

import ast
from functools import cache
from pathlib import Path

import pytest

import kvviz

ROOT = Path(kvviz.__file__).parent
ROOMS = {
    "audit": set(),
    "cache": {"audit"},
    "kernels": {"audit", "cache"},
    "engine": {"audit", "cache", "kernels"},
    "show": {"audit", "cache"},
    "challenge": {"audit", "cache"},
    "report": set(),
}
"""The rooms that a room may import, besides itself. Modules outside the rooms are listed in :data:`SHARED`."""

SHARED = {"kvviz", "kvviz.files"}
"""Modules that every room but ``audit`` may import."""

FORBIDDEN = {
    "audit": {"torch", "triton", "matplotlib", "PIL", "gguf", "tokenizers"},
    "cache": {"triton", "matplotlib", "gguf", "tokenizers"},
    "kernels": {"matplotlib", "gguf", "tokenizers"},
    "engine": {"matplotlib"},
    "show": {"triton", "torch"},
    "challenge": {"torch", "triton", "matplotlib"},
    "report": {"torch", "triton"},
}
WITHOUT_TORCH = ("audit.audit", "audit.views_file", "audit.collect", "cache.modes", "cache.spec", "cache.layout",
                 "show.audit_page", "show.live_map", "challenge.challenge")  # fmt: skip
SELF_EXPLAINING = {"ModelFile.name"}


def name_of(path: Path) -> str:
    parts = ("kvviz", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def base_of(module: str, node: ast.ImportFrom) -> str:
    """The module that a ``from`` import names, a relative one resolved."""
    if not node.level:
        return node.module
    here = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])


def imports_in(module: str, tree: ast.AST) -> set[str]:
    """Every module imported anywhere in a tree, inside functions too; ``from package import module`` is that module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = base_of(module, node)
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) | ({base} if inner - MODULES.keys() else set())
    return found


@cache
def imports_of(module: str) -> frozenset[str]:
    return frozenset(imports_in(module, tree_of(module)))


def room_of(module: str) -> str | None:
    """The room of a module; None for the package itself, its command line and what every room shares."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def in_room(room: str) -> list[str]:
    return [module for module in MODULES if room_of(module) == room]


def path_back(graph: dict[str, set[str]], start: str) -> list[str] | None:
    """A way from ``start`` along the edges back to it, or None."""
    ways, seen = [[start]], set()
    while ways:
        way = ways.pop()
        for following in sorted(graph.get(way[-1], ())):
            if following == start:
                return [*way, start]
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    return None


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_that_it_may(room):
    assert len(in_room(room)) >= 4
    shared = set() if room == "audit" else SHARED
    for module in in_room(room):
        ours = {name for name in imports_of(module) if name.partition(".")[0] == "kvviz"} - shared
        assert {name for name in ours if room_of(name) not in ROOMS[room] | {room}} == set(), module


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_leaves_the_packages_of_others_alone(room):
    for module in in_room(room):
        roots = {name.partition(".")[0] for name in imports_of(module)}
        assert roots & FORBIDDEN[room] == set(), module


def test_every_folder_is_a_room():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == ROOMS.keys()


def test_no_two_rooms_have_a_file_of_one_name():
    names = [path.name for path in ROOT.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_light_modules_never_reach_torch(module):
    seen, waiting = set(), [f"kvviz.{module}"]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting += [found for found in imports_of(name) if found in MODULES and found not in seen]
        assert {found.partition(".")[0] for found in imports_of(name)} & {"torch", "triton"} == set(), name


def test_importing_the_package_imports_nothing():
    assert {name for name in imports_of("kvviz") if name.startswith("kvviz")} == set()
    assert all(imports_of(f"kvviz.{room}") == set() for room in ROOMS)


def test_no_module_reaches_itself():
    graph = {module: set(imports_of(module)) & MODULES.keys() - {"kvviz"} for module in MODULES}
    assert {module: way for module in graph if (way := path_back(graph, module))} == {}


def test_a_cycle_would_be_found():
    assert path_back({"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": set()}, "a") == ["a", "b", "c", "a"]
    assert path_back({"a": {"b"}, "b": {"c"}, "c": {"b"}}, "a") is None


def test_imports_are_read_in_every_form():
    source = "import os.path\nfrom kvviz.cache import spec, MODES\ndef f():\n    from kvviz import engine\n"
    relative = (
        "from . import spec\nfrom .layout import Layout\nfrom .. import engine\nfrom ..kernels.runtime import prepare\n"
    )
    assert imports_in("kvviz.doctor", ast.parse(source)) == {
        "os.path", "kvviz.cache", "kvviz.cache.spec", "kvviz.engine",
    }  # fmt: skip
    for module in ("kvviz.cache.buffers", "kvviz.cache"):
        assert imports_in(module, ast.parse(relative)) == {
            "kvviz.cache.spec", "kvviz.cache.layout", "kvviz.engine", "kvviz.kernels.runtime",
        }  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_docstrings(module):
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [n for n in tree_of(module).body if isinstance(n, definitions) and not n.name.startswith("_")]
    assert ast.get_docstring(tree_of(module)), "the module itself"
    assert [node.name for node in public if not ast.get_docstring(node)] == []


@pytest.mark.parametrize("module", [m for room in ("audit", "cache", "kernels", "engine") for m in in_room(room)])
def test_public_methods_have_docstrings(module):
    classes = [node for node in tree_of(module).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
    methods = [(c.name, m) for c in classes for m in c.body if isinstance(m, ast.FunctionDef) and m.name[0] != "_"]
    silent = {f"{owner}.{method.name}" for owner, method in methods if not ast.get_docstring(method)}
    assert silent - SELF_EXPLAINING == set()
