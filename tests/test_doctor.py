"""Tests of ``kvviz doctor`` and of the command ``kvviz``. A missing thing gives a line, and never an exception."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvviz
from kvviz import __main__ as cli
from kvviz import doctor, environment
from kvviz.doctor import Check
from kvviz.engine import weights
from kvviz.kernels import runtime
from kvviz.report.export import Around

ROOT = Path(kvviz.__file__).parents[1]
MAIN = "import sys; from kvviz.__main__ import main; sys.exit(main(sys.argv[1:]))"
import_problems = doctor.import_problems


@pytest.fixture(autouse=True)
def problems(monkeypatch) -> dict[str, str]:
    """Stand in for the import of all packages, which takes seconds. A test may put problems into the empty dict."""
    found = {}
    monkeypatch.setattr(doctor, "import_problems", lambda: found)
    monkeypatch.setattr(environment, "wrong_paths", lambda: "")
    return found


def by_name() -> dict[str, Check]:
    return {check.name: check for check in doctor.checks()}


@pytest.fixture
def whole_model(monkeypatch):
    monkeypatch.setattr(weights, "fault", lambda path=None: None)


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
    assert len(doctor.render(doctor.checks()).splitlines()) == len(doctor.CHECKS) == 11


def test_only_a_fail_stands_in_the_way():
    note, fail = Check("browser", "note", "none", "get one"), Check("model", "fail", "absent", "fetch it")
    assert doctor.ready((note,))
    assert not doctor.ready((note, fail))


@pytest.mark.parametrize(("status", "remedy"), [("bad", ""), ("ok", "do this"), ("fail", "")])
def test_a_check_without_a_fitting_remedy_is_refused(status, remedy):
    with pytest.raises(ValueError, match="status" if status == "bad" else "remedy"):
        Check("model", status, "text", remedy)


def test_without_torch_the_other_checks_go_on(problems, whole_model):
    problems |= dict.fromkeys(["torch", "triton", "psutil"], "is not installed")
    made = by_name()
    for name, text in (("torch", "torch"), ("triton", "triton"), ("memory", "psutil")):
        assert (made[name].status, made[name].text) == ("fail", f"not installed: {text}")
        assert made[name].remedy == doctor.install_command("kernels")
    assert made["kernels"].text == "need torch and triton" and made["GPU memory"].text == "needs torch"
    assert made["python"].status == made["audit"].status == made["model"].status == "ok"


def test_triton_missing_says_what_works_without_it(problems):
    problems["triton"] = "is not installed"
    made = by_name()
    assert (made["triton"].status, made["triton"].remedy) == ("fail", runtime.INSTALL_HINT)
    assert made["kernels"].status == "fail"


def test_a_package_that_raises_is_named_with_its_error(problems):
    problems |= {
        "triton": "raises RuntimeError: boom",
        "gguf": "raises ValueError: bad",
        "nbclient": "is not installed",
    }
    made = by_name()
    assert (made["triton"].status, made["triton"].text) == ("fail", "triton raises RuntimeError: boom")
    assert made["triton"].remedy.endswith("Otherwise install again: triton.")
    assert made["jupyter"].text == "not installed: nbclient"
    del problems["nbclient"]
    assert by_name()["jupyter"].text == "gguf raises ValueError: bad"


def test_what_is_approved_was_imported(tmp_path, monkeypatch):
    """Files with the names of packages do each kind of damage: they raise an error, end Python, or wait forever."""
    monkeypatch.setattr(doctor, "import_problems", import_problems)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "IMPORT_SECONDS", 20)
    (tmp_path / "triton.py").write_text("raise RuntimeError('boom,\\n  twice')")
    (tmp_path / "tokenizers.py").write_text("import os; print('kvviz? no', flush=True); os._exit(3)")
    (tmp_path / "gguf.py").write_text("import sys; sys.exit('no')")
    (tmp_path / "nbformat.py").write_text("import no_such_package")
    modules = ["numpy", "triton", "tokenizers", "gguf", "nbformat", "PIL", "absent_package"]
    assert import_problems(modules) == {
        "triton": "raises RuntimeError: boom, twice",
        "tokenizers": "ends Python with status 3",
        "gguf": "raises SystemExit: no",
        "nbformat": "raises ModuleNotFoundError: No module named 'no_such_package'",
        "absent_package": "is not installed",
    }
    (tmp_path / "gguf.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "IMPORT_SECONDS", 3)
    assert import_problems(["gguf"]) == {"gguf": "is not imported after 3 s"}


@pytest.mark.slow
def test_every_package_here_can_be_imported():
    assert import_problems() == {}


def test_a_folder_that_was_moved_is_a_fail(monkeypatch):
    monkeypatch.setattr(environment, "wrong_paths", lambda: "a notebook imports kvviz from /old")
    made = by_name()["kvviz"]
    assert (made.status, made.text) == ("fail", "a notebook imports kvviz from /old")
    assert "make environment" in made.remedy and "pip install" in made.remedy


def test_a_relative_cache_is_a_line(monkeypatch):
    monkeypatch.setenv("KVVIZ_CACHE", "mine")
    made = by_name()["model"]
    assert (made.status, made.remedy) == ("fail", "Then run: kvviz fetch")
    assert made.text.startswith("KVVIZ_CACHE is 'mine', which is a relative path")


def test_a_check_that_breaks_is_a_line_with_the_error(monkeypatch):
    def broken(name, problems):
        raise OSError("libtorch.so:\n cannot open")

    monkeypatch.setitem(doctor.CHECKS, "torch", (broken, "mend it"))
    assert by_name()["torch"] == Check("torch", "fail", "OSError: libtorch.so: cannot open", "mend it")


def test_packages_that_are_missing_are_named(problems):
    problems |= dict.fromkeys(["nbclient", "gguf"], "is not installed")
    hint = doctor.install_command("notebook")
    assert by_name()["jupyter"] == Check("jupyter", "fail", "not installed: nbclient, gguf", hint)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("gguf.constants", "the package gguf, which belongs to the extra 'notebook' of kvviz, is not installed: "),
        ("torch", "the package torch, which belongs to the extra 'kernels' of kvviz, is not installed: "),
        ("PIL", "the package pillow is not installed: "),
        ("mooncake", "the package mooncake is not installed: run python -m pip install mooncake"),
    ],
)
def test_a_missing_package_names_the_extra(module, words):
    said = doctor.missing_package(module)
    assert said.startswith(words)
    assert "which belongs" not in said or ".[" in said


def test_an_extra_is_installed_as_kvviz_is(monkeypatch):
    assert "pip install -e '.[kernels]'" in doctor.install_command("kernels")
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(ROOT))
    assert "pip install '.[kernels]'" in doctor.install_command("kernels")


@pytest.mark.parametrize(("version", "status"), [("2.10.1", "fail"), ("2.11.0+cpu", "ok"), ("3.0.0.dev1", "ok")])
def test_an_old_version_is_a_fail(version, status):
    assert doctor._at_least("torch", version, (2, 11), "", "install it").status == status


def test_little_memory_is_a_note():
    assert doctor._memory("memory", 1 << 30, 8 << 30, 2 << 30).status == "note"
    assert doctor._memory("memory", 2 << 30, 8 << 30, 2 << 30) == Check(
        "memory", "ok", "8.0 GiB, of which at least 2 GiB are free"
    )
    assert doctor._memory("memory", 3 << 30, 8 << 30, 2 << 30).text == "8.0 GiB, of which at least 2 GiB are free"


@pytest.mark.parametrize(
    ("fault", "status"), [("is absent", "fail"), ("has 5 bytes instead of 98,362,432", "fail"), (None, "ok")]
)
def test_the_model_line(monkeypatch, fault, status):
    monkeypatch.setattr(weights, "fault", lambda path=None: fault)
    check = by_name()["model"]
    assert check.status == status
    assert str(weights.model_path()) in check.text and (fault or "") in check.text
    assert check.remedy == ("kvviz fetch" if fault else "")


def test_no_browser_is_a_note(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert by_name()["browser"].status == "note"


def test_a_gpu_is_named_and_needs_a_compiler(monkeypatch):
    import torch

    monkeypatch.setattr(runtime, "prepare", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(doctor, "_compiler_missing", lambda: None)
    assert doctor._kernels("kernels", {}) == Check("kernels", "ok", "run on: NVIDIA H200 (compute capability 9.0)")
    monkeypatch.setattr(doctor, "_compiler_missing", lambda: "a C compiler (gcc or clang)")
    assert doctor._kernels("kernels", {}).status == "fail"


def test_a_full_gpu_is_a_note_with_what_to_do(monkeypatch):
    import torch

    def no_context():
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(runtime, "prepare", lambda: "interpreter")
    monkeypatch.setattr(runtime, "full", lambda: "The GPU is full: shut down what you have finished.")
    check = doctor._kernels("kernels", {})
    assert (check.status, check.remedy) == ("note", "The GPU is full: shut down what you have finished.")
    assert check.text == "run in Triton's interpreter on the CPU: the GPU is full"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", no_context)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=8 << 30))
    check = doctor._gpu_memory("GPU memory", {})
    assert (check.status, check.text) == ("note", "8.0 GiB, of which 0.0 GiB are free")


@pytest.mark.parametrize(("cuda", "words"), [(None, "CUDA build of torch"), ("12.8", "new enough for CUDA 12.8")])
def test_a_gpu_that_torch_cannot_use_is_a_note(monkeypatch, cuda, words):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    check = doctor._gpu_memory("GPU memory", {})
    assert (check.status, check.text) == ("note", "torch cannot use the NVIDIA GPU") and words in check.remedy


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


@pytest.mark.parametrize(("failed", "said"), [("torch", True), ("model", False), ("audit", False)])
def test_an_installation_without_extras_learns_that_the_audit_works(monkeypatch, capsys, failed, said):
    monkeypatch.setattr(doctor, "checks", lambda: (Check(failed, "fail", "absent", "get it"),))
    doctor.main()
    assert ("The command kvviz audit works already." in capsys.readouterr().out) == said


def test_the_parser_and_the_model_file_need_no_package():
    script = (
        "import sys, kvviz.__main__, kvviz.engine.weights\n"
        "kvviz.__main__._parser().parse_args(['report', '--out', 'x'])\n"
        "print(sorted({'numpy', 'torch', 'triton', 'gguf', 'nbconvert', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


WITHOUT_EXTRAS = """if True:
    import importlib.abc, sys
    from kvviz import doctor
    hidden = {module for extra, modules in doctor.PACKAGES.items() if extra for module in modules}
    class Hide(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in hidden:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Hide())
    from kvviz.__main__ import main
    sys.exit(main(sys.argv[1:]))"""


@pytest.mark.parametrize("command", ["fetch", "report", "workshop"])
def test_a_command_without_its_extra_names_the_extra(command):
    order = [sys.executable, "-c", WITHOUT_EXTRAS, command]
    done = subprocess.run(order, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"kvviz {command}: the package ") and ".[notebook]" in done.stderr


def test_report_gets_folders_and_names(monkeypatch, tmp_path):
    got = []
    kept = lambda *arguments, archive, around: got.append((*arguments, archive, around)) or 3  # noqa: E731
    fake = SimpleNamespace(main=kept, Around=Around)
    monkeypatch.setitem(sys.modules, "kvviz.report.export", fake)
    monkeypatch.setattr("kvviz.report.export", fake, raising=False)
    options = ["--notebooks", str(tmp_path), "--out", str(tmp_path / "html"), "--archive", "course.zip"]
    status = cli.main(["report", *options, "01_cell", "02_two"])
    (notebooks, out, only, machine, archive, around) = got.pop()
    assert around.opening == "" and around.documents == (), "these are not the notebooks of kvviz"
    assert (status, notebooks, out, only) == (3, tmp_path, tmp_path / "html", ["01_cell", "02_two"])
    assert archive == Path("course.zip")
    assert {"kernels", "machine", "torch", "triton", "python", "kvviz"} == set(machine)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError("There is no notebook\n 99."), "kvviz fetch: There is no notebook 99."),
        (
            ModuleNotFoundError("No module named 'gguf'", name="gguf"),
            "kvviz fetch: the package gguf, which belongs to the",
        ),
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
