"""Which module imports which: packages import in one direction, without cycles, and light modules stay light."""

import ast
import json
import subprocess
import sys
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
    "bench": {"audit", "cache", "engine", "trace"},
    "trace": {"audit", "cache", "kernels", "show"},
}
"""The packages of kvviz ("rooms"), and for each the other rooms that it may import."""

SHARED = {"kvviz", "kvviz.files"}
"""Modules that every room except ``audit`` may import."""

FORBIDDEN = {
    "audit": {"torch", "triton", "matplotlib", "PIL", "gguf", "tokenizers"},
    "cache": {"triton", "matplotlib", "gguf", "tokenizers"},
    "kernels": {"matplotlib", "gguf", "tokenizers"},
    "engine": {"matplotlib"},
    "show": {"triton", "torch"},
    "challenge": {"torch", "triton", "matplotlib"},
    "report": {"torch", "triton"},
    "bench": {"matplotlib", "gguf", "tokenizers"},
    "trace": {"triton", "matplotlib", "gguf", "tokenizers"},
}
WITHOUT_TORCH = ("audit.audit", "audit.views_file", "audit.collect", "cache.modes", "cache.spec", "cache.layout",
                 "cache.geometry", "show.audit_page", "show.live_map", "challenge.questions")  # fmt: skip
BASE_INSTALL = {"numpy", "PIL"}
"""What ``pip install .`` brings, besides kvviz itself."""
SELF_EXPLAINING = {"ModelFile.name"}


def name_of(path: Path) -> str:
    parts = ("kvviz", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def base_of(module: str, node: ast.ImportFrom) -> str:
    """Return the module that a ``from`` import names. A relative name is made absolute."""
    if not node.level:
        return node.module
    here = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])


def imports_in(module: str, tree: ast.AST) -> set[str]:
    """Return every module that a tree imports, inside functions too. ``from package import module`` is that module."""
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
    """Return the room of a module, or None for a module that is in no room."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def in_room(room: str) -> list[str]:
    return [module for module in MODULES if room_of(module) == room]


def path_back(graph: dict[str, set[str]], start: str) -> list[str] | None:
    """Return a path along the edges from ``start`` back to ``start``, or None."""
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


def test_audit_needs_numpy_and_the_standard_library_only():
    for module in in_room("audit"):
        foreign = {name for name in imports_of(module) if room_of(name) != "audit"}
        roots = {name.partition(".")[0] for name in foreign}
        assert roots - sys.stdlib_module_names <= {"numpy"}, module


def run_with(allowed: set[str], code: str) -> str:
    """Run code in a new process in which only the standard library, kvviz and ``allowed`` can be imported."""
    refuse = f"""
import sys
class Refuse:
    def find_spec(name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in sys.stdlib_module_names and root not in {sorted(allowed | {"kvviz"})}:
            raise ModuleNotFoundError(f"{{name}} is blocked in this test", name=name)
sys.meta_path.insert(0, Refuse)
"""
    done = subprocess.run([sys.executable, "-c", refuse + code], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_base_install_is_enough_for_the_light_modules():
    code = "".join(f"import kvviz.{module}\n" for module in WITHOUT_TORCH)
    code += "assert not {'torch', 'triton', 'matplotlib'} & sys.modules.keys()\n"
    code += "from kvviz.challenge.questions import challenge, check\n"
    code += "print(check(challenge(0)[0], kind='collision', first_byte=0, fix='offset'))"
    assert run_with(BASE_INSTALL, code).startswith("unknown 0 of the easy set, seed 0: ")


def test_importing_kvviz_loads_neither_numpy_nor_torch():
    assert run_with(set(), "import kvviz\nprint(kvviz.__version__)").strip() == kvviz.__version__


def test_names_of_the_package_are_loaded_when_first_used():
    code = "import json, kvviz\nkvviz.View\n"
    code += "print(json.dumps([name for name in ('torch', 'numpy', 'kvviz.audit.view') if name in sys.modules]))"
    assert json.loads(run_with({"numpy"}, code)) == ["numpy", "kvviz.audit.view"]


@pytest.mark.parametrize("name", kvviz.__all__)
def test_every_name_of_the_package_can_be_imported(name):
    found = {}
    exec(f"from kvviz import {name}", found)
    assert name in dir(kvviz) and found[name] is getattr(kvviz, name)
    if name != "__version__":
        assert getattr(found[name], "__name__", "").rpartition(".")[2] == name


@pytest.mark.parametrize(
    ("given", "near"), [("alocate", "allocate"), ("Cachespec", "CacheSpec"), ("audit_view", "audit_views")]
)
def test_an_unknown_name_of_the_package_names_the_nearest(given, near):
    with pytest.raises(AttributeError, match=f"no attribute '{given}'.*did you mean '{near}'"):
        getattr(kvviz, given)
    with pytest.raises(ImportError, match=given):
        exec(f"from kvviz import {given}")


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


@pytest.mark.parametrize(
    "module", [m for room in ("audit", "cache", "kernels", "engine", "bench", "trace") for m in in_room(room)]
)
def test_public_methods_have_docstrings(module):
    classes = [node for node in tree_of(module).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
    methods = [(c.name, m) for c in classes for m in c.body if isinstance(m, ast.FunctionDef) and m.name[0] != "_"]
    silent = {f"{owner}.{method.name}" for owner, method in methods if not ast.get_docstring(method)}
    assert silent - SELF_EXPLAINING == set()
