"""Which pairs the captured loop can serve, and the loop that serves one."""

from __future__ import annotations

from typing import Any

from specgen.decoding.captured.capture import Capture, capture_for
from specgen.decoding.captured.loop import GraphLoop
from specgen.decoding.pair import Hold, Pair
from specgen.errors import CaptureError
from specgen.models.causal import CausalLM
from specgen.models.protocol import LanguageModel
from specgen.models.static import StaticCache, static_cache
from specgen.sampling.device import on_device
from specgen.settings import Mode

LOOPS_KEPT = 12  # of one pair's models: each has graphs of its own


def why_not(pair: Pair, *, plain: bool = False) -> str | None:
    """Why this pair's loop cannot be captured, in one line; None where it can.

    plain: only decoding without the draft is wanted. A drafter that proposes on the host has the rest
    captured. The first time, each model is tried on a static cache.
    """
    try:
        _parts(pair, plain)
    except CaptureError as error:
        return str(error)
    return None


def _parts(pair: Pair, plain: bool) -> tuple[StaticCache, StaticCache | None]:
    """The target's static cache, and the draft's where its steps are captured too. Raises CaptureError."""
    target, drafter = pair.target, pair.drafter
    if type(target) is not CausalLM:
        raise CaptureError(f"the target is a {type(target).__name__}")
    on_device(pair.processors)
    if plain or drafter is None:
        return _cache(pair.hold, target), None
    if pair.rule is not None:
        raise CaptureError(f"the rule {pair.rule.name} stands in for the mode's own")
    if pair.processors.greedy != (pair.sampling.mode is Mode.GREEDY):
        raise CaptureError(f"mode {pair.sampling.mode.value} does not fit processors that are greedy, or are not")
    if not drafter.chain:
        return _cache(pair.hold, target), None
    if type(drafter.model) is not CausalLM or drafter.processors is not pair.processors:
        raise CaptureError("the draft is not a model with the target's processors")
    if drafter.model.device != target.device:
        raise CaptureError(f"the target is on {target.device} and the draft on {drafter.model.device}")
    if drafter.model.vocabulary != target.vocabulary:
        raise CaptureError("target and draft return different numbers of columns")
    return _cache(pair.hold, target), _cache(pair.hold, drafter.model)


def _cache(hold: Hold, model: LanguageModel) -> StaticCache:
    """The model's static cache, made and tried once. Raises CaptureError."""
    assert isinstance(model, CausalLM)
    key = ("static cache", id(model))
    if key not in hold.captured:
        try:
            hold.captured[key] = static_cache(model)
        except CaptureError as error:
            hold.captured[key] = error
    if isinstance(made := hold.captured[key], CaptureError):
        raise made
    return made


def loop_for(pair: Pair, *, plain: bool = False, capture: Capture | None = None) -> GraphLoop:
    """The captured loop of a pair, kept with its models for the next text. Raises CaptureError."""
    target, draft = _parts(pair, plain)
    s = pair.sampling
    drafter = pair.drafter if draft is None and not plain else None
    speculative = draft is not None or drafter is not None
    settings = (s.mode, s.k, s.lenience, s.typical_epsilon, s.typical_delta) if speculative else s.mode
    key = (id(pair.processors), id(target), id(draft), id(drafter), settings, capture)
    loops: dict[Any, GraphLoop] = pair.hold.captured.setdefault("loops", {})
    loop = loops.pop(key, None) or GraphLoop(
        target, draft, pair.processors, s, capture or capture_for(target.model.device), drafter
    )
    loops[key] = loop
    while len(loops) > LOOPS_KEPT:
        del loops[next(iter(loops))]
    return loop
