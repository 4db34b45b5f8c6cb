"""Asks six questions about unknown caches, made from a seed, and checks the answers. Notebook 11 uses this module.

A question is a views file. The answer has three parts: the kind of the fault, the first wrong byte, and a fix. All
files of a level have the same kinds of views and claims in the same order, so only the numbers show a fault. No answer
is stored: :func:`check` makes the correct cache again from the seed, and audits the file.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Integral
from random import Random

from kvviz.audit.arguments import one_of
from kvviz.audit.findings import Audit
from kvviz.audit.views_file import ViewsFile
from kvviz.challenge.faults import CLEAN, FAULTS
from kvviz.challenge.sound_cache import draw_sound_cache

LEVELS = {
    "easy": ("collision", "misplaced", "permuted", "out_of_bounds", "truncated", "self_overlap"),
    "full": tuple(FAULTS),
}
"""For each level, the kinds of faults that its files can have.

An easy set has one file for each of its six kinds. A full set has five files with different kinds of faults, and one
clean file.
"""

CASES = 6
"""Number of files in one set."""

PARTS = ("kind", "first byte", "fix")
"""The parts of an answer."""

MAX_DRAWS = 1_000
"""Largest number of caches that are drawn for one question, until a cache can have the wanted fault. Most questions
need only a few draws. If no cache can have the fault, an error is raised."""

_WRONG_ELEMENT = "the start of the lowest element that is in a wrong place (where it is, not where it belongs)"

FIRST_BYTE = {
    "collision": "the lowest byte that two views share",
    "misplaced": _WRONG_ELEMENT,
    "permuted": _WRONG_ELEMENT,
    "out_of_bounds": "the lowest byte that a view covers after the end of the storage",
    "truncated": "the lowest data byte that no transfer moves",
    "oversized": "the lowest byte that a transfer moves although it belongs to another block",
    "self_overlap": "the lowest byte that two elements of one view share",
    "unaligned": "the start of the lowest row that is not on its boundary",
    "ambiguous": "None",
    "index_space": "None",
    CLEAN: "None",
}
"""For each kind, the meaning of ``first_byte``. Bytes are counted from the start of the storage. If several views are
wrong, the lowest byte of all these views is meant."""

FIXES = {
    "nothing": "leave the layout as it is, and look at ordering, lifetimes and the contents of tables",
    "offset": "start each view where its own part of the cache starts, on the required boundary",
    "block step": "use the step of the cache from one block (or block id) to the next",
    "inner steps": "use the steps of the cells from token to token and from head to head",
    "length": "move whole pages, with data and tails, and nothing else",
    "count": "use the number of blocks (or block ids) that exist",
    "storage": "allocate enough bytes for all pages",
    "declare": "declare which reading is meant",
    "boundary": "require only a boundary at which all rows start",
}
"""The possible fixes. Each fix corrects one property. It repairs every file in which only this property is wrong."""

EITHER = ("count", "storage")
"""Both fixes are right if the number of blocks does not fit the storage, because the file does not say which of the two
numbers is wrong."""


@dataclass(frozen=True)
class Case:
    """One unknown cache.

    Attributes:
        level, seed, number: the case is made from these three values. ``number`` is the place in the set, from 0 to 5.
        file: the views file. It contains neither cache data nor the correct answer. Offsets and strides are counted
            in elements.
    """

    level: str
    seed: int
    number: int
    file: ViewsFile = field(repr=False)

    @property
    def name(self) -> str:
        """The name for people, for example ``unknown 2 of the easy set, seed 7``."""
        return f"unknown {self.number} of the {self.level} set, seed {self.seed}"


@dataclass(frozen=True)
class Verdict:
    """The result of a check. ``str`` turns it into a sentence.

    Attributes:
        name: the name of the case.
        wrong: the parts of the answer that are wrong or missing.
        missing: the parts that are missing.
    """

    name: str
    wrong: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def solved(self) -> bool:
        """True if kind, first byte and fix are right."""
        return not self.wrong

    def __str__(self) -> str:
        right = [part for part in PARTS if part not in self.wrong]
        failed = [part for part in self.wrong if part not in self.missing]
        phrases = [f"{_listed(right)} right"] if right else []
        phrases += [f"{_listed(failed)} wrong"] if failed else []
        phrases += [f"{_listed(self.missing)} not given yet"] if self.missing else []
        return f"{self.name}: {', '.join(phrases)}{': solved' if self.solved else ''}"


def challenge(seed: int, level: str = "easy") -> tuple[Case, ...]:
    """Return six unknown caches. The same seed and level give the same caches.

    Raises:
        ValueError: the level does not exist, or the seed is not an integer.
    """
    one_of("level", level, tuple(LEVELS))
    seed = _integer("seed", seed)
    return tuple(Case(level, seed, number, _draw_files(level, seed, number)[1]) for number in range(CASES))


def check(case: Case, *, kind: str | None = None, first_byte: int | None = None, fix: str | None = None) -> Verdict:
    """Check an answer, and return which parts of the answer are wrong. The verdict does not contain the right answer.

    Args:
        case: one of the cases of :func:`challenge`.
        kind: a key of :data:`FIRST_BYTE`. None if you do not know the kind yet.
        first_byte: a byte of the storage as :data:`FIRST_BYTE` defines it. None if you do not know the byte yet. If
            ``kind`` has no first byte, None is the answer.
        fix: a key of :data:`FIXES`. None if you do not know the fix yet.

    Raises:
        ValueError: the kind or the fix does not exist, or ``first_byte`` is not an integer.
    """
    if kind is not None:
        one_of("kind", kind, tuple(FIRST_BYTE))
    if fix is not None:
        one_of("fix", fix, tuple(FIXES))
    if first_byte is not None:
        first_byte = _integer("first_byte", first_byte, " or None")
    no_byte = kind is not None and FIRST_BYTE[kind] == "None"  # then None is an answer
    given = {"kind": kind, "first byte": "none" if first_byte is None and no_byte else first_byte, "fix": fix}
    missing = tuple(part for part in PARTS if given[part] is None)
    if missing == PARTS:
        return Verdict(case.name, PARTS, PARTS)
    right = right_answers(case)
    wrong = tuple(part for part in PARTS if part in missing or str(given[part]) not in right[part])
    return Verdict(case.name, wrong, missing)


@cache
def right_answers(case: Case) -> dict[str, tuple[str, ...]]:
    """Return all right answers by part, as text. Only a check may use them. If there is no first byte, it is "none"."""
    result = case.file.audit()
    kinds = {finding.kind for finding in result.findings} or {CLEAN}
    byte = _first_byte(result)
    fixes = {fix for fix in FIXES if not result.clean and mended(case, fix).audit().clean}
    fixes |= set(EITHER) if fixes.intersection(EITHER) else set()
    return {
        "kind": tuple(kinds) if len(kinds) == 1 else (),
        "first byte": ("none" if byte is None else str(byte),),
        "fix": ("nothing",) if result.clean else tuple(sorted(fixes)),
    }


def mended(case: Case, fix: str) -> ViewsFile:
    """Return the file after a fix. The fix takes one property of all views or claims from the correct cache.

    Raises:
        ValueError: the fix does not exist.
    """
    one_of("fix", fix, tuple(FIXES))
    correct, faulty = _draw_files(case.level, case.seed, case.number)[0], case.file
    storage = correct.storages[0] if fix == "storage" else faulty.storages[0]
    views, claims = [], []
    for view, model in zip(faulty.views, correct.views, strict=True):
        changes = {
            "offset": {"offset": model.offset},
            "block step": {"stride": (model.stride[0], *view.stride[1:])},
            "inner steps": {"stride": (view.stride[0], *model.stride[1:])},
            "length": {"shape": (view.shape[0], *model.shape[1:])},
            "count": {"shape": (model.shape[0], *view.shape[1:])},
        }
        views.append(replace(view, storage=storage, **changes.get(fix, {})))
    claim_fields = {"block step": "stride_bytes", "count": "count", "declare": "declared", "boundary": "boundary_bytes"}
    for claim, model in zip(faulty.claims, correct.claims, strict=True):
        name = claim_fields.get(fix, "")
        claims.append(replace(claim, **{name: getattr(model, name)}) if hasattr(claim, name) else claim)
    return ViewsFile((storage,), tuple(views), tuple(claims))


@cache
def _draw_files(level: str, seed: int, number: int) -> tuple[ViewsFile, ViewsFile]:
    """Return the correct file, and the file to show. In the shown file, the audit finds only the wanted kind."""
    kind = _draw_kinds(level, seed)[number]
    for attempt in range(MAX_DRAWS):
        rng = Random(f"{level} {seed} {number} {attempt}")
        drawn = draw_sound_cache(rng, level)
        shown = rng.choice(FAULTS[kind])(drawn, rng)
        if shown is None or drawn.file.audit().findings:
            continue
        if ({finding.kind for finding in shown.audit().findings} or {CLEAN}) == {kind}:
            return drawn.file, shown
    raise AssertionError(
        f"seed {seed} gives no file of kind {kind} for level {level} in {MAX_DRAWS} draws: choose another seed"
    )


def _draw_kinds(level: str, seed: int) -> list[str]:
    rng = Random(f"{level} {seed}")
    kinds = [kind for kind in LEVELS[level] if kind != CLEAN]
    chosen = rng.sample(kinds, CASES - 1) + [CLEAN] if CLEAN in LEVELS[level] else kinds
    rng.shuffle(chosen)
    return chosen


def _first_byte(result: Audit) -> int | None:
    """Return the lowest byte in the examples of the findings. Return None if no finding has an example.

    For a misplaced or permuted element, the first place of the example is where the element lies. The second place is
    where it belongs, and does not count. In all other examples of these files, all places start at the same byte.
    """
    shown = [finding for finding in result.findings if finding.example]
    places = [finding.example[0 if finding.kind in ("misplaced", "permuted") else -1] for finding in shown]
    return min((place.start_bytes for place in places), default=None)


def _integer(name: str, value: object, otherwise: str = "") -> int:
    """Return ``value`` as a Python int. NumPy integers are allowed. Raise ValueError for a bool and for other types."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer{otherwise}, not {value!r}")
    return int(value)


def _listed(parts: list[str] | tuple[str, ...]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"
