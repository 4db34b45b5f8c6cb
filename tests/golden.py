"""Golden data: what released vLLM code computed. Read by the tests, never by the package."""

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
SCALE_VIEWS = json.loads((FOLDER / "vllm_scale_views.json").read_text())
LAYOUT_STRIDES = json.loads((FOLDER / "vllm_layout_strides.json").read_text())
CACHE_BYTES = FOLDER / "vllm_cache_bytes.safetensors"


def row_id(row: dict) -> str:
    """A short test id for a row of either JSON file."""
    keys = ("vllm", "mode", "layout", "allocation", "layers", "kv_heads", "page_size_padded")
    return "-".join(str(row[key]) for key in keys if row.get(key) is not None)
