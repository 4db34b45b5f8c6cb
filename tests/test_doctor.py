"""The doctor: records of what is there, never an exception about what is not; and the command line around it."""

import builtins
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvviz import __main__ as cli
from kvviz import doctor
from kvviz.doctor import Check
from kvviz.engine import weights
from kvviz.kernels import runtime


def by_name() -> dict[str, Check]:
    return {check.name: check for check in doctor.checks()}


@pytest.fixture
def whole_model(monkeypatch):
    monkeypatch.setattr(weights, "fault", lambda path=None: None)


@pytest.fixture
def without(monkeypatch):
    """``without("torch")``: importing it fails as if it were not installed."""
    true_import = builtins.__import__

    def hide(*names: str) -> None:
        for module in list(sys.modules):
            if module.partition(".")[0] in names:
                monkeypatch.delitem(sys.modules, module)

        def guarded(name, *arguments, **options):
            if name.partition(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return true_import(name, *arguments, **options)

        monkeypatch.setattr(builtins, "__import__", guarded)

    return hide


def test_a_whole_machine_is_ready(whole_model):
    made = doctor.checks()
    assert [check.name for check in made] == list(doctor.CHECKS)
    assert [check for check in made if check.status == "fail"] == []
    assert doctor.ready(made)


def test_the_text_has_a_line_each_and_a_remedy_below():
    made = (Check("model", "fail", "absent", "fetch it"), Check("torch", "ok", "2.13.0"))
    first, second, third = doctor.render(made).splitlines()
    assert first.split() == ["fail", "model", "absent"]
    assert second.strip() == "-> fetch it"
    assert third.split() == ["ok", "torch", "2.13.0"]
    assert first.index("absent") == third.index("2.13.0")


def test_about_ten_lines_when_all_is_well(whole_model, monkeypatch):
    monkeypatch.setattr(doctor, "browser", lambda: "chromium")
    assert len(doctor.render(doctor.checks()).splitlines()) == len(doctor.CHECKS) == 10


def test_only_a_fail_stands_in_the_way():
    note, fail = Check("browser", "note", "none", "get one"), Check("model", "fail", "absent", "fetch it")
    assert doctor.ready((note,))
    assert not doctor.ready((note, fail))


@pytest.mark.parametrize(("status", "remedy"), [("bad", ""), ("ok", "do this"), ("fail", "")])
def test_a_check_without_a_fitting_remedy_is_refused(status, remedy):
    with pytest.raises(ValueError, match="status" if status == "bad" else "remedy"):
        Check("model", status, "text", remedy)


def test_torch_missing_is_a_line_and_the_rest_goes_on(without, whole_model, monkeypatch):
    monkeypatch.delitem(sys.modules, "kvviz.kernels.runtime", raising=False)
    monkeypatch.delattr("kvviz.kernels.runtime", raising=False)
    without("torch")
    made = by_name()
    assert (made["torch"].status, made["torch"].text) == ("fail", "torch is not installed")
    assert "requirements.txt" in made["torch"].remedy
    assert made["kernels"].status == "fail"
    assert made["python"].status == made["model"].status == "ok"


def test_psutil_missing_is_a_line(without):
    without("psutil")
    assert by_name()["memory"].text == "psutil is not installed"


def test_triton_missing_says_what_works_without_it(monkeypatch):
    find_spec = doctor.importlib.util.find_spec
    hidden = lambda name, *more: None if name == "triton" else find_spec(name, *more)  # noqa: E731
    monkeypatch.setattr(doctor.importlib.util, "find_spec", hidden)
    made = by_name()
    assert (made["triton"].status, made["triton"].remedy) == ("fail", runtime.INSTALL_HINT)
    assert made["kernels"].status == "fail"


def test_a_relative_cache_is_a_line(monkeypatch):
    monkeypatch.setenv("KVVIZ_CACHE", "mine")
    made = by_name()["model"]
    assert (made.status, made.remedy) == ("fail", "Then run: python -m kvviz fetch")
    assert made.text.startswith("KVVIZ_CACHE is 'mine', a relative path")


def test_a_check_that_breaks_is_a_line_with_the_error(monkeypatch):
    def broken(name):
        raise OSError("libtorch.so:\n cannot open")

    monkeypatch.setitem(doctor.CHECKS, "torch", (broken, "mend it"))
    assert by_name()["torch"] == Check("torch", "fail", "OSError: libtorch.so: cannot open", "mend it")


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("nbclient", "gguf") else "1.0")
    assert doctor._jupyter("jupyter") == Check("jupyter", "fail", "not installed: nbclient, gguf", doctor.INSTALL)


@pytest.mark.parametrize(("version", "status"), [("2.10.1", "fail"), ("2.11.0+cpu", "ok"), ("3.0.0.dev1", "ok")])
def test_an_old_version_is_a_fail(version, status):
    assert doctor._at_least("torch", version, (2, 11)).status == status


