"""What a draft step and target calls cost: the one probe of run, overlap and bench, apart from any timed text."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from specgen.decoding.captured.fits import loop_for
from specgen.decoding.eager import start as prefill_both
from specgen.decoding.pair import Pair
from specgen.errors import CaptureError
from specgen.machine.clocks import interleaved_medians
from specgen.rounds.costs import CallCosts
from specgen.sampling.randomness import Uniforms, prompt_digest

Step = Callable[[], object]


PROBE_PREFIX = 256  # tokens before the calls whose cost is measured


FULL_WIDTHS = 9  # every width up to this is probed where a bench asks, then every other power of two


def few_widths(max_k: int) -> list[int]:
    """1, max_k + 1 and some between them, for a rough curve."""
    return sorted({w for w in (1, 2, 3, 5, 9, 17, 33) if w <= max_k} | {max_k + 1})


def all_widths(max_k: int) -> list[int]:
    """The same with every width of the usual k."""
    return sorted({w for w in (*range(1, FULL_WIDTHS + 1), 17, 33) if w <= max_k} | {max_k + 1})


def probe(
    pair: Pair, tokens: Sequence[int], widths: Sequence[int], *, context: int | None = None, repeats: int = 9
) -> CallCosts:
    """A short interleaved probe behind the text's beginning, in seconds: a draft step, and target calls on `widths`
    tokens. Starts both sides anew.

    Raises ValueError where the context does not hold the widest call behind one token.
    """
    most = max(widths)
    room = PROBE_PREFIX if context is None else min(PROBE_PREFIX, context - most)
    prefix = list(tokens[:room]) if room >= 1 else []
    if not prefix:
        raise ValueError(f"a context of {context} tokens has no room for k = {most - 1}")
    assert pair.drafter is not None
    uniforms = pair.uniforms(pair.sampling.seed, prompt_digest(prefix))
    prefill_both(pair.target, pair.drafter, prefix)
    captured: Mapping[str, Step] = {}
    if pair.target.engine == "graph":
        with contextlib.suppress(CaptureError):  # such a pair is run by the eager loop
            wide = dataclasses.replace(pair, sampling=dataclasses.replace(pair.sampling, k=most - 1))
            captured = loop_for(wide).probes(prefix, widths)
    return probe_here(pair, prefix, widths, uniforms, feed=tokens, captured=captured, repeats=repeats)


def probe_here(
    pair: Pair,
    text: Sequence[int],
    widths: Sequence[int],
    uniforms: Uniforms,
    *,
    feed: Sequence[int] = (),
    captured: Mapping[str, Step] | None = None,
    repeats: int = 9,
) -> CallCosts:
    """The same at the end of a text that both sides have been taken through, to which both are rolled back.

    feed: what the wider calls are made on, over and over; the text's own tokens where it is empty. captured: steps
    that stand in for the eager ones, "draft" and each width by its number.
    """
    target, drafter = pair.target, pair.drafter
    assert drafter is not None
    text, behind = list(text), list(itertools.islice(itertools.cycle(feed or text), max(widths) - 1))

    def draft_step() -> None:
        drafter.propose(text, 1, 0, uniforms)
        drafter.rollback(max(0, drafter.cached - (len(text) - 1)))

    def call(width: int) -> Step:
        def step() -> None:
            fed = [*text[target.lengths[0] :], *behind[: width - 1]]
            target.forward(torch.tensor([fed]), width)
            target.rollback([len(fed)])

        return step

    steps: dict[str, Step] = {"draft": draft_step, **{str(w): call(w) for w in widths}, **(captured or {})}
    medians = interleaved_medians(steps, pair.clock, repeats=repeats)
    return CallCosts({w: medians[str(w)] for w in widths}, medians["draft"])
