"""What a bench knows of its models apart from its arms: the bytes of a call; and what is timed unpredicted."""

from __future__ import annotations

import torch

from specgen.models.protocol import LanguageModel
from specgen.models.traffic import cache_bytes, call_bytes

UNPREDICTED = (2, 4, 8)  # what auto times where nothing predicts


def bytes_of(model: LanguageModel | None) -> tuple[int, int]:
    """Of the parameters that a call reads, and of the keys and values of a cached token; 0 for what is no module."""
    module = getattr(model, "model", None)
    return (call_bytes(module), cache_bytes(module)) if isinstance(module, torch.nn.Module) else (0, 0)
