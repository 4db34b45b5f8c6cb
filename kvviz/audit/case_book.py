"""The case book: 60 public bugs of KV caches as small views files, with the findings that an audit must return.

Example: ``audit = views_file.load(json.dumps(cases()[0]["views_file"])).audit()``.
"""

import json
from importlib.resources import files

FAMILIES = (
    "one kind of layer",
    "window groups",
    "recurrent state",
    "MLA and indexer",
    "NVFP4",
    "kernel blocks",
    "parallel ranks",
)
"""The families of layouts. The first one holds the cases of caches whose layers are all alike."""

SYMPTOMS = (
    "garbage from the first token",
    "first token right, then garbage",
    "different from run to run",
    "only a quantised cache",
    "slightly worse",
    "after a restore or a transfer",
    "only with several ranks",
    "only under load",
    "only with long prompts",
    "only in a hybrid model",
    "a crash or an error",
    "slow",
    "nothing seen yet",
)
"""What the reporter met, in a few words. ``docs/symptoms.md`` leads from such words to a lesson."""


def cases() -> list[dict]:
    """Return all cases, freshly read, in the order of the book.

    Each case has these fields:
        id, kind: a name, and a letter for cases that are alike.
        repo, number: the public issue or pull request on GitHub.
        family, seen: an entry of :data:`FAMILIES`, and one of :data:`SYMPTOMS`.
        symptom, mechanism, fix, verdict: the story in plain words.
        cause: the diagnosis, by its name in ``kvviz.audit.cause_words``; empty if the audit is clean.
        views_file: the geometry with the bug, in the format of ``kvviz.audit.views_file``.
        fixed_views_file: the repaired geometry; missing if the layout was never wrong.
        expected: the findings of the audit, by the field names of ``kvviz.audit.findings.Finding``.
        numbers: figures of the report, which the tests compute again.
        says: words that the text of the audit must contain; missing in most cases.
    """
    return json.loads(files("kvviz.audit").joinpath("case_book.json").read_text(encoding="utf-8"))["cases"]
