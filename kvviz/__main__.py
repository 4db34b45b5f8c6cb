"""``python -m kvviz doctor | fetch | audit | report | workshop``: each command imports what it needs, and no more."""

import argparse
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MISTAKE = 70
"""Exit status of an unforeseen exception."""

AUDIT_SECONDS = 10
"""What a hostile or absurd geometry may take; a real cache takes well under one."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; what a user can mend is one sentence and status 2."""
    for stream in (sys.stdout, sys.stderr):  # names may hold what the terminal cannot show
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"kvviz {options.command}: {_sentence(error)}", file=sys.stderr)
        return 2
    except Exception:  # a mistake of ours keeps its traceback, and never ends as 1, which means findings
        traceback.print_exc()
        return MISTAKE
    except KeyboardInterrupt:
        print(f"kvviz {options.command}: interrupted; run it again to start over.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvviz", description="Which bytes of a KV cache belong to whom.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="say what this machine has for the notebooks, and what it lacks")
    doctor.set_defaults(run=_doctor)

    fetch = commands.add_parser(
        "fetch", help="bring the language model's file (98 MB) into the cache folder and unpack it (538 MB)"
    )
    fetch.set_defaults(run=_fetch)

    audit = commands.add_parser("audit", help="judge a views file: exit status 0 clean, 1 findings, 2 unusable file")
    audit.add_argument("file", type=Path, metavar="FILE", help="a views file (kvviz.audit.views_file says what it is)")
    audit.add_argument("--json", type=Path, metavar="OUT", help="write the findings as JSON too")
    audit.add_argument("--html", type=Path, metavar="OUT", help="write a page with a map of each finding's place too")
    audit.set_defaults(run=_audit)

    report = commands.add_parser("report", help="run notebooks and write them as self-contained HTML")
    report.add_argument("--notebooks", type=Path, default=Path("notebooks"), metavar="DIR", help="where they lie")
    report.add_argument("--out", type=Path, default=Path("reports"), metavar="DIR", help="where the HTML goes")
    report.add_argument("--archive", type=Path, metavar="FILE.zip", help="pack all pages into one file too")
    report.add_argument("only", nargs="*", metavar="NAME", help="notebooks to run (default: all)")
    report.set_defaults(run=_report)

    workshop = commands.add_parser(
        "workshop", help="write the participants' notebooks, with holes, and the instructor's"
    )
    workshop.add_argument("--notebooks", type=Path, default=Path("notebooks"), metavar="DIR", help="where they lie")
    workshop.add_argument("--out", type=Path, default=Path("workshop"), metavar="DIR", help="where the copies go")
    workshop.set_defaults(run=_workshop)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from kvviz import doctor

    return doctor.main()


def _fetch(options: argparse.Namespace) -> int:
    from kvviz.engine import unpacked_weights, weights

    path = weights.fetch()
    unpacked_weights.unpack(path)
    if unpacked_weights.path_beside(path).is_file():
        print(f"Unpacked, for all processes to share: {unpacked_weights.path_beside(path)}")
    return 0


def _audit(options: argparse.Namespace) -> int:
    from kvviz.audit import views_file

    with _at_most(AUDIT_SECONDS):
        given = views_file.read(options.file)
        result = given.audit()
    print(result)
    if options.json:
        _write(options.json, views_file.findings_json(result))
    if options.html:
        from kvviz.show.audit_page import render_html

        _write(options.html, render_html(result, given.views, given.claims, options.file.name))
    return 0 if result.clean else 1


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}; the findings above stand") from error


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Give up with ValueError after some seconds, where the system has an alarm and this is the main thread."""

    def give_up(*_) -> None:
        raise ValueError(f"the geometry is too irregular to be judged within {seconds} s")

    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _report(options: argparse.Namespace) -> int:
    from kvviz import doctor
    from kvviz.report import export

    return export.main(options.notebooks, options.out, options.only, doctor.machine(), archive=options.archive)


def _workshop(options: argparse.Namespace) -> int:
    from kvviz.report import workshop

    return workshop.main(options.notebooks, options.out)


def _sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name} is not installed: python -m pip install -r requirements.txt."
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
