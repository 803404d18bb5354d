"""A target, perhaps a drafter, and how tokens are drawn: what a generation needs besides its prompt."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from specgen.drafting.drafter import Drafter
from specgen.models.protocol import LanguageModel
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, SharedNoise
from specgen.settings import Mode, Sampling
from specgen.verification.rules import Rule, rule_for


class Hold:
    """Who works with a pair's models: one thread at a time, and one text at a time in their caches.

    captured: what the captured loop has made for these models, to be found again by the next text.
    """

    def __init__(self) -> None:
        self._owner: object = None
        self._busy = threading.Lock()
        self.captured: dict[Any, Any] = {}

    def take(self, owner: object) -> None:
        """From now on the caches hold this one's text."""
        self._owner = owner

    def check(self, owner: object) -> None:
        """Raises RuntimeError where somebody else has taken the models' caches."""
        if self._owner is not owner:
            raise RuntimeError("another generation of this session has begun: finish one before the next")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While the models work for one. Raises RuntimeError where they do for another one."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this session generates in another thread: give each thread a session of its own")
        try:
            yield
        finally:
            self._busy.release()


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
    hold: Hold = field(default_factory=Hold, compare=False, repr=False)
    rule: Rule | None = None

    @property
    def verified_by(self) -> Rule:
        """The rule in use: the mode's own, unless another stands in for it."""
        return self.rule or rule_for(self.sampling)

    def uniforms(self, seed: int, digest: int) -> KeyedUniforms:
        """The randomness of a text under the mode, by seed and digest of the prompt."""
        return (SharedNoise if self.sampling.mode is Mode.COUPLED else KeyedUniforms)(seed, digest)
