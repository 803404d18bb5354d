"""What a rotary embedding does as a text grows."""

from __future__ import annotations

from typing import Any


def rope_changes_with_length(model: Any) -> bool:
    """Whether a transformers model's rotary embedding depends on the longest position of a call: rows of a batch then
    depend on their neighbours, and a call on several tokens differs from those on one where it crosses the length."""
    return rope_constant_up_to(model.config) is not None


def rope_constant_up_to(config: Any) -> int | None:
    """The number of tokens beyond which the rotary embedding of a configuration's text model changes for all of a
    call's positions; None where it never does. LongRoPE with one set of factors for all lengths does not."""
    config = config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    lengths = []
    for rope in (ropes, *ropes.values()):
        kind = str(rope.get("rope_type")) if isinstance(rope, dict) else ""
        if "dynamic" in kind:
            lengths.append(int(config.max_position_embeddings))
        elif kind == "longrope" and not _same_for_all_lengths(rope):
            lengths.append(int(rope.get("original_max_position_embeddings") or config.max_position_embeddings))
    return min(lengths, default=None)


def context_of(config: Any) -> int | None:
    """The most tokens of a text, None without a limit: no more than the rotary embedding is constant up to. Beyond,
    keys in the cache were made with other factors than the next call's, and `generate` of some models makes the
    cache anew there."""
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min((n for n in (own, rope_constant_up_to(config)) if n is not None), default=None)


def _same_for_all_lengths(rope: Any) -> bool:
    """short_mscale, long_mscale: PhiMoE's scales of the two lengths."""
    factors = rope.get("short_factor") == rope.get("long_factor")
    return bool(factors and rope.get("short_mscale") == rope.get("long_mscale"))
