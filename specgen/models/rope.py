"""What a rotary embedding does as a text grows."""

from __future__ import annotations

from typing import Any


def rope_changes_with_length(model: Any) -> bool:
    """Whether a transformers model's rotary embedding depends on the longest position of a call: rows of a batch then
    depend on their neighbours, and a call on several tokens differs from those on one where it crosses the length."""
    ropes = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    types = {str(rope.get("rope_type")) for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    return bool(types & {"dynamic", "longrope"})
