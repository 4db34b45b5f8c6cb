"""A connector for vLLM that only says which layout it prefers. It moves no bytes. This file runs inside the engine.

Up to vLLM 0.28 a connector says with ``prefer_cross_layer_blocks`` that it prefers one buffer for all layers. Releases
from 0.29.0 on ask a connector for the name of a layout instead.
"""

import os

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

CROSS_LAYER_NAMES = {"NHD": "BLNHC", "HND": "BHLNC"}
"""The later names of the layouts that the older names gave with one buffer for all layers."""


class NoMetadata(KVConnectorMetadata):
    """The message from the scheduler to the worker. It is empty, because there is nothing to move."""


class PreferCrossLayer(KVConnectorBase_V1):
    """Prefers one buffer for all layers, and does nothing else."""

    @property
    def prefer_cross_layer_blocks(self):
        """Return True. vLLM up to 0.28 asks for this."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        """Return the name of a cross-layer layout to releases that know such names, and None to older releases."""
        if hasattr(KVConnectorBase_V1, "prefer_cross_layer_blocks"):
            return None
        return CROSS_LAYER_NAMES[os.environ["KVVIZ_LAYOUT"]]

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """Return that no tokens can be loaded."""
        return 0, False

    def build_connector_meta(self, scheduler_output):
        """Return the empty message."""
        return NoMetadata()

    def _nothing(self, *given, **named):
        """Do nothing: there are no bytes to move."""

    register_kv_caches = register_cross_layers_kv_cache = _nothing
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = update_state_after_alloc = _nothing
