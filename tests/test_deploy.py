"""Tests of the Hub's configuration: it loads, divides the cores, and never overwrites the work of a participant."""

import os
import pwd
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from traitlets.config import Config

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "deploy" / "jupyterhub_config.py"


def load(monkeypatch, **variables: str) -> tuple[Config, dict]:
    for name in ("KVVIZ_SEATS", "KVVIZ_GROUP", "KVVIZ_HUB_URL", "KVVIZ_CACHE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVVIZ_NOTEBOOKS", str(ROOT / "notebooks"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = Config()
    return config, runpy.run_path(str(CONFIG), {"get_config": lambda: config})


def test_cores_are_divided_by_the_seats(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    config, _ = load(monkeypatch, KVVIZ_SEATS="8", KVVIZ_CACHE="/srv/model")
    assert config.Spawner.environment["OMP_NUM_THREADS"] == "8" and config.JupyterHub.active_server_limit == 8
    assert (
        config.Spawner.environment["KVVIZ_CACHE"] == "/srv/model"
        and "TRITON_INTERPRET" not in config.Spawner.environment
    )
    config, _ = load(monkeypatch, KVVIZ_SEATS="100")
    assert config.Spawner.environment["MKL_NUM_THREADS"] == "1" and "KVVIZ_CACHE" not in config.Spawner.environment


def test_only_the_group_may_log_in_and_only_from_this_machine(monkeypatch):
    config, _ = load(monkeypatch)
    assert config.JupyterHub.bind_url == "http://127.0.0.1:8000" and config.PAMAuthenticator.allowed_groups == {"kvviz"}
    assert "allow_all" not in config.Authenticator and config.Spawner.cmd[0].startswith(
        str(Path(sys.executable).parent)
    )


def test_without_the_participants_copies_it_does_not_start(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="gone does not exist: run python -m kvviz workshop in"):
        load(monkeypatch, KVVIZ_NOTEBOOKS=str(tmp_path / "gone"))


def test_notebooks_are_copied_once(monkeypatch, tmp_path):
    config, names = load(monkeypatch)
    me, run = SimpleNamespace(pw_dir=str(tmp_path), pw_uid=7, pw_gid=8), []
    monkeypatch.setattr(pwd, "getpwnam", lambda name: {"ann": me}[name])
    ours = subprocess.run

    def as_myself(command, user, group, extra_groups, **more):
        run.append((user, group, extra_groups))
        return ours(command, **more)

    monkeypatch.setattr(subprocess, "run", as_myself)
    folder = tmp_path / names["FOLDER"]
    config.Spawner.pre_spawn_hook(SimpleNamespace(user=SimpleNamespace(name="ann")))
    there = {path.name for path in folder.iterdir()}
    assert there == {path.name for path in (ROOT / "notebooks").iterdir() if path.suffix in (".ipynb", ".json")}
    (folder / "01_anatomy_of_a_cell.ipynb").write_text("mine")
    (folder / "recorded_kernels.json").unlink()
    config.Spawner.pre_spawn_hook(SimpleNamespace(user=SimpleNamespace(name="ann")))
    assert (folder / "01_anatomy_of_a_cell.ipynb").read_text() == "mine" and (
        folder / "recorded_kernels.json"
    ).is_file()
    assert run == [(7, 8, []), (7, 8, [])] and config.Spawner.notebook_dir == "~/" + folder.name


def test_a_home_that_cannot_be_written_to_stops_the_start(monkeypatch, tmp_path):
    config, _ = load(monkeypatch)
    gone = SimpleNamespace(pw_dir=str(tmp_path / "gone"), pw_uid=os.getuid(), pw_gid=os.getgid())
    monkeypatch.setattr(pwd, "getpwnam", lambda name: gone)
    ours = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, user, group, extra_groups, **more: ours(command, **more))
    with pytest.raises(subprocess.CalledProcessError):
        config.Spawner.pre_spawn_hook(SimpleNamespace(user=SimpleNamespace(name="ann")))
