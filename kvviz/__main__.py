"""The command ``kvviz``: ``kvviz doctor``, ``fetch``, ``audit``, ``report`` and ``workshop``.

Each command imports only what it needs, so that ``kvviz audit`` works in an installation without extras.
"""

import argparse
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MISTAKE = 70
"""Exit status after an error in kvviz itself. Status 1 means that an audit has findings."""

AUDIT_SECONDS = 10
"""Time limit of one audit. A real cache takes less than one second; a hostile file could take hours."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status. An error that a user can correct is one sentence, and status 2."""
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
        print(f"kvviz {options.command}: interrupted; run it again to start over.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvviz", description="Find out which bytes of a KV cache belong to whom.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="check this machine for the notebooks, and say what is missing")
    doctor.set_defaults(run=_doctor)

    fetch = commands.add_parser(
        "fetch", help="download the language model (98 MB) into the cache folder and unpack it (540 MB)"
    )
    fetch.set_defaults(run=_fetch)

    audit = commands.add_parser(
        "audit", help="audit a views file: exit status 0 clean, 1 findings, 2 the file cannot be used"
    )
    audit.add_argument(
        "file", type=Path, metavar="FILE", help="a views file (kvviz.audit.views_file describes the format)"
    )
    audit.add_argument("--json", type=Path, metavar="OUT", help="also write the findings as JSON")
    audit.add_argument("--html", type=Path, metavar="OUT", help="also write a page with a map for each finding")
    audit.set_defaults(run=_audit)

    report = commands.add_parser("report", help="run notebooks and write them as self-contained HTML")
    report.add_argument(
        "--notebooks", type=Path, default=Path("notebooks"), metavar="DIR", help="folder of the notebooks"
    )
    report.add_argument("--out", type=Path, default=Path("reports"), metavar="DIR", help="folder for the pages")
    report.add_argument("--archive", type=Path, metavar="FILE.zip", help="also pack all pages into one file")
    report.add_argument("only", nargs="*", metavar="NAME", help="notebooks to run (default: all)")
    report.set_defaults(run=_report)

    workshop = commands.add_parser(
        "workshop", help="write the notebooks for participants (exercises with holes) and for the instructor"
    )
    workshop.add_argument(
        "--notebooks", type=Path, default=Path("notebooks"), metavar="DIR", help="folder of the notebooks"
    )
    workshop.add_argument("--out", type=Path, default=Path("workshop"), metavar="DIR", help="folder for the copies")
    workshop.set_defaults(run=_workshop)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from kvviz import doctor

    return doctor.main()


def _fetch(options: argparse.Namespace) -> int:
    import gguf  # noqa: F401  unpacking needs it: without gguf, stop before the download

    from kvviz.engine import unpacked_weights, weights

    path = weights.fetch()
    unpacked_weights.unpack(path)
    if unpacked_weights.path_beside(path).is_file():
        print(f"Unpacked for all processes: {unpacked_weights.path_beside(path)}")
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
        raise OSError(f"cannot write {path}: {error.strerror}; the findings above are complete") from error


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise ValueError after some seconds, if the system has alarms and this is the main thread."""

    def give_up(*_) -> None:
        raise ValueError(f"the geometry is too irregular to be audited within {seconds} s")

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
        from kvviz import doctor

        return doctor.missing_package(error.name)
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
