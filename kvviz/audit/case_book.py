"""The case book: 33 public bugs of KV caches as small views files, with the findings that an audit must return.

Example: ``audit = views_file.load(json.dumps(cases()[0]["views_file"])).audit()``.
"""

import json
from importlib.resources import files


def cases() -> list[dict]:
    """Return all cases, freshly read, in the order of the book.

    Each case has these fields:
        id, kind: a name, and a letter for cases that are alike.
        repo, number: the public issue or pull request on GitHub.
        symptom, mechanism, fix, verdict: the story in plain words.
        views_file: the geometry with the bug, in the format of ``kvviz.audit.views_file``.
        fixed_views_file: the repaired geometry; missing if the layout was never wrong.
        expected: the findings of the audit, by the field names of ``kvviz.audit.findings.Finding``.
        numbers: figures of the report, which the tests compute again.
        says: words that the text of the audit must contain; missing in most cases.
    """
    return json.loads(files("kvviz.audit").joinpath("case_book.json").read_text(encoding="utf-8"))["cases"]
