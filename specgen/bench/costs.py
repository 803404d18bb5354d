"""What a bench probes apart from its arms: bytes, widths, and what is chosen where nothing predicts."""

from __future__ import annotations

import torch

from specgen.models.protocol import LanguageModel
from specgen.models.traffic import cache_bytes, call_bytes

UNPREDICTED = (2, 4, 8)  # what auto times where nothing predicts


FULL_WIDTHS = 9  # every width up to this is probed, then every other power of two


def bytes_of(model: LanguageModel | None) -> tuple[int, int]:
    """Of the parameters that a call reads, and of the keys and values of a cached token; 0 for what is no module."""
    module = getattr(model, "model", None)
    return (call_bytes(module), cache_bytes(module)) if isinstance(module, torch.nn.Module) else (0, 0)
