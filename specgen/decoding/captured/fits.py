"""Which pairs the captured loop can serve, and the loop that serves one."""

from __future__ import annotations

from typing import Any, Protocol

from specgen.decoding.captured.capture import Capture, capture_for
from specgen.decoding.captured.loop import GraphLoop
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.drafter import Drafter
from specgen.drafting.ngram import NgramDrafter
from specgen.errors import CaptureError
from specgen.models.causal import CausalLM
from specgen.models.protocol import LanguageModel
from specgen.models.static import StaticCache, static_cache
from specgen.sampling.device import on_device
from specgen.sampling.processors import Processors
from specgen.settings import Mode, Sampling
from specgen.verification.rules import Rule

LOOPS_KEPT = 12  # of one target: each has graphs of its own


class Captureable(Protocol):
    """What is asked of a `Pair`."""

    @property
    def target(self) -> LanguageModel: ...
    @property
    def drafter(self) -> Drafter | None: ...
    @property
    def processors(self) -> Processors: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def rule(self) -> Rule | None: ...


def why_not(pair: Captureable, *, plain: bool = False) -> str | None:
    """Why this pair's loop cannot be captured, in one line; None where it can.

    plain: only decoding without the draft is wanted. A drafter that proposes on the host has the rest
    captured. The first time, each model is tried on a static cache.
    """
    try:
        _parts(pair, plain)
    except CaptureError as error:
        return str(error)
    return None


def _parts(pair: Captureable, plain: bool) -> tuple[StaticCache, StaticCache | None]:
    """The two static caches. Raises CaptureError."""
    target, drafter, sampling = pair.target, pair.drafter, pair.sampling
    if type(target) is not CausalLM:
        raise CaptureError(f"the target is a {type(target).__name__}")
    on_device(pair.processors)
    if plain or drafter is None:
        return static_cache(target), None
    if pair.rule is not None:
        raise CaptureError(f"the rule {pair.rule.name} stands in for the mode's own")
    if pair.processors.greedy != (sampling.mode is Mode.GREEDY):
        raise CaptureError(f"mode {sampling.mode.value} does not fit processors that are greedy, or are not")
    if type(drafter) is NgramDrafter:
        return static_cache(target), None
    if type(drafter) is not ModelDrafter:
        raise CaptureError(f"a drafter of kind {drafter.kind} is not known to the captured loop")
    if type(drafter.model) is not CausalLM or drafter.processors is not pair.processors:
        raise CaptureError("the draft is not a model with the target's processors")
    if drafter.model.device != target.device:
        raise CaptureError(f"the target is on {target.device} and the draft on {drafter.model.device}")
    if drafter.model.vocabulary != target.vocabulary:
        raise CaptureError("target and draft return different numbers of columns")
    return static_cache(target), static_cache(drafter.model)


def loop_for(pair: Captureable, *, plain: bool = False, capture: Capture | None = None) -> GraphLoop:
    """The captured loop of a pair, kept with its target for the next text. Raises CaptureError."""
    target, draft = _parts(pair, plain)
    s = pair.sampling
    drafter = pair.drafter if draft is None and not plain else None
    speculative = draft is not None or drafter is not None
    settings = (s.mode, s.k, s.lenience, s.typical_epsilon, s.typical_delta) if speculative else s.mode
    key = (id(pair.processors), id(draft), id(drafter), settings, capture)
    loops: dict[Any, GraphLoop] = target.model.kept.setdefault("loops", {})
    loop = loops.pop(key, None) or GraphLoop(
        target, draft, pair.processors, s, capture or capture_for(target.model.device), drafter
    )
    loops[key] = loop
    while len(loops) > LOOPS_KEPT:
        del loops[next(iter(loops))]
    return loop
