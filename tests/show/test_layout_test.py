"""``assert_layout``: it passes, or raises an AssertionError with the findings and a map of the first error."""

import pytest
import torch

from kvviz.audit.claims import Disjoint, StepAlike
from kvviz.audit.view import Storage, View
from kvviz.show.layout_test import assert_layout


def test_a_layout_passes_or_fails_with_a_map():
    pool = torch.empty(4, 2, 16, device="meta")
    claims = [Disjoint(("layer 0 K", "layer 0 V"))]
    assert_layout({"layer 0 K": pool[:, 0], "layer 0 V": pool[:, 1]}, claims)
    with pytest.raises(AssertionError) as caught:
        assert_layout({"layer 0 K": pool[:, 0], "layer 0 V": pool[:, :, 8]}, claims)
    told = str(caught.value)
    assert told.startswith("collision: layer 0 K, layer 0 V: 8 elements, 16 bytes of storage 0")
    assert "|kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk####kkkk" in told and "# contested" in told


def test_a_finding_about_numbers_has_no_map_and_views_are_accepted():
    storage = Storage("s", 64)
    views = [View("a", storage, (4, 2), (2, 1)), View("b", storage, (4, 3), (3, 1), 8)]
    with pytest.raises(AssertionError) as caught:
        assert_layout(views, [StepAlike("a", "b")])
    assert "|" not in str(caught.value)
    assert_layout(views, [Disjoint(("a", "b"))])
