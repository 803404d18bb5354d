"""What a draft step and a target call cost, measured apart from any text."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specgen.decoding.captured.fits import loop_for
from specgen.decoding.eager import start as prefill_both
from specgen.decoding.pair import Pair
from specgen.errors import CaptureError
from specgen.machine.clocks import interleaved_medians
from specgen.rounds.expected import interpolated
from specgen.sampling.randomness import KeyedUniforms, prompt_digest

PROBE_PREFIX = 256  # tokens before the calls whose cost is measured


@dataclass(frozen=True, slots=True)
class Costs:
    """c, and [k+1] costs of calls on 1, 2, … tokens, in units of a single-token target call; seconds as measured."""

    c: float
    verify: tuple[float, ...]
    draft_s: float | None = None
    target_s: Mapping[int, float] | None = None  # by the number of tokens in the call


def measure_costs(
    pair: Pair,
    tokens: Sequence[int],
    max_k: int,
    *,
    context: int | None = None,
    repeats: int = 9,
    widths: Sequence[int] | None = None,
) -> Costs:
    """A short interleaved probe behind the text's beginning: a draft step, and target calls on 1 … max_k + 1 tokens.

    widths: the numbers of tokens called with, 1 and max_k + 1 among them; a few of them where not given.
    Raises ValueError where the context does not hold max_k + 1 tokens more than one. Starts both sides anew.
    """
    target, drafter = pair.target, pair.drafter
    assert drafter is not None
    room = PROBE_PREFIX if context is None else min(PROBE_PREFIX, context - max_k - 1)
    prefix = list(tokens[:room]) if room >= 1 else []
    if not prefix:
        raise ValueError(f"a context of {context} tokens has no room for k = {max_k}")
    feed = list(itertools.islice(itertools.cycle(tokens), max_k))
    uniforms = KeyedUniforms(pair.sampling.seed, prompt_digest(prefix))
    prefill_both(target, drafter, prefix)

    def draft_step() -> None:
        drafter.propose(prefix, 1, 0, uniforms)
        drafter.rollback(max(0, drafter.cached - (len(prefix) - 1)))

    def call(width: int) -> Callable[[], None]:
        def step() -> None:
            target.forward(torch.tensor([[prefix[-1], *feed[: width - 1]]]), width)
            target.rollback([width])

        return step

    if widths is None:
        widths = sorted({w for w in (1, 2, 3, 5, 9, 17, 33) if w <= max_k} | {max_k + 1})
    steps: dict[str, Callable[[], object]] = {"draft": draft_step, **{str(w): call(w) for w in widths}}
    if target.engine == "graph":
        with contextlib.suppress(CaptureError):  # such a pair is run by the eager loop
            wide = dataclasses.replace(pair, sampling=dataclasses.replace(pair.sampling, k=max_k))
            steps |= loop_for(wide).probes(prefix, widths)
    medians = interleaved_medians(steps, pair.clock, repeats=repeats)
    target_s = {w: medians[str(w)] for w in widths}
    unit = target_s[1]
    verify = interpolated({w: s / unit for w, s in target_s.items()}, max_k + 1)
    return Costs(medians["draft"] / unit, tuple(verify), medians["draft"], target_s)
