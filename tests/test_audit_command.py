"""``python -m kvviz audit``: its output, exit status and imports, and that a hostile file does no harm."""

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest

from kvviz import __main__ as command
from kvviz.audit.audit import audit_views
from kvviz.audit.views_file import MAX_CLAIMS, MAX_FILE_BYTES, MAX_VIEWS, read

ROOT = Path(command.__file__).parents[1]
WIDE = 1 << 40


def written(folder: Path, views: list[dict], claims: list[dict] = (), nbytes: int = WIDE) -> Path:
    """Write a views file with one storage. Fields that a view leaves out get usual values."""
    usual = {"storage": "s", "dtype": "uint8", "shape": [4], "stride": [1]}
    file = {"format": "kvviz-views", "version": 1, "storages": [{"name": "s", "nbytes": nbytes}]}
    file |= {"views": [{"name": f"v{n}"} | usual | view for n, view in enumerate(views)], "claims": list(claims)}
    path = folder / "views.json"
    path.write_text(json.dumps(file))
    return path


def test_clean_findings_unusable(tmp_path, capsys):
    assert command.main(["audit", str(written(tmp_path, [{}]))]) == 0
    assert capsys.readouterr().out.startswith("clean: every claim holds. Look next at ordering")
    assert command.main(["audit", str(written(tmp_path, [{}], nbytes=3))]) == 1
    assert "out_of_bounds: v0: 1 element, 1 byte of s" in capsys.readouterr().out
    assert command.main(["audit", str(written(tmp_path, [{"shape": [-1]}]))]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err == "kvviz audit: views[0].shape[0]: must be at least 0, not -1\n"


def test_a_warning_alone_is_clean(tmp_path, capsys):
    claim = {"kind": "aligned", "view": "v0", "boundary_bytes": 32, "required": False}
    path = written(tmp_path, [{"shape": [3, 4], "stride": [33, 1]}], [claim])
    assert command.main(["audit", str(path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "clean, with 1 warning" in told and 'Not all rows of "v0" start at a multiple of 32 bytes.' in told
    assert command.main(["audit", str(path), "-v"]) == 0
    assert "1. unaligned (warning)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ({"kind": "belongs_at", "view": "v0", "rightful": "v1"}, "they must be equal"),
        ({"kind": "addressed", "view": "v0", "address_type": "int33"}, "int33"),
    ],
)
def test_a_claim_that_does_not_fit_is_a_sentence(tmp_path, capsys, claim, said):
    assert command.main(["audit", str(written(tmp_path, [{}, {"shape": [5]}], [claim]))]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_a_claim_that_is_too_much_work_is_no_clean_file(tmp_path, capsys):
    views = [{"shape": [3000, 1], "stride": [16, 1]}, {"shape": [3000, 1], "stride": [17, 1], "offset": 60_000}]
    claims = [{"kind": "overlay", "views": ["v0", "v1"]}]
    assert command.main(["audit", str(written(tmp_path, views, claims))]) == 3
    assert "collision of v0, v1: not judged: the block strides of v0, v1 differ" in capsys.readouterr().out


def test_no_file_and_no_folder_to_write_to(tmp_path, capsys):
    assert command.main(["audit", str(tmp_path / "none.json")]) == 2
    assert command.main(["audit", str(tmp_path)]) == 2
    assert command.main(["audit", str(written(tmp_path, [{}])), "--json", str(tmp_path / "no" / "out.json")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 3 and f"cannot write {tmp_path / 'no' / 'out.json'}" in told


def test_json_and_html_are_written_and_repeat(tmp_path):
    path = written(tmp_path, [{}, {"stride": [2]}], [{"kind": "disjoint", "views": ["v0", "v1"]}], nbytes=64)
    outs = []
    for number in range(2):
        out, page = tmp_path / f"{number}.json", tmp_path / f"{number}.html"
        assert command.main(["audit", str(path), "--json", str(out), "--html", str(page)]) == 1
        outs.append((out.read_bytes(), page.read_bytes()))
    assert outs[0] == outs[1]
    assert json.loads(outs[0][0])["findings"][0]["kind"] == "collision"
    assert outs[0][1].startswith(b"<!DOCTYPE html>")


def test_an_output_never_overwrites_the_input_or_the_other_output(tmp_path, capsys):
    path = written(tmp_path, [{}])
    before = path.read_bytes()
    link, hard, other = tmp_path / "link.json", tmp_path / "hard.json", tmp_path / "other.json"
    link.symlink_to(path)
    hard.hardlink_to(path)
    for option in ("--json", "--html"):
        for out in (path, link, hard, tmp_path / "." / ".." / tmp_path.name / path.name):
            assert command.main(["audit", str(path), option, str(out)]) == 2
            told = capsys.readouterr()
            assert told.out == "" and f"{option} and FILE are the same file" in told.err and told.err.count("\n") == 1
    assert command.main(["audit", str(path), "--json", str(other), "--html", str(other)]) == 2
    assert "--html and --json are the same file" in capsys.readouterr().err
    assert path.read_bytes() == before and not other.exists()


def test_an_output_that_is_a_link_stays_a_link(tmp_path):
    path, out, link = written(tmp_path, [{}]), tmp_path / "out.json", tmp_path / "link.json"
    link.symlink_to(out)
    assert command.main(["audit", str(path), "--json", str(link)]) == 0
    assert link.is_symlink() and json.loads(out.read_text())["clean"] is True
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link.json", "out.json", "views.json"]
    assert command.main(["audit", str(path), "--json", os.devnull]) == 0
    assert not Path(os.devnull).is_file()


def test_a_file_without_views_is_empty_and_not_clean(tmp_path, capsys):
    path, out = written(tmp_path, []), tmp_path / "out.json"
    assert command.main(["audit", str(path), "--json", str(out)]) == 4
    assert capsys.readouterr().out.startswith("empty: the file has no views")
    told = json.loads(out.read_text())
    assert (told["clean"], told["empty"]) == (False, True)


def test_a_folder_or_a_pipe_is_no_views_file(tmp_path, capsys):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert command.main(["audit", str(fifo)]) == 2
    assert command.main(["audit", str(tmp_path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"kvviz audit: {fifo} is not a regular file: give the path of a views file",
        f"kvviz audit: {tmp_path} is a folder: give the path of a views file",
    ]


def test_a_pipe_that_closes_early_keeps_the_status(tmp_path):
    for nbytes, status in ((3, 1), (4, 0)):
        out = tmp_path / f"{nbytes}.json"
        order = [
            sys.executable,
            "-m",
            "kvviz",
            "audit",
            str(written(tmp_path, [{}], nbytes=nbytes)),
            "--json",
            str(out),
        ]
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(order, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(writer)
        assert (done.returncode, done.stderr) == (status, "")
        assert json.loads(out.read_text())["version"] == 2


def test_the_page_links_to_the_lesson(tmp_path):
    views = [{"name": "content", "shape": [4, 24], "stride": [32, 1]}]
    views += [{"name": "sent", "shape": [4, 20], "stride": [32, 1]}]
    path = written(tmp_path, views, [{"kind": "covers", "extent": "sent", "content": ["content"]}], nbytes=128)
    out = tmp_path / "deep" / "er" / "page.html"
    out.parent.mkdir(parents=True)
    assert command.main(["audit", str(path), "--html", str(out)]) == 1
    (link,) = re.findall(r'<a href="([^"]*)"', out.read_text())
    lesson = (out.parent / unquote(link)).resolve()
    assert lesson.is_file() and lesson.parent.parent == ROOT and not link.startswith(("/", "file:"))


def test_json_carries_the_diagnoses(tmp_path):
    views = [{"name": "content", "shape": [4, 24], "stride": [32, 1]}]
    views += [{"name": "sent", "shape": [4, 20], "stride": [32, 1]}]
    claims = [{"kind": "covers", "extent": "sent", "content": ["content"]}]
    path, out = written(tmp_path, views, claims, nbytes=128), tmp_path / "out.json"
    assert command.main(["audit", str(path), "--json", str(out)]) == 1
    told = json.loads(out.read_text())
    (one,) = told["diagnoses"]
    assert set(one) == {"cause", "text", "effect", "views", "findings", "repair", "repaired", "proved", "others"}
    assert (one["views"], one["findings"], one["proved"]) == (["sent"], [0], True)
    given = json.loads(path.read_text())
    given["views"] = [view for view in given["views"] if view["name"] != "sent"] + one["repaired"]["views"]
    path.write_text(json.dumps(given))
    assert command.main(["audit", str(path)]) == 0


def test_a_file_of_many_claims_is_judged_in_part(tmp_path, capsys):
    """Six views of irregular strides and 30 claims. Before, a clock ended this audit and printed nothing."""
    views = [{"shape": [680, 64], "stride": [(997, 1009)[n % 2], 13], "offset": 7 * n} for n in range(6)]
    pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
    claims = [{"kind": "covers", "extent": f"v{a}", "content": [f"v{b}"]} for a, b in pairs]
    out = tmp_path / "out.json"
    told = []
    for _ in range(2):
        assert command.main(["audit", str(written(tmp_path, views, claims)), "--json", str(out)]) == 3
        told.append((capsys.readouterr().out, out.read_text()))
    assert told[0] == told[1]
    record = json.loads(told[0][1])
    open_ = [finding for finding in record["findings"] if not finding["judged"]]
    assert (record["clean"], record["all_judged"]) == (False, False) and 0 < len(open_) < len(record["findings"])
    assert all(finding["text"].startswith("not judged: ") and finding["bytes"] is None for finding in open_)
    assert f"{len(open_)} checks not judged" in told[0][0] and f"{len(open_) - 3} more checks not judged" in told[0][0]


def test_the_limit_of_work_is_the_same_in_python_and_in_the_command(tmp_path, capsys):
    views = [{"shape": [680, 64], "stride": [(997, 1009)[n % 2], 13], "offset": 7 * n} for n in range(6)]
    claims = [{"kind": "covers", "extent": f"v{a}", "content": ["v5"]} for a in range(5)] * 4
    path, out = written(tmp_path, views, claims), tmp_path / "out.json"
    given = read(path)
    result = audit_views(given.views, given.claims)
    status = command.main(["audit", str(path), "--json", str(out)])
    assert status == (3 if result.not_judged else 1)
    told = [(finding["kind"], finding["bytes"], finding["text"]) for finding in json.loads(out.read_text())["findings"]]
    assert told == [(finding.kind, finding.bytes, finding.text) for finding in result.findings]


@pytest.mark.parametrize("itemsize", [1000, 4000])
def test_wide_elements_that_overlap_are_counted_as_ranges(tmp_path, itemsize):
    views = [{"shape": [512, 256], "stride": [1, 1], "dtype": {"itemsize": itemsize}, "offset": n} for n in (0, 1)]
    path = written(tmp_path, views, [{"kind": "belongs_at", "view": "v0", "rightful": "v1"}])
    ran, out = run(path), tmp_path / "out.json"
    assert ran.status == 1 and ran.mebibytes < 100, ran
    assert command.main(["audit", str(path), "--json", str(out)]) == 1
    bytes_ = {finding["kind"]: finding["bytes"] for finding in json.loads(out.read_text())["findings"]}
    assert bytes_ == {"self_overlap": 765 * itemsize, "misplaced": 767 * itemsize}


@pytest.mark.parametrize("name", ["one wide view", "40 wide views", "2^53 bytes", "2^60 bytes"])
def test_a_page_changes_neither_the_status_nor_the_limit(tmp_path, name):
    """A page once took 14 s for one view of wide elements, 197 s for 40 of them, and changed the status at 2^53."""
    wide = [{"shape": [4], "dtype": {"itemsize": 1 << 20}, "offset": n} for n in range(40)]
    near = [{"offset": n} for n in (0, 1)]
    views = {"one wide view": wide[:1], "40 wide views": wide}.get(name, near)
    nbytes = {"one wide view": 3 << 20, "2^53 bytes": 1 << 53, "2^60 bytes": 1 << 60}.get(name, WIDE)
    claims = [{"kind": "disjoint", "views": [f"v{n}" for n in range(len(views))]}]
    path, page = written(tmp_path, views, claims, nbytes=nbytes), tmp_path / "page.html"
    plain, shown = run(path), run(path, "--html", page, "--json", tmp_path / "out.json")
    assert plain.status == shown.status == 1 and shown.mebibytes < 100 and shown.seconds < plain.seconds + 2
    assert page.read_text().startswith("<!DOCTYPE html>") and page.stat().st_size < 400_000
    assert "<svg" in page.read_text()


def test_a_pipe_without_a_reader_or_with_one_that_stops(tmp_path, capsys):
    path, fifo = written(tmp_path, [{}], nbytes=3), tmp_path / "fifo"
    os.mkfifo(fifo)
    assert command.main(["audit", str(path), "--json", str(fifo)]) == 2
    assert f"cannot write {fifo} (no program reads this pipe)" in capsys.readouterr().err
    order = f"{sys.executable} -m kvviz audit {path} -v --json /dev/stdout | head -c 20; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", order], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, len(done.stdout)) == (1, "", 20)


def test_reading_in_python_does_not_wait_for_a_pipe_either(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="is not a regular file: give the path of a views file"):
        read(fifo)


CHILD = """
import resource, sys
from pathlib import Path
from kvviz.__main__ import main
status = main(["audit", *sys.argv[1:]])
used, peak = resource.getrusage(resource.RUSAGE_SELF), Path("/proc/self/status").read_text().split("VmHWM:")[1].split()
modules = sorted({"torch", "triton", "matplotlib", "psutil"} & sys.modules.keys())
print("\\n", used.ru_utime + used.ru_stime, int(peak[0]) >> 10, *modules)
sys.exit(status)
"""


@dataclass(frozen=True)
class Ran:
    """The output of a command, and its cost: seconds of processor time, and MiB of memory at the peak."""

    status: int
    out: str
    err: str
    seconds: float
    mebibytes: int
    modules: tuple[str, ...]


def run(path: Path, *options: str | Path) -> Ran:
    """Audit a file in a separate process. The process is killed if it exceeds its limits of memory and time."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))

    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    order = [sys.executable, "-c", CHILD, str(path), *map(str, options)]
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(order, preexec_fn=limit, **how)
    assert done.stdout, done.stderr
    *out, last = done.stdout.splitlines()
    seconds, mebibytes, *modules = last.split()
    return Ran(done.returncode, "\n".join(out), done.stderr, float(seconds), int(mebibytes), tuple(modules))


def hostile(folder: Path) -> dict[str, Path]:
    """Return hostile files: for the name of each fault, the path of a file."""

    def of(name: str, text: str) -> Path:
        (folder / f"{name}.json").write_text(text)
        return folder / f"{name}.json"

    def views(name: str, *args, **options) -> Path:
        return written(folder, *args, **options).rename(folder / f"{name}.json")

    large = folder / "large.json"
    with large.open("wb") as file:
        file.truncate(100_000_000)
    full = MAX_FILE_BYTES - 16
    small = [{"shape": [40], "offset": 4 * n} for n in range(MAX_VIEWS)]
    names = [f"v{n}" for n in range(MAX_VIEWS)]
    mixed = [{"shape": [60, 60], "stride": [60, 1]}, {"shape": [60, 60], "stride": [1, 60]}]
    huge = [{"shape": [10**9], "stride": [3]}, {"shape": [10**9], "stride": [3], "offset": 1}]
    return {
        "100 MB": large,
        "lists": of("lists", "[" + "[]," * (full // 3) + "0]"),
        "objects": of("objects", "[" + '{"a":0},' * (full // 8) + "0]"),
        "numbers": of("numbers", "[" + "257," * (full // 4) + "0]"),
        "one text": of("text", '"' + "x" * full + '"'),
        "long numbers": of("long", "[" + ("9" * 4200 + ",") * (full // 4201) + "0]"),
        "nesting": of("nesting", "[" * full),
        "deep": of("deep", '{"a":' * 200_000 + "1" + "}" * 200_000),
        "10^9 elements": views("elements", huge, [{"kind": "disjoint", "views": ["v0", "v1"]}]),
        "10^18 strides": views("strides", [{"shape": [2], "stride": [10**18]}]),
        "strides of 10^40": views("far", [{"stride": [10**40]}]),
        "repeats": views("repeats", [{"shape": [10**9] * 16, "stride": [0] * 16}]),
        "a name of 1 MB": views("name", [{"name": "x" * 1_000_000}]),
        "views without end": of("many", json.dumps({"format": "kvviz-views", "version": 1, "storages": [],
                                                    "views": [0] * 400_000})),
        "4000 meet 4000": views("meet", [{"shape": [4000, 4000], "stride": [1, 1]}]),
        "each meets nine": views("chain", small[:3000], [{"kind": "disjoint", "views": names[:3000]}]),
        "more views": views("more", [*small, {}], [{"kind": "disjoint", "views": names}]),
        "one claim over and over": views("same", small[:9], [{"kind": "disjoint", "views": names[:9]}] * MAX_CLAIMS),
        "one view over and over": views("ninety", [{}], [{"kind": "disjoint", "views": ["v0"] * 90}] * MAX_CLAIMS),
        "one place over and over": views("place", mixed,
                                         [{"kind": "belongs_at", "view": "v0", "rightful": "v1"}] * MAX_CLAIMS),
        "2^28 addresses": views("addressed", [{"shape": [1 << 28]}],
                                [{"kind": "addressed", "view": "v0", "address_type": "float32"}]),
        "2^21 boundary": views("aligned", [{"shape": [1 << 20, 8], "stride": [9, 1]}],
                               [{"kind": "aligned", "view": "v0", "boundary_bytes": 1 << 21}]),
        "240000 objects": of("small", "[" + '{"a":0},' * 240_000 + "0]"),
        "NaN": of("nan", '{"format": "kvviz-views", "version": NaN, "storages": [], "views": []}'),
    }  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_hostile_files_are_a_sentence_and_cheap(tmp_path):
    for name, path in hostile(tmp_path).items():
        ran = run(path)
        assert ran.status in (0, 1, 2, 3) and "Traceback" not in ran.out + ran.err, (name, ran)
        if ran.status == 2:
            assert ran.err.startswith("kvviz audit: ") and ran.err.count("\n") == 1 and len(ran.err) < 400, (name, ran)
        print(f"{name:24} exit {ran.status}, {ran.seconds:.2f} s of processor time, {ran.mebibytes} MiB")
        assert ran.mebibytes < 200, (name, ran)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_it_starts_at_once_and_imports_no_torch(tmp_path):
    runs = [run(written(tmp_path, [{}])) for _ in range(3)]
    assert {(ran.status, ran.err, ran.modules) for ran in runs} == {(0, "", ())}
    print(f"processor time from start to end: {min(ran.seconds for ran in runs):.2f} s")


def test_as_a_command(tmp_path):
    order = [sys.executable, "-m", "kvviz", "audit", str(written(tmp_path, [{}], nbytes=3))]
    done = subprocess.run(order, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "") and "out_of_bounds" in done.stdout
    order[-1] = str(written(tmp_path, [{"name": "\u5c42 3"}], nbytes=3))
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(order, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "") and "\\u5c42 3" in done.stdout


def test_an_output_keeps_the_mode_of_the_file_that_it_replaces(tmp_path, capsys):
    given, out = tmp_path / "a.json", tmp_path / "out.json"
    view = {"name": "a", "storage": "s", "shape": [4], "stride": [1], "dtype": "uint8"}
    storage = {"name": "s", "nbytes": 4}
    given.write_text(json.dumps({"format": "kvviz-views", "version": 1, "storages": [storage], "views": [view]}))
    out.write_text("old")
    out.chmod(0o600)
    assert command.main(["audit", str(given), "--json", str(out)]) == 0
    assert out.stat().st_mode & 0o777 == 0o600 and "clean" in out.read_text()
    out.write_text("old")
    out.chmod(0o400)
    assert command.main(["audit", str(given), "--json", str(out)]) == 2
    assert "the file is read-only" in capsys.readouterr().err and out.read_text() == "old"
    assert command.main(["audit", str(given), "--json", "/dev/null", "--html", "/dev/null"]) == 0
