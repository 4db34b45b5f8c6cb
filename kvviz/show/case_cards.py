"""Shows the cases of the case book as cards that a reader can open and close.

A closed card is one line: the name of the case and its diagnosis. An open card has the symptom, the picture of the
mistake, the repair, and the verdict of the public report.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape

from kvviz.audit.audit import audit_views
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
"""


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
        said = [("Report", f"{case['repo']}#{case['number']}, kind {case['kind']}. {case['symptom']}")]
        said += [("What happened", case["mechanism"])]
        for one in self.diagnoses:
            proof = f" {proof_of(self.diagnoses)}" if one.proved else ""
            said += [("Diagnosis", f"{one.text} {one.effect}"), ("First place", first_place(one.findings))]
            said += [("Repair", f"{one.repair}.{proof}" if one.proved else one.repair)]
        said += [] if self.diagnoses else [("Diagnosis", self.result.verdict)]
        return [*said, ("Verdict", case["verdict"]), ("Fix of the project", case["fix"])]

    @property
    def html(self) -> str:
        """The folded card."""
        rows = "".join(f"<p><b>{escape(label)}:</b> {escape(text)}</p>" for label, text in self.lines)
        summary = f"<summary><b>{escape(self.case['id'])}</b>: {escape(self.headline)}</summary>"
        return f"<details>{summary}{rows}{''.join(map(self._picture, self.diagnoses))}</details>"

    def _picture(self, one: Diagnosis) -> str:
        repaired = {view.name: view for view in one.repaired}
        window = place_window(one, self.file.views, self.file.claims, repaired)
        alone = len({view.storage for view in self.file.views}) == 1
        return "" if window is None else picture(window, alone)


@dataclass(frozen=True)
class CaseCards:
    """Cards of several cases, for the output of a notebook cell. A group of cards can be opened and closed.

    Attributes:
        groups: ``{title of the group: cards}``. If a title is empty, its cards are shown without a group.
    """

    groups: Mapping[str, tuple[Card, ...]]

    @classmethod
    def of(cls, cases: Iterable[Mapping]) -> "CaseCards":
        """Return cards of some cases, without groups."""
        return cls({"": tuple(map(Card, cases))})

    @classmethod
    def by_cause(cls, cases: Iterable[Mapping]) -> "CaseCards":
        """Return cards grouped by the diagnosis, the largest group first."""
        groups: dict[str, list[Card]] = {}
        for card in map(Card, cases):
            groups.setdefault(card.headline, []).append(card)
        ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
        return cls({title: tuple(cards) for title, cards in ordered})

    def _repr_html_(self) -> str:
        parts = []
        for title, cards in self.groups.items():
            inside = "".join(card.html for card in cards)
            folded = f"<details><summary>{len(cards)} x {escape(title)}</summary>{inside}</details>"
            parts.append(folded if title else inside)
        return f'<style>{STYLE}{CARD_STYLE}</style><div class="kvviz-cases">{"".join(parts)}</div>'

    def __repr__(self) -> str:
        cards = [card for group in self.groups.values() for card in group]
        return "\n".join(f"{card.case['kind']} {card.case['id']:21} {card.headline}" for card in cards)
