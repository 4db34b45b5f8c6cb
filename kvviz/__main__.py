"""The command ``kvviz``, with its commands ``doctor``, ``fetch``, ``audit``, ``compare``, ``engine``, ``report`` and
``workshop``.

Each command imports only what it needs, so that ``kvviz audit`` works in an installation without extras.
"""

import argparse
import contextlib
import errno
import itertools
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from kvviz.files import write_whole

if TYPE_CHECKING:
    from kvviz.audit.findings import Audit
    from kvviz.audit.views_file import ViewsFile
    from kvviz.report.export import Around

MISTAKE = 70
"""Exit status after an error in kvviz itself. The status is not 1, because 1 means that an audit has findings."""

NOT_ALL_JUDGED = 3
"""Exit status if a check would take more work than the limit. There may be findings of the other checks."""

EMPTY = 4
"""Exit status of ``kvviz audit`` for a file without views. Such a file is not clean, because nothing was audited."""


EXIT_STATUSES = """\
exit status:
  0  clean: every claim holds
  1  there are findings
  2  the file cannot be used
  3  not all was judged, because it would take too much work; there may be findings
  4  the file has no views, so nothing was audited
"""
"""The end of ``kvviz audit --help``."""

COMPARE_STATUSES = """\
exit status:
  0  clean: each byte of the receiver gets what it needs
  1  some bytes of the receiver do not get what they need
  2  a file cannot be used
  3  the comparison would take too much work, so nothing was judged
"""
"""The end of ``kvviz compare --help``."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    If there is an error that a user can correct, print one sentence and return 2.
    """
    for stream in (sys.stdout, sys.stderr):  # names of views may contain characters that the terminal cannot show
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"kvviz {options.command}: {_sentence(error)}", file=sys.stderr)
        return 2
    except Exception:  # an error in kvviz: the traceback helps to correct it
        traceback.print_exc()
        return MISTAKE
    except KeyboardInterrupt:
        print(f"kvviz {options.command}: interrupted. Run the command again from the beginning.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvviz",
        description="Show which tensor owns each byte of a KV cache, and find tensors that overwrite each other.",
        epilog="kvviz COMMAND --help explains one command.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")

    doctor = _command(commands, "doctor", "check if this machine can run the notebooks, and print what is missing")
    doctor.set_defaults(run=_doctor)

    fetch = _command(
        commands,
        "fetch",
        "download the language model (98 MB) into the user's cache folder, and unpack it there (540 MB)",
    )
    fetch.set_defaults(run=_fetch)

    audit = commands.add_parser(
        "audit",
        help="check the memory layout of an engine's cache, and print its mistakes",
        description="Read a views file, and check every claim in it. Print each mistake, and how to repair it.",
        epilog=EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    audit.add_argument(
        "file", type=Path, metavar="FILE", help="the views file: JSON with views and claims (see docs/audit.md)"
    )
    audit.add_argument("-v", "--verbose", action="store_true", help="print every finding")
    audit.add_argument("--json", type=Path, metavar="OUT", help="write all findings and diagnoses to this JSON file")
    audit.add_argument("--html", type=Path, metavar="OUT", help="write causes, pictures and repairs to this HTML file")
    audit.set_defaults(run=_audit)

    compare = commands.add_parser(
        "compare",
        help="check a transfer of blocks between the caches of two processes",
        description="Read the views of a sender and of a receiver. Print what each byte of the receiver gets.",
        epilog=COMPARE_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("sender", type=Path, metavar="A.json", help="the views file of the sender")
    compare.add_argument("receiver", type=Path, metavar="B.json", help="the views file of the receiver")
    compare.add_argument(
        "--transfer",
        type=Path,
        metavar="T.json",
        help="file that lists the copies (see docs/compare.md); without it, each block goes to the same block id",
    )
    compare.add_argument("--json", type=Path, metavar="OUT", help="write the result to this JSON file")
    compare.set_defaults(run=_compare)

    _engine_parser(commands)

    report = _command(commands, "report", "run notebooks, and write one HTML page for each")
    report.add_argument(
        "--notebooks",
        type=Path,
        default=Path("notebooks"),
        metavar="DIR",
        help="folder of the notebooks (default: notebooks)",
    )
    report.add_argument(
        "--out", type=Path, default=Path("reports"), metavar="DIR", help="folder for the pages (default: reports)"
    )
    report.add_argument("--archive", type=Path, metavar="FILE.zip", help="pack all pages into this file")
    report.add_argument("only", nargs="*", metavar="NAME", help="notebook to run, for example 03 (default: all)")
    report.set_defaults(run=_report)

    workshop = _command(
        commands,
        "workshop",
        "write notebooks with holes for participants, and notebooks with solutions for the instructor",
    )
    workshop.add_argument(
        "--notebooks",
        type=Path,
        default=Path("notebooks"),
        metavar="DIR",
        help="folder of the notebooks (default: notebooks)",
    )
    workshop.add_argument(
        "--out", type=Path, default=Path("workshop"), metavar="DIR", help="folder for the copies (default: workshop)"
    )
    workshop.set_defaults(run=_workshop)
    return parser


def _engine_parser(commands) -> None:
    """Add the command ``engine`` with its commands ``vllm``, ``diff`` and ``matrix``."""
    engine = _command(commands, "engine", "run a released vLLM on the CPU, and show what its cache looks like")
    actions = engine.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")

    vllm = _command(actions, "vllm", "run one release, and print its layout, its answer and the audit of its tensors")
    vllm.add_argument("--release", required=True, metavar="X.Y.Z", help="the release, for example 0.25.1")
    vllm.add_argument("--json", type=Path, metavar="OUT", help="write the whole record to this JSON file")
    vllm.add_argument("--views", type=Path, metavar="OUT", help="write the views of the live tensors to this file")
    vllm.set_defaults(run=_engine_vllm)

    diff = _command(actions, "diff", "run two releases, and print what changed between them")
    diff.add_argument("before", metavar="A", help="the first release, for example 0.25.1")
    diff.add_argument("after", metavar="B", help="the second release, for example 0.26.0")
    diff.set_defaults(run=_engine_diff)

    for parser in (vllm, diff):
        parser.add_argument("--kv-cache-dtype", default="fp8_per_token_head", metavar="MODE",
                            help="vLLM's kv_cache_dtype (default: fp8_per_token_head)")  # fmt: skip
        parser.add_argument("--connector", default="none", metavar="NAME",
                            help="none, prefer-cross-layer or multi-of-two (default: none)")  # fmt: skip
        parser.add_argument("--layout", default="NHD", help="NHD or HND (default: NHD)")
        parser.add_argument("--tokens", type=int, default=6, metavar="N", help="tokens of the answer (default: 6)")
        parser.add_argument("--seconds", type=float, default=1200, metavar="S",
                            help="time limit of one engine, in seconds (default: 1200)")  # fmt: skip

    matrix = _command(actions, "matrix", "run many engines, and add what each one did to a file")
    out = Path("notebooks/recorded_engines.json")
    matrix.add_argument(
        "--out", type=Path, default=out, metavar="FILE", help=f"the file; runs that it has are skipped (default: {out})"
    )
    matrix.add_argument("--runs", type=int, metavar="N", help="stop after N runs (default: all)")
    matrix.add_argument("--tokens", type=int, default=6, metavar="N", help="tokens of each answer (default: 6)")
    matrix.set_defaults(run=_engine_matrix)


def _command(commands, name: str, purpose: str) -> argparse.ArgumentParser:
    """Return a new parser of one command. ``kvviz --help`` and the help of the command both print ``purpose``."""
    return commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")


def _doctor(options: argparse.Namespace) -> int:
    from kvviz import doctor

    return doctor.main()


def _fetch(options: argparse.Namespace) -> int:
    import gguf  # noqa: F401  Unpacking needs gguf. If it is missing, this line raises before the download.

    from kvviz.engine import unpacked_weights, weights

    path = weights.fetch()
    unpacked_weights.unpack(path)
    if unpacked_weights.path_beside(path).is_file():
        print(f"Unpacked for all processes: {unpacked_weights.path_beside(path)}")
    return 0


def _audit(options: argparse.Namespace) -> int:
    from kvviz.audit import diagnosis_text, views_file

    _check_files(options)
    given = views_file.read(options.file)
    result = given.audit()
    diagnoses = _diagnoses(given, result)
    empty = not given.views
    _print(diagnosis_text.EMPTY if empty else diagnosis_text.audit_text(result, diagnoses, options.verbose))
    if options.json:
        _write(options.json, views_file.findings_json(result, diagnoses, empty))
    if options.html:
        from kvviz.show.audit_page import render_html

        lessons = _lessons(options.html)
        page = render_html(result, given.views, given.claims, options.file.name, diagnoses, lessons)
        _write(options.html, page)
    if empty:
        return EMPTY
    return NOT_ALL_JUDGED if result.not_judged else 0 if result.clean else 1


def _lessons(page: Path) -> dict[str, str]:
    """Return the addresses of all lessons, as seen from a page: the page of a report, or else the notebook."""
    root, found = Path(__file__).parents[1], {}
    for folder, kind in (("notebooks", "ipynb"), ("reports", "html")):
        for lesson in sorted(root.glob(f"{folder}/[0-9][0-9]_*.{kind}")):
            found[lesson.name[:2]] = quote(os.path.relpath(lesson, page.resolve().parent))
    return found


def _diagnoses(given: "ViewsFile", result: "Audit") -> tuple:
    """Return the diagnoses of an audit. If they would be too large, print a sentence on stderr and return ``()``."""
    from kvviz.audit.causes import diagnose

    try:
        return diagnose(given.views, given.claims, result)
    except (ValueError, MemoryError, OverflowError) as error:
        print(f"kvviz audit: no diagnosis: {_sentence(error)}", file=sys.stderr)
        return ()


def _compare(options: argparse.Namespace) -> int:
    from kvviz.audit import compare, rank_bytes, transfer_file, views_file
    from kvviz.audit.budget import TooMuchWorkError

    sent, received = (views_file.read(path).views for path in (options.sender, options.receiver))
    files: tuple[Path, ...] = ()
    if options.transfer:
        transfer, files = transfer_file.read_transfer(options.transfer, sent, received)
    else:
        transfer = compare.default_transfer(rank_bytes.Rank(sent), rank_bytes.Rank(received))
    inputs = [options.sender, options.receiver, *files, *([options.transfer] if options.transfer else [])]
    for path in inputs:
        if options.json and _same_file(path, options.json):
            raise OSError(f"--json and an input are the same file, {path}: give --json another path")
    try:
        result = compare.compare(transfer)
    except TooMuchWorkError as error:
        print(f"kvviz compare: not judged: {error}", file=sys.stderr)
        return NOT_ALL_JUDGED
    _print(str(result))
    if options.json:
        _write(options.json, compare.comparison_json(result))
    return 0 if result.clean else 1


def _check_files(options: argparse.Namespace) -> None:
    """Raise OSError if an output would overwrite FILE or the other output."""
    paths = {"FILE": options.file, "--json": options.json, "--html": options.html}
    for (name, path), (other, other_path) in itertools.combinations(paths.items(), 2):
        if path and other_path and _same_file(path, other_path) and not other_path.is_char_device():
            raise OSError(f"{other} and {name} are the same file, {other_path}: give {other} another path")


def _same_file(path: Path, other: Path) -> bool:
    """Return True if both paths lead to the same file. Links are followed."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return os.path.realpath(path) == os.path.realpath(other)


def _print(text: str) -> None:
    """Print a text. If the output is a pipe whose reader has ended (``| head -1``), stop printing without an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush of stdout would fail


def _write(path: Path, text: str) -> None:
    """Write a text to a file as a whole. If ``path`` is a link, write to the file that the link leads to.

    A device such as ``/dev/stdout`` or a pipe is written directly, because a file must not take its place.
    """
    data = text.encode("utf-8")
    try:
        if path.exists() and not path.is_file():
            _write_directly(path, data)
        elif path.exists() and not path.stat().st_mode & 0o222:
            raise PermissionError(errno.EACCES, "the file is read-only", str(path))
        else:
            write_whole(Path(os.path.realpath(path)), data)
    except OSError as error:
        why = "no program reads this pipe" if error.errno == errno.ENXIO else error.strerror
        raise OSError(f"cannot write {path} ({why}): give another path. The findings above are complete.") from error


def _write_directly(path: Path, data: bytes) -> None:
    """Write to a device or a pipe. If its reader goes away, write nothing more and raise nothing."""
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # so that a pipe without a reader is an error, and no wait
    os.set_blocking(handle, True)
    with contextlib.suppress(BrokenPipeError), os.fdopen(handle, "wb", buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]


def _engine_run(options: argparse.Namespace, release: str):
    """Return the record of one run of a released vLLM."""
    from kvviz.bench import engine_run

    settings = engine_run.EngineSettings(
        release, options.kv_cache_dtype, options.connector, options.layout, options.tokens
    )
    return engine_run.run(settings, _progress, options.seconds)


def _progress(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _engine_vllm(options: argparse.Namespace) -> int:
    import json

    record = _engine_run(options, options.release)
    _print(str(record))
    if options.json:
        _write(options.json, json.dumps(record.as_data(), indent=1) + "\n")
    if options.views:
        _write(options.views, record.views)
    return 0 if record.clean else 1


def _engine_diff(options: argparse.Namespace) -> int:
    from kvviz.bench import engine_diff

    _print(engine_diff.diff_text(*(_engine_run(options, release) for release in (options.before, options.after))))
    return 0


def _engine_matrix(options: argparse.Namespace) -> int:
    from kvviz.bench import engine_matrix

    count = engine_matrix.record_matrix(options.out, list(engine_matrix.cells(options.tokens)), _progress, options.runs)
    _print(f"{count} runs were added to {options.out}.")
    return 0


def _report(options: argparse.Namespace) -> int:
    from kvviz import doctor
    from kvviz.report import export

    around = _around(options.notebooks)
    return export.main(
        options.notebooks, options.out, options.only, doctor.machine(), archive=options.archive, around=around
    )


LABELS = {
    "symptoms": "My cache is sick",
    "audit": "Audit guide",
    "glossary": "Glossary",
    "cheat_sheet": "Cheat sheet",
}
"""Documents that every page of a report links to, by the name of the file. All other documents become pages too."""

FOR_TEACHERS = {"instructor": "Plans, times and questions to ask", "hub": "One machine for a whole class"}


def _around(notebooks: Path) -> "Around":
    """Return what a front page shows besides the notebooks. Documents lie in ``docs`` beside the notebooks' folder."""
    from kvviz.report.documents import Document
    from kvviz.report.export import Around

    folder = notebooks.resolve().parent / "docs"
    paths = sorted([*folder.glob("*.md"), *folder.glob("*.html")])
    documents = [Document(path, LABELS.get(path.stem, "")) for path in paths]
    documents.sort(key=lambda document: list(LABELS.values()).index(document.label) if document.label else len(LABELS))
    return Around(_opening(notebooks), tuple(documents), FOR_TEACHERS, "symptoms")


def _opening(notebooks: Path, scripts: bool = True) -> str:
    """Return the opening of the front page, or "" if these are not the notebooks of kvviz."""
    from kvviz.show import opening

    recorded = notebooks / "recorded_engines.json"
    return opening.opening(recorded, scripts) if recorded.is_file() else ""


def _workshop(options: argparse.Namespace) -> int:
    from kvviz.report import lab_front_page, workshop

    front = lab_front_page.lab_front_page(options.notebooks, _opening(options.notebooks, scripts=False))
    return workshop.main(options.notebooks, options.out, {lab_front_page.NAME: front})


def _sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        from kvviz import doctor

        return doctor.missing_package(error.name)
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
