"""The closing challenge: unknown caches as views files, made from a seed. Who studies one names kind, byte and fix.

All files of a level have the same views and claims in the same order; a sick one differs from a sound one in some
numbers. No answer is kept: ``check`` makes the sound cache again from the seed, and asks the audit.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from kvviz.audit.arguments import one_of
from kvviz.audit.findings import Audit
from kvviz.audit.views_file import ViewsFile
from kvviz.challenge.faults import CLEAN, FAULTS
from kvviz.challenge.sound_cache import sound_cache

LEVELS = {
    "easy": ("collision", "misplaced", "permuted", "out_of_bounds", "truncated", "self_overlap"),
    "full": tuple(FAULTS),
}
"""What the files of a level may suffer from. Easy: each of these once. Full: five of them, and one clean file."""

CASES = 6
"""Files of a set."""

PARTS = ("kind", "first byte", "fix")
"""What an answer consists of."""

MOST_DRAWS = 1_000
"""Geometries that are tried until one shows exactly the fault that it is meant to."""

ELSEWHERE = "where the lowest element starts that is not at its place (where it is, not where it belongs)"

FIRST_BYTE = {
    "collision": "the lowest byte that two views share",
    "misplaced": ELSEWHERE,
    "permuted": ELSEWHERE,
    "out_of_bounds": "the lowest byte behind the end of the storage that a view claims",
    "truncated": "the lowest data byte that is not moved",
    "oversized": "the lowest byte that is taken of another block",
    "self_overlap": "the lowest byte that two elements of one view share",
    "unaligned": "the start of the lowest row that misses the boundary",
    "ambiguous": "None",
    "index_space": "None",
    CLEAN: "None",
}
"""What ``first_byte`` means, by kind: counted from the start of the storage, over all views."""

FIXES = {
    "nothing": "leave the layout alone, and look at ordering, lifetimes and the tables' contents",
    "offset": "start each view where its own layer and half begin, on their boundary",
    "block step": "step from one block, or id, to the next as the cache does",
    "inner steps": "step from token to token and from head to head as the cells lie",
    "length": "move whole pages, data and tails, and no more",
    "count": "count the blocks, or ids, that are there",
    "storage": "allocate what all pages take",
    "declare": "say which reading is meant",
    "boundary": "ask for no wider boundary than the rows keep",
}
"""What can be done about a file. Each changes one property, and mends the files that are wrong in that one alone."""

EITHER = ("count", "storage")
"""Where blocks and storage do not match, nothing in a file says which of the two is true: both are right then."""


@dataclass(frozen=True)
class Case:
    """One unknown cache.

    Attributes:
        level, seed, number: what it was made from.
        file: its views file, geometry alone; offsets and strides in elements of the view.
    """

    level: str
    seed: int
    number: int
    file: ViewsFile = field(repr=False)

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"unknown {self.number} of the {self.level} set, seed {self.seed}"


@dataclass(frozen=True)
class Verdict:
    """What an answer is worth. ``wrong`` names the parts that are wrong or missing; ``str`` says it in a sentence."""

    name: str
    wrong: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def solved(self) -> bool:
        """True when kind, first byte and fix are right."""
        return not self.wrong

    def __str__(self) -> str:
        right = [part for part in PARTS if part not in self.wrong]
        failed = [part for part in self.wrong if part not in self.missing]
        told = [f"{_listed(right)} right"] if right else []
        told += [f"{_listed(failed)} wrong"] if failed else []
        told += [f"{_listed(self.missing)} not given yet"] if self.missing else []
        return f"{self.name}: {', '.join(told)}{': solved' if self.solved else ''}"


def challenge(seed: int, level: str = "easy") -> tuple[Case, ...]:
    """Six unknown caches; the same seed and level give the same ones.

    Raises:
        ValueError: an unknown level, or a seed that is no integer.
    """
    one_of("level", level, tuple(LEVELS))
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an integer, not {seed!r}")
    return tuple(Case(level, seed, number, _drawn(level, seed, number)[1]) for number in range(CASES))


def check(case: Case, *, kind: str | None = None, first_byte: int | None = None, fix: str | None = None) -> Verdict:
    """Which parts of an answer are right; what would be right is not said.

    Args:
        kind: one of :data:`FIRST_BYTE`, or None while it is not known.
        first_byte: byte in the storage as :data:`FIRST_BYTE` says, or None.
        fix: one of :data:`FIXES`, or None while it is not known.

    Raises:
        ValueError: a kind or a fix that does not exist, or a byte that is no integer.
    """
    if kind is not None:
        one_of("kind", kind, tuple(FIRST_BYTE))
    if fix is not None:
        one_of("fix", fix, tuple(FIXES))
    if first_byte is not None and (isinstance(first_byte, bool) or not isinstance(first_byte, int)):
        raise ValueError(f"first_byte must be an integer or None, not {first_byte!r}")
    if kind is None and first_byte is None and fix is None:
        return Verdict(case.name, PARTS, PARTS)
    result = case.file.audit()
    found = {finding.kind for finding in result.findings} or {CLEAN}
    fixes = EITHER if fix in EITHER else (fix,) if fix else ()
    right = {
        "kind": found == {kind},
        "first byte": first_byte == _first_byte(result),
        "fix": fix == "nothing" if result.clean else any(mended(case, one).audit().clean for one in fixes),
    }
    wrong = tuple(part for part, good in right.items() if not good)
    given = dict(zip(PARTS, (kind, first_byte, fix), strict=True))
    return Verdict(case.name, wrong, tuple(part for part in wrong if given[part] is None))


def mended(case: Case, fix: str) -> ViewsFile:
    """The file after a fix: one property of every view, or of the claims, is set as in the sound cache.

    Raises:
        ValueError: a fix that does not exist.
    """
    one_of("fix", fix, tuple(FIXES))
    sound, sick = _drawn(case.level, case.seed, case.number)[0], case.file
    storage = sound.storages[0] if fix == "storage" else sick.storages[0]
    views, claims = [], []
    for view, model in zip(sick.views, sound.views, strict=True):
        changes = {
            "offset": {"offset": model.offset},
            "block step": {"stride": (model.stride[0], *view.stride[1:])},
            "inner steps": {"stride": (view.stride[0], *model.stride[1:])},
            "length": {"shape": (view.shape[0], *model.shape[1:])},
            "count": {"shape": (model.shape[0], *view.shape[1:])},
        }
        views.append(replace(view, storage=storage, **changes.get(fix, {})))
    restored = {"block step": "stride_bytes", "count": "count", "declare": "declared", "boundary": "boundary_bytes"}
    for claim, model in zip(sick.claims, sound.claims, strict=True):
        name = restored.get(fix, "")
        claims.append(replace(claim, **{name: getattr(model, name)}) if hasattr(claim, name) else claim)
    return ViewsFile((storage,), tuple(views), tuple(claims))


@cache
def _drawn(level: str, seed: int, number: int) -> tuple[ViewsFile, ViewsFile]:
    """The sound file and the one that is shown: the first drawn whose audit finds what is wanted and nothing else."""
    kind = _kinds(level, seed)[number]
    for attempt in range(MOST_DRAWS):
        rng = Random(f"{level} {seed} {number} {attempt}")
        cache = sound_cache(rng, level)
        shown = rng.choice(FAULTS[kind])(cache, rng)
        if shown is None or cache.file.audit().findings:
            continue
        if ({finding.kind for finding in shown.audit().findings} or {CLEAN}) == {kind}:
            return cache.file, shown
    raise AssertionError(f"no file of kind {kind} in {MOST_DRAWS} draws from level {level}, seed {seed}")


def _kinds(level: str, seed: int) -> list[str]:
    rng = Random(f"{level} {seed}")
    kinds = [kind for kind in LEVELS[level] if kind != CLEAN]
    chosen = rng.sample(kinds, CASES - 1) + [CLEAN] if CLEAN in LEVELS[level] else kinds
    rng.shuffle(chosen)
    return chosen


def _first_byte(result: Audit) -> int | None:
    """The lowest byte that findings point at: of several places that share it, each begins there."""
    places = [finding.example[0 if finding.kind in ("misplaced", "permuted") else -1] for finding in result.findings
              if finding.example]  # fmt: skip
    return min((place.start_bytes for place in places), default=None)


def _listed(parts: list[str] | tuple[str, ...]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"
