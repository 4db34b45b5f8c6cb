"""The files that describe the environment agree, each extra installs what its modules import, and make installs all."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvviz import CacheSpec, allocate, doctor
from kvviz.audit import collect, views_file
from tests.test_doctor import WITHOUT_EXTRAS

ROOT = Path(__file__).parents[1]
ASIDE = {"mooncake"}
"""Extras that are not part of the environment. A section of notebook 07 uses mooncake if it is installed."""

TARGETS = ("help", "environment", "report", "course", "test", "test-fast", "test-tritons", "test-engines", "engines",
           "lab", "workshop", "lint", "clean")  # fmt: skip
INSIDE_ENGINES = "vllm"
"""The package that kvviz.bench imports only in the environments of engines, which it makes itself."""

ENGINES = {"vllm", "sglang", "lmcache", "transformers"}
"""Packages that only ``make test-engines`` installs."""

EXTRAS_OF_ROOMS = {
    "audit": {""},
    "cache": {"", "kernels"},
    "kernels": {"", "kernels"},
    "engine": {"", "kernels", "notebook"},
    "challenge": {"", "kernels"},
    "show": {"", "notebook"},
    "report": {"", "notebook"},
}
"""For each room, the extras whose packages it may import. "" stands for an installation without extras."""


def requirement_lines() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def pins() -> dict[str, Requirement]:
    return {found.name: found for found in map(Requirement, requirement_lines()[:-1])}


def conda() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def extras() -> dict[str, dict[str, Requirement]]:
    """Return the requirements of each extra, by name of the package. "" stands for an installation without extras."""
    fixed = project()["project"]
    texts = {"": fixed["dependencies"]} | fixed["optional-dependencies"]
    found = {extra: [*map(Requirement, lines)] for extra, lines in texts.items()}
    return {extra: {one.name: one for one in found[extra] if one.name != "kvviz"} for extra in found}


def declared() -> dict[str, Requirement]:
    return {name: one for extra, found in extras().items() if extra not in ASIDE for name, one in found.items()}


def third_party(folder: Path) -> dict[str, set[str]]:
    """For each path below ``folder``, return the packages of other people that the file imports."""
    found = {}
    ours = {"kvviz", "tests", "benchmarks", *(path.stem for path in (ROOT / "benchmarks").glob("*.py"))}
    for path in sorted(folder.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        roots = {name.partition(".")[0] for name in names}
        found[path.relative_to(folder).as_posix()] = roots - sys.stdlib_module_names - ours
    return found


def distributions(modules: set[str]) -> set[str]:
    """Return the names that these modules have on the package index."""
    other = {"yaml": "pyyaml", "axe_playwright_python": "axe-playwright-python", **doctor.DISTRIBUTIONS}
    return {other.get(module, module.lower()) for module in modules}


def sources() -> list[Path]:
    """Return the text files of the repository, except files that git ignores."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout: the list of files comes from git")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(ROOT / name for name in names if name and (ROOT / name).is_file())


