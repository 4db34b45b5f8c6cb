"""The opening of a report's front page: the living picture of the bug, and the two answers of the released engine."""

import json
from pathlib import Path

from kvviz.show.answers import answer_of, compare_answers
from kvviz.show.story_picture import StoryPicture, story_svg

RIGHT = ("0.25.1", "fp8_per_token_head", "none", "NHD")
WRONG = ("0.25.1", "fp8_per_token_head", "prefer-cross-layer", "NHD")
"""Two recorded runs of one release: without a connector, and with a connector that prefers one buffer."""


_STORY = """\
<h1>Every layer wrote its scales to the same bytes</h1>
<p class="kvviz-lead">A language model keeps the keys and values of earlier tokens in a KV cache, and a quantised cache
stores one small number, a <em>scale</em>, behind each of them. In July 2026, two features of vLLM met: an offloading
connector put all layers into one buffer, and the code for quantised caches still counted as if each layer had a buffer
of its own. So all layers wrote their scales to the same bytes, nothing crashed, and the model answered with
garbage.</p>
"""

_FACTS = """\
<dl class="kvviz-facts">
<div><dt>What broke</dt><dd>Each layer finds its scales through a view: a start, and steps through memory. The steps
assumed one buffer per layer, but the connector, which moves the cache to host memory, had asked for one buffer for all
layers. Most scales were lost.</dd></div>
<div><dt>Why no test saw it</dt><dd>Each part was right, and passed its own tests. Only the two together were
wrong. No address was out of bounds, so nothing raised an error.</dd></div>
<div><dt>What fixed it</dt><dd>Four lines where the buffer is chosen
(<a href="https://github.com/vllm-project/vllm/pull/49226">PR 49226</a>, from release 0.27.1 on): a cache with scales
behind each cell never gets one buffer for all layers, whichever connector asks. Release 0.26.0 had also corrected the
views: it computes them from the real steps.</dd></div>
</dl>
"""


def opening(recorded: Path, scripts: bool = True) -> str:
    """Return the opening as HTML: the story, the picture, the answers, and three facts.

    Args:
        recorded: the file ``notebooks/recorded_engines.json``. Without this file, the answers are left out.
        scripts: False if no script can run, as in JupyterLab. Then the picture plays without end.
    """
    told = answers(recorded)
    heading = "<h2>One prompt, the same release, two layouts</h2>" if told else ""
    shown = (
        StoryPicture()._repr_html_()
        if scripts
        else f'<figure class="kvviz-opening"><div class="kvviz-scroll">{story_svg(looping=True)}</div></figure>'
    )
    return f"{_STORY}{shown}{heading}{told}{_FACTS}"


def answers(recorded: Path) -> str:
    """Return the right and the wrong answer as HTML, or "" if the file has no such runs.

    Args:
        recorded: the file ``notebooks/recorded_engines.json``.
    """
    if not recorded.is_file():
        return ""
    matrix = json.loads(recorded.read_text(encoding="utf-8"))
    keys = ("release", "kv_cache_dtype", "connector", "layout")
    runs = {tuple(run[key] for key in keys): run for run in matrix["runs"] if "token_ids" in run}
    if RIGHT not in runs or WRONG not in runs:
        return ""
    texts = matrix["token_texts"]
    labels = {RIGHT: "vLLM 0.25.1, one buffer per layer", WRONG: "vLLM 0.25.1, one buffer for all layers"}
    shown = [answer_of(labels[key], runs[key]["token_ids"], texts, runs[key]["margins"]) for key in (RIGHT, WRONG)]
    return compare_answers(*shown)._repr_html_()
