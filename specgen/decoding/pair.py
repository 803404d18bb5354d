"""A target, perhaps a drafter, and how tokens are drawn: what a generation needs besides its prompt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from specgen.drafting.drafter import Drafter
from specgen.models.protocol import LanguageModel
from specgen.sampling.processors import Processors
from specgen.settings import Sampling
from specgen.verification.rules import Rule


@dataclass(frozen=True)
class Pair:
    """A target, perhaps a drafter, and how tokens are drawn: all that a generation needs besides its prompt.

    rule: used instead of the mode's own, where an audit is to catch a wrong one.
    """

    target: LanguageModel
    drafter: Drafter | None
    processors: Processors
    sampling: Sampling
    tokenizer: Any
    dtype: torch.dtype
    clock: Callable[[], float]
    # Whose text the caches hold now; one entry, so that the frozen pair can say it.
    holder: list[object] = field(default_factory=lambda: [None], compare=False, repr=False)
    rule: Rule | None = None
    busy: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