def make(*arguments: str) -> subprocess.CompletedProcess:
    """Run make in this repository. If make runs the tests, hide the variables of that make."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    ours = ("PYTHON", "TORCH_INDEX", "ARGS", "MFLAGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=60)


def test_requirements_are_exact_pins_and_the_package():
    assert requirement_lines()[-1] == "-e ."
    loose = [str(pin) for pin in pins().values() if not re.fullmatch(r"==[\w.]+", str(pin.specifier))]
    assert loose == []
    assert str(pins()["triton"].marker) == 'sys_platform == "linux"'
    assert pins()["torch"].marker is None


def test_conda_and_pip_get_the_same_pins():
    *channel, last = conda()["dependencies"]
    assert last["pip"] == requirement_lines()
    assert "pip" in channel


def test_condas_python_is_one_that_the_package_takes():
    (python,) = (line for line in conda()["dependencies"] if str(line).startswith("python="))
    assert python == "python=3.11"
    assert SpecifierSet(project()["project"]["requires-python"]).contains(python.partition("=")[2])


@pytest.mark.parametrize("room", EXTRAS_OF_ROOMS)
def test_a_room_imports_only_packages_of_its_extras(room):
    allowed = {name for extra in EXTRAS_OF_ROOMS[room] for name in extras()[extra]}
    allowed |= {"pytest"} if room in ("audit", "show") else set()  # the check of layouts in other people's tests
    imported = third_party(ROOT / "kvviz" / room)
    assert imported
    assert {path: left for path, names in imported.items() if (left := distributions(names) - allowed)} == {}


def test_every_package_that_is_imported_is_declared():
    imported = set().union(*third_party(ROOT / "kvviz").values()) - {"pytest", INSIDE_ENGINES}
    assert distributions(imported) <= {name for extra in ("", "kernels", "notebook") for name in extras()[extra]}
    tests = set().union(*third_party(ROOT / "tests").values()) - {"mooncake", "nixl"} - ENGINES
    assert distributions(tests) <= declared().keys()


def test_the_doctor_imports_every_package_of_each_extra():
    for extra, modules in doctor.PACKAGES.items():
        assert distributions(set(modules)) == set(extras()[extra])


def test_an_installation_without_extras_is_small():
    assert set(extras()[""]) == {"numpy", "pillow"}
    assert project()["project"]["scripts"] == {"kvviz": "kvviz.__main__:main"}
    assert "kvviz[kernels]" in project()["project"]["optional-dependencies"]["notebook"]


@pytest.fixture(scope="module")
def production(tmp_path_factory) -> Path:
    """A views file of 64 layers with 20,000 blocks each: 128 data views and 128 scale views in 43 GB."""
    sizes = dict(num_layers=64, num_blocks=20_000, block_size=16, num_kv_heads=8, head_size=128)
    cache = allocate(CacheSpec(**sizes, kv_cache_dtype="int8_per_token_head"), "cross-layer NHD", "meta")
    views = [view for view in cache.owners() if view.role == "data"]
    views += cache.writers(cache.carve_scales("shape"))
    path = tmp_path_factory.mktemp("production") / "views.json"
    path.write_text(views_file.dump(views_file.ViewsFile.of(views, collect.usual_claims(views))))
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="processor time of a child is read by POSIX's resource")
def test_an_audit_of_production_size_needs_no_extra(production, tmp_path):
    """The page is written too. pytest -s prints the processor time."""
    script = WITHOUT_EXTRAS.replace(
        "sys.exit(main(sys.argv[1:]))",
        """
    import resource
    status, used = main(sys.argv[1:]), resource.getrusage(resource.RUSAGE_SELF)
    print(sorted(hidden & sys.modules.keys()), used.ru_utime + used.ru_stime)
    sys.exit(status)""",
    )
    seconds = []
    for page in ([], [], ["--html", str(tmp_path / "page.html")]):
        order = [sys.executable, "-c", script, "audit", str(production), *page]
        done = subprocess.run(order, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (1, "") and "one cause explains all" in done.stdout
        modules, _, used = done.stdout.splitlines()[-1].rpartition(" ")
        assert modules == "[]"
        seconds.append(float(used))
    assert (tmp_path / "page.html").stat().st_size > 10_000
    print(f"processor time in seconds, the last with a page: {seconds}")


def test_pins_are_in_the_ranges_of_pyproject():
    assert set(pins()) == set(declared())
    outside = [str(pin) for name, pin in pins().items() if not declared()[name].specifier.contains(_version(pin))]
    assert outside == []
    assert [name for name, pin in pins().items() if str(pin.marker) != str(declared()[name].marker)] == []


def test_the_pins_are_what_runs_here():
    """Other environments may have other versions: there the test is skipped."""
    if not (Path(sys.prefix) / ".installed").exists():
        pytest.skip("not in the environment that the Makefile makes")
    from importlib.metadata import version

    ours = {name: _version(pin) for name, pin in pins().items()}
    if os.environ.get("PYTHONPATH"):  # another Triton was put in front
        del ours["triton"]
    assert {name: version(name).partition("+")[0] for name in ours} == ours


def test_every_file_of_the_package_that_is_not_python_is_installed():
    patterns = project()["tool"]["setuptools"]["package-data"]
    rooms = [(ROOT.joinpath(*package.split(".")), globs) for package, globs in patterns.items()]
    installed = {path for folder, globs in rooms for glob in globs for path in folder.glob(glob) if path.is_file()}
    others = {path for path in (ROOT / "kvviz").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others and others - installed == set()
    assert project()["project"]["dynamic"] == ["version"] and importlib.metadata.version("kvviz")


def test_every_target_is_there_and_in_the_help():
    text = (ROOT / "Makefile").read_text()
    named = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    assert sorted(named) == sorted(TARGETS)
    said = make("help").stdout
    assert [target for target in TARGETS if not re.search(rf"^  make {target} +\w", said, re.MULTILINE)] == []
    assert "KVVIZ_CACHE" in said and "TORCH_INDEX" in said
    assert make().stdout == said


def test_the_index_reaches_the_set_up_and_is_absent_otherwise():
    given = make("-n", "report", "TORCH_INDEX=somewhere/cpu").stdout
    assert 'python3 -m kvviz.environment "somewhere/cpu"\n' in given
    assert "python3 -m kvviz.environment \n" in make("-n", "report").stdout


def test_report_fetches_before_it_runs():
    lines = make("-n", "report", "ARGS=01").stdout.splitlines()
    assert lines[-2:] == [".venv/bin/python -m kvviz fetch", ".venv/bin/python -m kvviz report 01"]


def test_a_course_is_one_file():
    lines = make("-n", "course").stdout.splitlines()
    assert lines[-1] == ".venv/bin/python -m kvviz report --archive reports/kvviz-course.zip"


def test_tests_run_in_two_processes():
    for target in ("test", "test-fast"):
        assert "pytest -n 2 --dist loadfile" in make("-n", target).stdout


def test_an_unfit_python_is_one_sentence(tmp_path):
    """The check comes before anything is made."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.18"\n[ "$1" = --version ]\n')
    old.chmod(0o755)
    done = make("-C", str(tmp_path), "report", f"PYTHON={old}")
    assert done.returncode == 2
    assert f"needs Python 3.11 to 3.14, but '{old} --version' says: Python 3.9.18." in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_git_ignores_what_is_made():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {".cache/", ".venv/", ".venv.lock", "reports/", "workshop/"} <= set(ignored)


