"""Shows the cases of the case book as cards that a reader can open and close.

A closed card is one line: the name of the case and its diagnosis. An open card has the symptom, the picture of the
mistake, the repair, and the verdict of the public report.

Many cards can have filters: lists from which a reader chooses a project, a kind, a family, a symptom or a mistake. The
filters are CSS rules without a script. A browser that does not know them shows all cards.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from kvviz.audit.audit import audit_views
from kvviz.audit.case_book import FAMILIES, SYMPTOMS
from kvviz.audit.causes import CAUSES, Diagnosis, diagnose
from kvviz.audit.diagnosis_text import first_place, proof_of
from kvviz.audit.findings import Audit
from kvviz.audit.views_file import ViewsFile, load
from kvviz.show.place_picture import STYLE, picture
from kvviz.show.place_window import place_window

CARD_STYLE = """
.kvviz-cases details { border: 1px solid var(--jp-border-color1, #c9c9c9); border-radius: 4px; margin: 4px 0;
  padding: 4px 10px }
.kvviz-cases { overflow-wrap: anywhere } .kvviz-cases summary { cursor: pointer }
.kvviz-cases p { margin: 6px 0; max-width: 50rem }
.kvviz-cases details details { border: 0; padding: 0 }
@supports selector(:has(*)) { .kvviz-filters { display: flex } .kvviz-count { display: block } }
.kvviz-filters { flex-wrap: wrap; gap: 4px 16px; margin: 0 0 8px }
.kvviz-filters label { display: flex; flex-direction: column; font-size: 90% }
.kvviz-filters select { font: inherit; max-width: 17rem }
.kvviz-filtered { display: flex; flex-direction: column; counter-reset: kvviz-case }
.kvviz-filtered .kvviz-filters { order: -2 } .kvviz-filtered > details { counter-increment: kvviz-case }
.kvviz-count { order: -1; margin: 0 } .kvviz-count::before { content: counter(kvviz-case) " " }
"""

FILTERS: dict[str, Callable[["Card"], str]] = {
    "what you see": lambda card: card.case["seen"],
    "family of layers": lambda card: card.case["family"],
    "mistake": lambda card: card.headline,
    "project": lambda card: card.case["repo"],
    "kind": lambda card: card.case["kind"],
}
"""The lists above the cards, by their labels, and what each of them looks at."""


@dataclass(frozen=True)
class Card:
    """One case of the case book, audited and diagnosed."""

    case: Mapping

    @cached_property
    def file(self) -> ViewsFile:
        """The views and claims of the case."""
        return load(json.dumps(self.case["views_file"]))

    @cached_property
    def result(self) -> Audit:
        """The audit of the case."""
        return audit_views(self.file.views, self.file.claims)

    @cached_property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The diagnoses of the case."""
        return diagnose(self.file.views, self.file.claims, self.result)

    @property
    def headline(self) -> str:
        """The diagnosis in one line: the meaning of each cause, or ``Clean: every claim holds.``."""
        causes = " ".join(CAUSES[one.cause].meaning for one in self.diagnoses)
        clean = "Clean, with a warning." if self.result.findings else "Clean: every claim holds."
        return " ".join(filter(None, (clean if self.result.clean else "", causes)))

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The labels and the texts of the card."""
        case = self.case
        said = [
            ("Report", f"{case['repo']}#{case['number']}, kind {case['kind']}, {case['family']}. {case['symptom']}")
        ]
        said += [("What happened", case["mechanism"])]
        for one in self.diagnoses:
            proof = f" {proof_of(self.diagnoses)}" if one.proved else ""
            said += [("Diagnosis", f"{one.text} {one.effect}"), ("First place", first_place(one.findings))]
            said += [("Repair", f"{one.repair}.{proof}" if one.proved else one.repair)]
        said += [] if self.diagnoses else [("Diagnosis", self.result.verdict)]
        said += [("Verdict", case["verdict"]), ("Fix of the project", case["fix"])]
        return [*said, ("Lesson", f"notebook {self.lesson}. What was seen: {case['seen']}.")]

    @property
    def lesson(self) -> str:
        """The number of the notebook that explains the mistake. Clean cases are told in notebook 09."""
        return CAUSES[self.case["cause"]].lesson if self.case["cause"] else "09"

    def html(self, marks: str = "") -> str:
        """Return the folded card. ``marks`` are attributes for the filters."""
        rows = "".join(f"<p><b>{escape(label)}:</b> {escape(text)}</p>" for label, text in self.lines)
        summary = f"<summary><b>{escape(self.case['id'])}</b>: {escape(self.headline)}</summary>"
        return f"<details{marks}>{summary}{rows}{''.join(map(self._picture, self.diagnoses))}</details>"

    def _picture(self, one: Diagnosis) -> str:
        repaired = {view.name: view for view in one.repaired}
        window = place_window(one, self.file.views, self.file.claims, repaired)
        alone = len({view.storage for view in self.file.views}) == 1
        return "" if window is None else picture(window, alone)


@dataclass(frozen=True)
class CaseCards:
    """Cards of several cases, for the output of a notebook cell.

    Attributes:
        cards: the cards, in the order in which they are shown.
        filters: True if lists stand above the cards, from which a reader chooses what to see.
    """

    cards: Sequence[Card]
    filters: bool = False

    @classmethod
    def of(cls, cases: Iterable[Mapping]) -> "CaseCards":
        """Return cards of some cases, without filters."""
        return cls(tuple(map(Card, cases)))

    @classmethod
    def with_filters(cls, cases: Iterable[Mapping]) -> "CaseCards":
        """Return cards with filters. Cards of one mistake stand together, the most frequent mistake first."""
        cards = list(map(Card, cases))
        times = Counter(card.headline for card in cards)
        return cls(tuple(sorted(cards, key=lambda card: (-times[card.headline], card.headline))), True)

    def _repr_html_(self) -> str:
        rules, lists, marks = self._filters() if self.filters else ("", "", [""] * len(self.cards))
        shown = "".join(card.html(mark) for card, mark in zip(self.cards, marks, strict=True))
        count = f'<p class="kvviz-count" hidden>of {len(self.cards)} cases are shown.</p>' if self.filters else ""
        name = "kvviz-cases kvviz-filtered" if self.filters else "kvviz-cases"
        return f'<style>{STYLE}{CARD_STYLE}{rules}</style><div class="{name}">{lists}{shown}{count}</div>'

    def _filters(self) -> tuple[str, str, list[str]]:
        """Return the CSS rules of the filters, the lists to choose from, and the attributes of each card.

        A page without the style hides the lists. In a notebook that JupyterLab does not trust, they have no effect.
        The keys of a list are no commands of JupyterLab: there, two keys d would delete the notebook cell.
        """
        rules, lists, marks = "", "", [""] * len(self.cards)
        for number, (label, look) in enumerate(FILTERS.items()):
            values = [look(card) for card in self.cards]
            options = '<option value="">all</option>'
            for place, value in enumerate(sorted(set(values), key=_order)):
                options += f'<option value="{number}-{place}">{escape(value)} ({values.count(value)})</option>'
                rules += (
                    f'.kvviz-filtered:has(option[value="{number}-{place}"]:checked) > '
                    f'details:not([data-{number}="{place}"]) {{ display: none }}\n'
                )
                marks = [
                    f'{mark} data-{number}="{place}"' if own == value else mark
                    for mark, own in zip(marks, values, strict=True)
                ]
            lists += f'<label>{label}<select data-lm-suppress-shortcuts="true">{options}</select></label>'
        group = 'class="kvviz-filters" role="group" aria-label="Which cases are shown" hidden'
        return rules, f"<div {group}>{lists}</div>", marks

    def __repr__(self) -> str:
        return "\n".join(f"{card.case['kind']} {card.case['id']:21} {card.headline}" for card in self.cards)


def _order(value: str) -> tuple[int, str]:
    """Return a key that sorts symptoms and families as in the book, and other values by the alphabet."""
    known = (*SYMPTOMS, *FAMILIES)
    return known.index(value) if value in known else 0, value.lower()
