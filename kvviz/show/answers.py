"""Shows answers of a language model as tokens, one answer above the other, with the first wrong token marked.

A token is wrong if another token stands at this place of the first answer, which is the reference. The mark is a frame
and a word, so it does not depend on colour alone.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kvviz.show.colours import GREY, INK, RED, WHITE, tint

_RIGHT, _WRONG = tint("#228833", 0.16), tint(RED, 0.18)
_TOKEN = "display:inline-block;margin:1px 2px;padding:1px 5px;border-radius:4px;white-space:pre;font-family:monospace;"


@dataclass(frozen=True)
class Answer:
    """One answer.

    Args:
        label: what gave the answer, for example "one buffer for all layers".
        tokens: the texts of the tokens, in order.
        margins: for each token, how far the logit of the second most likely token was behind. Empty if unknown.
    """

    label: str
    tokens: tuple[str, ...]
    margins: tuple[float, ...] = ()

    @classmethod
    def of(cls, label: str, generation: Any) -> "Answer":
        """Return the answer of a run. ``generation`` has the fields ``tokens`` and ``margins``."""
        return cls(label, tuple(generation.tokens), tuple(generation.margins))


@dataclass(frozen=True)
class Answers:
    """Several answers to one prompt. The first answer is the reference. A notebook shows HTML, a terminal text."""

    reference: Answer
    others: tuple[Answer, ...]

    def first_wrong(self, answer: Answer) -> int | None:
        """Return the number of the first token that differs from the reference, or None.

        If an answer is longer than the reference, the tokens beyond the reference are not compared.
        """
        pairs = enumerate(zip(answer.tokens, self.reference.tokens, strict=False))
        return next((number for number, (ours, right) in pairs if ours != right), None)

    def sentence(self, answer: Answer) -> str:
        """Return one sentence about the first wrong token of an answer."""
        number = self.first_wrong(answer)
        if number is None:
            return "Every token is as in the reference."
        margin = f" Its logit was {answer.margins[number]:.2f} above the second." if answer.margins else ""
        return (
            f"Token {number}, counted from 0, is the first wrong token: {answer.tokens[number]!r} instead of "
            f"{self.reference.tokens[number]!r}.{margin}"
        )

    def _repr_html_(self) -> str:
        rows = [self._row(answer) for answer in (self.reference, *self.others)]
        return (
            f'<div class="kvviz-answers" style="background:{WHITE};color:{INK};border:1px solid #d4dae0;'
            f'border-radius:6px;padding:8px 12px;line-height:1.7;max-width:60rem">{"".join(rows)}</div>'
        )

    def _row(self, answer: Answer) -> str:
        wrong = self.first_wrong(answer)
        tokens = []
        for number, text in enumerate(answer.tokens):
            differs = wrong is not None and number >= wrong
            style = f"{_TOKEN}background:{_WRONG if differs else _RIGHT};color:{INK};"
            frame = f"outline:2px solid {RED};" if number == wrong else ""
            tokens.append(f'<span style="{style}{frame}">{_visible(text)}</span>')
        said = (
            ""
            if answer is self.reference
            else f'<div style="color:{GREY};font-size:.85em">{escape(self.sentence(answer))}</div>'
        )
        return (
            f'<div style="margin:4px 0"><div style="color:{GREY};font-size:.85em">{escape(answer.label)}</div>'
            f"<div>{''.join(tokens)}</div>{said}</div>"
        )

    def __str__(self) -> str:
        width = max(len(answer.label) for answer in (self.reference, *self.others))
        lines = []
        for answer in (self.reference, *self.others):
            lines.append(f"{answer.label:{width}}  {'|'.join(map(_shown, answer.tokens))}")
            lines += [f"{'':{width}}  {self.sentence(answer)}"] if answer is not self.reference else []
        return "\n".join(lines)

    __repr__ = __str__


class LiveAnswer:
    """Shows an answer in a notebook while its tokens arrive, below the reference. Call it with each token and margin.

    Args:
        label: what gives the answer.
        reference: the right answer, or None if this answer becomes the reference.
    """

    def __init__(self, label: str, reference: Answer | None = None) -> None:
        self._label, self._reference = label, reference
        self._tokens: list[str] = []
        self._margins: list[float] = []
        self._handle = None

    def __call__(self, token: str, margin: float) -> None:
        """Add a token, and show the answer up to this token. Outside of notebooks, nothing is shown."""
        self._tokens.append(token)
        self._margins.append(margin)
        answer = Answer(self._label, tuple(self._tokens), tuple(self._margins))
        shown = Answers(answer, ()) if self._reference is None else Answers(self._reference, (answer,))
        if self._handle is not None:
            self._handle.update(shown)
        elif "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            self._handle = sys.modules["IPython"].display.display(shown, display_id=True)


def compare_answers(reference: Answer, *others: Answer) -> Answers:
    """Return a comparison of answers with a reference."""
    return Answers(reference, others)


def _shown(text: str) -> str:
    """Return a token with visible line breaks."""
    return text.replace("\n", "↵")


def _visible(text: str) -> str:
    return escape(_shown(text)) or "&nbsp;"


def answer_of(label: str, token_ids: Sequence[int], texts: dict[str, str], margins: Sequence[float] = ()) -> Answer:
    """Return an answer from token ids and the texts of these tokens, by id. A file of recorded engines has both."""
    return Answer(label, tuple(texts[str(token)] for token in token_ids), tuple(margins))