def test_ci_runs_the_readmes_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_no_file_names_a_machine_or_a_registry():
    folders = r"(?<![\w.~>)-])/(?:root|home|work|Users|opt|mnt)/\w"
    hosts = ("pypi" + ".org", "python" + "hosted", "download.py" + "torch", "ana" + "conda.org", "npm" + "js.org")
    pattern = re.compile("|".join([folders, *map(re.escape, hosts)]))
    assert pattern.search("see /" + "root/x") and pattern.search("https://" + hosts[0])
    found = []
    for path in sources():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, 1) if pattern.search(line)]
    assert found == []


LEAN = [part for name in ("cacheprovider", "hypothesispytest", "anyio", "xdist") for part in ("-p", f"no:{name}")]
GPU_TESTS = """
    import pytest

    @pytest.mark.gpu
    def test_marked(): pass

    @pytest.mark.gpu
    @pytest.mark.skip(reason="said so")
    def test_skipped_by_mark(): pass

    @pytest.mark.skip(reason="another matter")
    def test_unmarked(): pass
"""


@pytest.mark.parametrize(("required", "expected"), [("0", {"skipped": 3}), ("1", {"errors": 2, "skipped": 1})])
def test_a_gpu_machine_turns_skips_into_failures(pytester, monkeypatch, required, expected):
    monkeypatch.setenv("KVVIZ_REQUIRE_GPU", required)
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    missing = 'def gpu_missing() -> str | None:\n    return "torch sees no NVIDIA GPU"\n\n\ndef gpu_was_missing'
    pytester.makeconftest(conftest.replace("def gpu_missing", missing))
    pytester.makeini("[pytest]\nmarkers =\n    gpu: needs a GPU\n")
    pytester.makepyfile(GPU_TESTS)
    result = pytester.runpytest_inprocess("-ra", *LEAN)
    assert result.parseoutcomes() == expected
    assert "torch sees no NVIDIA GPU" in result.stdout.str()


@pytest.mark.parametrize(("required", "outcome"), [("0", "skipped"), ("1", "errors")])
def test_a_missing_model_skips_or_fails(pytester, monkeypatch, required, outcome):
    monkeypatch.setenv("KVVIZ_REQUIRE_MODEL", required)
    monkeypatch.setenv("KVVIZ_CACHE", str(pytester.path / "empty"))
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile("def test_it(model_path): pass")
    result = pytester.runpytest_inprocess("-ra", *LEAN)
    assert result.parseoutcomes() == {outcome: 1}
    assert "is absent: run kvviz fetch." in result.stdout.str()


def _version(pin: Requirement) -> str:
    return str(pin.specifier).removeprefix("==")
