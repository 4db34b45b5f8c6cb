"""One run of a released engine: the corruption of vLLM issue 48412, and the prediction of it.

The test runs only if KVVIZ_REQUIRE_ENGINE is set, because the engine needs 4 GB of packages and minutes.
"""

import os

import pytest

from kvviz.bench.engine_run import EngineSettings, run
from kvviz.bench.prediction import disagreements, is_right, kit_answer, predict

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("KVVIZ_REQUIRE_ENGINE"), reason="set KVVIZ_REQUIRE_ENGINE to run an engine"),
]


@pytest.mark.parametrize(("release", "right"), [("0.25.1", False), ("0.26.0", True)])
def test_the_released_engine_does_what_was_predicted(release, right):
    settings = EngineSettings(release, connector="prefer-cross-layer", tokens=4)
    record = run(settings)
    expected, _ = kit_answer(record.prompt_token_ids, 4)
    assert is_right(record.token_ids, expected) == right
    assert disagreements(predict(settings), record, right) == ()
    assert "Triton's compiler" in {one["part"] for one in record.replaced}
