"""The environment's files agree with one another, and what they promise is there."""

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

ROOT = Path(__file__).parents[1]
ASIDE = {"mooncake"}
"""Extras that are not part of the environment: a section of notebook 07 uses them where they are installed."""
TARGETS = ("help", "report", "course", "test", "test-fast", "test-tritons", "lab", "workshop", "lint", "clean")


def requirement_lines() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def pins() -> dict[str, Requirement]:
    return {found.name: found for found in map(Requirement, requirement_lines()[:-1])}


def environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def declared() -> dict[str, Requirement]:
    fixed = project()["project"]
    extras = [texts for name, texts in fixed["optional-dependencies"].items() if name not in ASIDE]
    texts = [*fixed["dependencies"], *(text for extra in extras for text in extra)]
    return {found.name: found for found in map(Requirement, texts)}


def sources() -> list[Path]:
    """The repository's text files: tracked ones, and ones that could be."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout: the list of files comes from git")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(ROOT / name for name in names if name and (ROOT / name).is_file())


def make(*arguments: str) -> subprocess.CompletedProcess:
    """Run make here, as if the variables of the make that may run the tests were not set."""
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
    *channel, last = environment()["dependencies"]
    assert last["pip"] == requirement_lines()
    assert "pip" in channel


def test_condas_python_is_one_that_the_package_takes():
    (python,) = (line for line in environment()["dependencies"] if str(line).startswith("python="))
    assert python == "python=3.11"
    assert SpecifierSet(project()["project"]["requires-python"]).contains(python.partition("=")[2])


def test_pins_lie_in_the_ranges_of_pyproject():
    assert set(pins()) == set(declared())
    outside = [str(pin) for name, pin in pins().items() if not declared()[name].specifier.contains(_version(pin))]
    assert outside == []
    assert [name for name, pin in pins().items() if str(pin.marker) != str(declared()[name].marker)] == []


def test_the_pins_are_what_runs_here():
    """Outside the environment that the Makefile makes this may differ, and then says how."""
    if not (Path(sys.prefix) / ".installed").exists():
        pytest.skip("not in the environment that the Makefile makes")
    from importlib.metadata import version

    ours = {name: _version(pin) for name, pin in pins().items()}
    if os.environ.get("PYTHONPATH"):  # another Triton was put in front
        del ours["triton"]
    assert {name: version(name).partition("+")[0] for name in ours} == ours


def test_the_report_template_is_part_of_the_package():
    patterns = project()["tool"]["setuptools"]["package-data"]["kvviz.report"]
    folder = ROOT / "kvviz" / "report"
    files = {path for path in (folder / "template").rglob("*") if path.is_file()}
    assert files and files <= {path for pattern in patterns for path in folder.glob(pattern)}


def test_every_target_is_there_and_in_the_help():
    text = (ROOT / "Makefile").read_text()
    named = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    assert sorted(named) == sorted(TARGETS)
    said = make("help").stdout
    assert [target for target in TARGETS if not re.search(rf"^  make {target} +\w", said, re.MULTILINE)] == []
    assert "KVVIZ_CACHE" in said and "TORCH_INDEX" in said
    assert make().stdout == said


def test_the_index_reaches_pip_and_is_absent_otherwise():
    given = make("-n", "-B", "report", "TORCH_INDEX=somewhere/cpu").stdout
    assert '-m pip install --extra-index-url "somewhere/cpu" -r requirements.txt' in given
    assert "-m pip install  -r requirements.txt" in make("-n", "-B", "report").stdout


def test_report_fetches_before_it_runs():
    lines = make("-n", "-B", "report", "ARGS=01").stdout.splitlines()
    assert lines[-2:] == [".venv/bin/python -m kvviz fetch", ".venv/bin/python -m kvviz report 01"]


def test_a_course_is_one_file():
    lines = make("-n", "-B", "course").stdout.splitlines()
    assert lines[-1] == ".venv/bin/python -m kvviz report --archive reports/kvviz-course.zip"


def test_an_unfit_python_is_one_sentence(tmp_path):
    """The check comes before anything is made, so it runs in a copy of the few files that it needs."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.18"\n[ "$1" = --version ]\n')
    old.chmod(0o755)
    done = make("-C", str(tmp_path), "report", f"PYTHON={old}")
    assert done.returncode == 2
    assert f"needs Python 3.11 to 3.14, and '{old}' is not one (Python 3.9.18)" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_interrupted_install_is_not_believed(tmp_path):
    """A stub interpreter makes a .venv whose pip fails; the next make starts from nothing, and then it stands."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    stub = tmp_path / "python"
    stub.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> "{tmp_path}/calls"\n'
        f'case "$2" in venv) mkdir -p "$4/bin" && cp "$0" "$4/bin/python";; pip) [ ! -e "{tmp_path}/broken" ];; esac\n'
    )
    stub.chmod(0o755)
    (tmp_path / "broken").touch()
    calls = tmp_path / "calls"
    command = ("-C", str(tmp_path), ".venv/.installed", f"PYTHON={stub}")

    assert make(*command).returncode == 2
    (tmp_path / "broken").unlink()
    calls.unlink()
    assert make(*command).returncode == 0
    assert [line for line in calls.read_text().splitlines() if not line.startswith("-c")] == [
        "-m venv --clear .venv",
        "-m pip install -r requirements.txt",
    ]
    calls.unlink()
    assert make(*command).returncode == 0
    assert not calls.exists()


def test_git_ignores_what_is_made():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {".cache/", ".venv/", "reports/"} <= set(ignored)


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
    assert "is absent: run python -m kvviz fetch." in result.stdout.str()


def _version(pin: Requirement) -> str:
    return str(pin.specifier).removeprefix("==")
