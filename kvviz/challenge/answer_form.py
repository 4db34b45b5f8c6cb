"""A form that checks an answer to the challenge inside a page, without Python.

The page holds no answer in clear text, only hashes of the right answers. Somebody could find an answer by trying all
of them, but nobody reads an answer by accident.
"""

import hashlib
import json
from html import escape

from kvviz.challenge.questions import FIRST_BYTE, FIXES, LEVELS, PARTS, Case, check, right_answers

ROUNDS = 20_000
"""Rounds of PBKDF2. A browser needs a few milliseconds for them."""

_SCRIPT = """
(() => {
  const box = document.getElementById(%(name)s), right = %(hashes)s;
  if (!box || box.dataset.ready) return;
  box.dataset.ready = "1";
  const said = box.querySelector("output"), text = new TextEncoder();
  const hashed = async (part, answer) => {
    const key = await crypto.subtle.importKey("raw", text.encode(answer), "PBKDF2", false, ["deriveBits"]);
    const how = { name: "PBKDF2", hash: "SHA-256", salt: text.encode(%(salt)s + part), iterations: %(rounds)d };
    const bits = new Uint8Array(await crypto.subtle.deriveBits(how, key, 128));
    return [...bits].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  };
  const check = async () => {
    if (!globalThis.crypto?.subtle) { said.textContent = "This browser cannot check answers on this page."; return; }
    const lines = [];
    for (const field of box.querySelectorAll("[data-part]")) {
      const part = field.dataset.part, answer = field.value.trim().toLowerCase().replaceAll(",", "");
      const state = !answer ? "not given yet" : right[part].includes(await hashed(part, answer)) ? "right" : "wrong";
      lines.push(`${part}: ${state}`);
    }
    said.textContent = lines.join(", ") + (lines.every((line) => line.endsWith("right")) ? ". Solved!" : ".");
  };
  box.querySelector("button").addEventListener("click", check);
  box.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); check(); } });
  box.querySelector("[data-live]").hidden = false;
})();
"""


class AnswerForm:
    """The form for one case. A notebook shows it as HTML."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def _repr_html_(self) -> str:
        case, field = self.case, "font:inherit;min-height:40px;padding:2px 8px;margin:2px 12px 2px 4px"
        name = f"kvviz-answer-{case.level}-{case.seed}-{case.number}"
        kinds = _options(sorted(kind for kind in FIRST_BYTE if case.level != "easy" or kind in LEVELS["easy"]))
        fields = (
            f'<label>kind <select data-part="kind" style="{field}">{kinds}</select></label> '
            f'<label>first byte <input data-part="first byte" size="8" autocomplete="off" style="{field}" '
            f'placeholder="or none"></label> '
            f'<label>fix <select data-part="fix" style="{field}">{_options(list(FIXES))}</select></label> '
            f'<button type="button" style="{field};cursor:pointer">Check</button>'
        )
        given = {
            "name": json.dumps(name),
            "hashes": json.dumps(hashes(case)),
            "salt": json.dumps(_salt(case)),
            "rounds": ROUNDS,
        }
        return (
            f'<div id="{name}" role="group" aria-label="{escape(case.name)}"><div data-live hidden>{fields}'
            f'<output aria-live="polite" style="display:block;min-height:1.5em"></output></div>'
            f"<noscript>To check an answer on this page, switch JavaScript on.</noscript></div>"
            f"<script>{_SCRIPT % given}</script>"
        )

    def __repr__(self) -> str:
        return str(check(self.case))


def hashes(case: Case) -> dict[str, list[str]]:
    """Return the hashes of all right answers by part. A part can have several right answers, in fixed order."""
    answers = right_answers(case)
    return {part: sorted(_hashed(case, part, answer) for answer in answers[part]) for part in PARTS}


def _hashed(case: Case, part: str, answer: str) -> str:
    salt = (_salt(case) + part).encode()
    return hashlib.pbkdf2_hmac("sha256", answer.encode(), salt, ROUNDS, dklen=16).hex()


def _salt(case: Case) -> str:
    return f"kvviz {case.level} {case.seed} {case.number} "


def _options(words: list[str]) -> str:
    return "".join(f"<option>{escape(one)}</option>" for one in ("", *words))
