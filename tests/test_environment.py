"""``make`` sets up one environment, in one process at a time, and corrects a clone that was moved or copied."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from kvviz import environment

pytestmark = pytest.mark.skipif(os.name != "posix", reason="make is POSIX's")
ROOT = Path(environment.__file__).parents[1]


def python(root: Path, *arguments: str, folder: Path = Path("/")) -> subprocess.CompletedProcess:
    """Run the Python of ``root/.venv`` in a folder, without the caller's PYTHONPATH."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    order = [root / ".venv" / "bin" / "python", *arguments]
    return subprocess.run(order, cwd=folder, env=variables, capture_output=True, text=True, timeout=60)


def kvviz_of(root: Path) -> str:
    """The folder of the kvviz that a notebook imports with the environment of ``root``."""
    return python(root, "-c", "import kvviz; print(kvviz.__path__[0])").stdout.strip()


def wrong_paths(root: Path) -> str:
    """What ``kvviz doctor`` says if it is started in ``root``."""
    return python(root, "-c", "from kvviz import environment as e; print(e.wrong_paths())", folder=root).stdout.strip()


def install(root: Path, index: str = "") -> None:
    """Make an environment that locates kvviz as an editable installation does, without pip and without a network."""
    venv.create(root / ".venv", clear=True)
    (packages,) = (root / ".venv" / "lib").glob("python*/site-packages")
    (packages / "__editable__.kvviz-0.2.0.pth").write_text(f"{root}\n")
    command = root / ".venv" / "bin" / "kvviz"
    command.write_text(f"#!{root}/.venv/bin/python\nimport kvviz\nprint(kvviz.__path__[0])\n")
    command.chmod(0o755)


@pytest.fixture
def kit(tmp_path, monkeypatch) -> Path:
    """A small clone, whose environment is set up."""
    root = tmp_path / "kit"
    root.mkdir()
    shutil.copytree(ROOT / "kvviz", root / "kvviz", ignore=shutil.ignore_patterns("__pycache__", "assets", "template"))
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    monkeypatch.setattr(environment, "_install", install)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    environment.set_up(root)
    return root


def started(root: Path) -> str:
    """Run the installed command ``kvviz`` of a clone, with the Python that its first line names."""
    return subprocess.run([root / ".venv" / "bin" / "kvviz"], capture_output=True, text=True).stdout.strip()


def test_a_complete_environment_is_left_alone(kit, monkeypatch, capsys):
    assert kvviz_of(kit) == started(kit) == str(kit / "kvviz") and wrong_paths(kit) == ""
    monkeypatch.setattr(environment, "_install", None)
    environment.set_up(kit)
    assert capsys.readouterr().out == ""


def test_a_clone_that_was_moved_is_noticed_and_mended(kit, monkeypatch, capsys):
    moved = kit.parent / "moved"
    subprocess.run(["mv", kit, moved], check=True)
    assert kvviz_of(moved) == ""
    assert (
        wrong_paths(moved) == f"a notebook in another folder cannot import kvviz, although kvviz is here: {moved}/kvviz"
    )
    monkeypatch.setattr(environment, "_install", None)
    environment.set_up(moved)
    assert capsys.readouterr().out == f"This folder was {kit} when .venv was made. The paths in .venv are corrected.\n"
    assert kvviz_of(moved) == started(moved) == str(moved / "kvviz") and wrong_paths(moved) == ""
    environment.set_up(moved)
    assert capsys.readouterr().out == ""


def test_a_clone_at_the_old_path_is_not_used(kit):
    copy = kit.parent / "kit2"  # the old path is the beginning of the new one
    subprocess.run(["cp", "-r", kit, copy], check=True)
    assert kvviz_of(copy) == f"{kit}/kvviz"
    assert (
        wrong_paths(copy) == f"a notebook in another folder imports kvviz from {kit}/kvviz, and not from {copy}/kvviz"
    )
    environment.set_up(copy)
    assert kvviz_of(copy) == started(copy) == f"{copy}/kvviz" and wrong_paths(copy) == ""
    assert kvviz_of(kit) == started(kit) == f"{kit}/kvviz" and wrong_paths(kit) == ""


