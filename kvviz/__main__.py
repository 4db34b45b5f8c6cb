"""``python -m kvviz doctor | fetch | report``: each command imports what it needs, and no more."""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; what a user can mend is one sentence and status 2."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"kvviz {options.command}: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"kvviz {options.command}: interrupted; run it again to start over.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvviz", description="Which bytes of a KV cache belong to whom.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="say what this machine has for the notebooks, and what it lacks")
    doctor.set_defaults(run=_doctor)

    fetch = commands.add_parser("fetch", help="bring the language model's file (98 MB) into the cache folder")
    fetch.set_defaults(run=_fetch)

    report = commands.add_parser("report", help="run notebooks and write them as self-contained HTML")
    report.add_argument("--notebooks", type=Path, default=Path("notebooks"), metavar="DIR", help="where they lie")
    report.add_argument("--out", type=Path, default=Path("reports"), metavar="DIR", help="where the HTML goes")
    report.add_argument("only", nargs="*", metavar="NAME", help="notebooks to run (default: all)")
    report.set_defaults(run=_report)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from kvviz import doctor

    return doctor.main()


def _fetch(options: argparse.Namespace) -> int:
    from kvviz.engine import weights

    weights.fetch()
    return 0


def _report(options: argparse.Namespace) -> int:
    from kvviz import doctor
    from kvviz.report import export

    return export.main(options.notebooks, options.out, options.only, doctor.machine())


def _sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name} is not installed: python -m pip install -r requirements.txt."
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