def test_little_memory_is_a_note():
    assert doctor._memory("memory", 1 << 30, 8 << 30, 2 << 30).status == "note"
    assert doctor._memory("memory", 2 << 30, 8 << 30, 2 << 30) == Check("memory", "ok", "at least 2 of 8.0 GiB free")
    assert doctor._memory("memory", 3 << 30, 8 << 30, 2 << 30).text == "at least 2 of 8.0 GiB free"


@pytest.mark.parametrize(
    ("fault", "status"), [("is absent", "fail"), ("has 5 bytes instead of 98,362,432", "fail"), (None, "ok")]
)
def test_the_model_line(monkeypatch, fault, status):
    monkeypatch.setattr(weights, "fault", lambda path=None: fault)
    check = by_name()["model"]
    assert check.status == status
    assert str(weights.model_path()) in check.text and (fault or "") in check.text
    assert check.remedy == ("python -m kvviz fetch" if fault else "")


def test_no_browser_is_a_note(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert by_name()["browser"].status == "note"


def test_a_gpu_is_named_and_needs_a_compiler(monkeypatch):
    import torch

    monkeypatch.setattr(runtime, "prepare", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(doctor, "_compiler_missing", lambda: None)
    assert doctor._kernels("kernels") == Check("kernels", "ok", "run on: NVIDIA H200 (compute capability 9.0)")
    monkeypatch.setattr(doctor, "_compiler_missing", lambda: "a C compiler (gcc or clang)")
    assert doctor._kernels("kernels").status == "fail"


def test_a_full_gpu_is_a_note_with_what_to_do(monkeypatch):
    import torch

    def no_context():
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(runtime, "prepare", lambda: "interpreter")
    monkeypatch.setattr(runtime, "full", lambda: "The GPU is full: shut down what you have finished.")
    check = doctor._kernels("kernels")
    assert (check.status, check.remedy) == ("note", "The GPU is full: shut down what you have finished.")
    assert check.text == "run in Triton's interpreter on the CPU: the GPU is full"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", no_context)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=8 << 30))
    check = doctor._gpu_memory("GPU memory")
    assert (check.status, check.text) == ("note", "0.0 of 8.0 GiB free")


def test_what_a_compiler_needs(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "gcc" in doctor._compiler_missing()
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h" in doctor._compiler_missing()
    (tmp_path / "Python.h").touch()
    assert doctor._compiler_missing() is None


def test_the_command_exits_with_what_it_found(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "checks", lambda: (Check("model", "fail", "absent", "fetch it"),))
    assert cli.main(["doctor"]) == 1
    assert "fetch it" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "checks", lambda: (Check("model", "ok", "there"),))
    assert cli.main(["doctor"]) == 0


def test_commands_import_only_what_they_need():
    """The parser and fetch run without torch, triton and Jupyter."""
    script = (
        "import sys, kvviz.__main__, kvviz.engine.weights\n"
        "kvviz.__main__._parser().parse_args(['report', '--out', 'x'])\n"
        "print(sorted({'torch', 'triton', 'gguf', 'nbconvert', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_report_gets_folders_and_names(monkeypatch, tmp_path):
    got = []
    fake = SimpleNamespace(main=lambda *arguments, archive: got.append((*arguments, archive)) or 3)
    monkeypatch.setitem(sys.modules, "kvviz.report.export", fake)
    monkeypatch.setattr("kvviz.report.export", fake, raising=False)
    options = ["--notebooks", str(tmp_path), "--out", str(tmp_path / "html"), "--archive", "course.zip"]
    status = cli.main(["report", *options, "01_cell", "02_two"])
    (notebooks, out, only, machine, archive) = got.pop()
    assert (status, notebooks, out, only) == (3, tmp_path, tmp_path / "html", ["01_cell", "02_two"])
    assert archive == Path("course.zip")
    assert {"kernels", "machine", "torch", "triton", "python", "kvviz"} == set(machine)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError("There is no notebook\n 99."), "kvviz fetch: There is no notebook 99."),
        (ModuleNotFoundError("No module named 'gguf'", name="gguf"), "kvviz fetch: the package gguf is not installed"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(monkeypatch, capsys, error, words):
    def failing():
        raise error

    monkeypatch.setattr(weights, "fetch", failing)
    assert cli.main(["fetch"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(words) and said.count("\n") == 1


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(weights, "fetch", lambda: {}["missing"])
    assert cli.main(["fetch"]) == cli.MISTAKE
    assert "Traceback" in (said := capsys.readouterr().err) and "KeyError: 'missing'" in said


def test_the_doctor_changes_nothing_but_the_choice_of_triton(whole_model):
    runtime.prepare()
    before = dict(os.environ)
    doctor.checks()
    assert dict(os.environ) == before