def test_a_command_that_starts_another_python_is_noticed(kit):
    command = kit / ".venv" / "bin" / "jupyter"
    command.write_text("#!/bin/sh\n'''exec' \"/old kit/.venv/bin/python\" \"$0\" \"$@\"\n' '''\n")
    assert wrong_paths(kit) == f"the command {command} starts the Python of another folder, /old kit/.venv/bin"


def test_paths_that_cannot_be_corrected_make_a_new_environment(kit, monkeypatch, capsys):
    moved = kit.parent / "moved"
    subprocess.run(["mv", kit, moved], check=True)
    monkeypatch.setattr(environment, "move", lambda *_: None)
    environment.set_up(moved)
    assert "It is made again." in capsys.readouterr().out
    assert kvviz_of(moved) == str(moved / "kvviz")


@pytest.mark.parametrize("name", ["requirements.txt", "pyproject.toml"])
def test_other_requirements_make_a_new_environment(kit, monkeypatch, name):
    calls = []
    monkeypatch.setattr(environment, "_install", lambda root, index: calls.append((root, index)))
    with (kit / name).open("a") as file:
        file.write("# more\n")
    environment.set_up(kit, "an-index")
    environment.set_up(kit, "an-index")
    assert calls == [(kit, "an-index")]


def test_an_interrupted_set_up_is_done_again(kit, monkeypatch):
    def interrupted(root, index):
        raise KeyboardInterrupt

    (kit / ".venv" / environment.STAMP).write_text("")
    monkeypatch.setattr(environment, "_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environment.set_up(kit)
    calls = []
    monkeypatch.setattr(environment, "_install", lambda root, index: calls.append(root))
    environment.set_up(kit)
    assert calls == [kit] and json.loads((kit / ".venv" / environment.STAMP).read_text())["folder"] == str(kit)


def test_what_is_installed(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(environment.subprocess, "run", lambda order, **options: calls.append((order[1:], options)))
    environment._install(tmp_path, "")
    environment._install(tmp_path, "an-index")
    made, plain, _, indexed = calls
    assert made[0] == ["-m", "venv", "--clear", str(tmp_path / ".venv")]
    assert plain == (["-m", "pip", "install", "-r", "requirements.txt"], {"cwd": tmp_path, "check": True})
    assert indexed[0] == ["-m", "pip", "install", "--extra-index-url", "an-index", "-r", "requirements.txt"]


def test_a_failure_is_one_sentence_and_a_status(monkeypatch, capsys):
    def fail(*_):
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(environment, "set_up", fail)
    assert environment.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


TWICE = """if True:
    import sys, time
    from pathlib import Path
    from kvviz import environment
    def install(root, index):
        print("installs", flush=True)
        sys.stdin.readline()
        (root / ".venv").mkdir(exist_ok=True)
    environment._install = install
    environment.WAIT_SECONDS = float(sys.argv[2])
    environment.set_up(Path(sys.argv[1]))
    print("ready")"""


def begin(root: Path, wait_seconds: float = 60) -> subprocess.Popen:
    order, pipe = [sys.executable, "-c", TWICE, str(root), str(wait_seconds)], subprocess.PIPE
    return subprocess.Popen(order, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def empty(tmp_path) -> Path:
    for name in ("requirements.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    return tmp_path


def test_two_set_ups_at_once_make_one_environment(empty):
    first = begin(empty)
    assert first.stdout.readline() == "installs\n"
    second = begin(empty)
    said = second.stdout.readline()
    assert said.startswith(f"Waiting for process {first.pid}, which sets up .venv, until ")
    assert first.communicate("\n", timeout=60)[0] == "ready\n"
    assert second.communicate("\n", timeout=60)[0] == "ready\n"


def test_waiting_for_a_set_up_ends_with_a_sentence(empty):
    first = begin(empty)
    assert first.stdout.readline() == "installs\n"
    _, said = begin(empty, wait_seconds=0.3).communicate("", timeout=60)
    assert f"process {first.pid} is still setting up the same folder. End process {first.pid}" in said
    first.communicate("\n", timeout=60)
