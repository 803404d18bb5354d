"""A pair run the shared way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specgen.decoding.eager import speculative, start
from specgen.drafting.checkpoint import ModelDrafter
from specgen.rounds.record import Round, ends_at
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, prompt_digest
from specgen.settings import Mode, Sampling
from specgen.verification.rules import RULES, Rule

EXACT = RULES[Mode.EXACT]


def rounds_of(
    target: Any,
    draft: Any,
    prompt: list[int],
    s: Sampling,
    *,
    rule: Rule = EXACT,
    fresh: bool = True,
    drafter: ModelDrafter | None = None,
) -> Iterator[Round]:
    processors = Processors.of(s)
    drafter = drafter or ModelDrafter(draft, processors)
    if fresh:
        start(target, drafter, prompt)
    return speculative(
        target,
        drafter,
        processors,
        prompt,
        k=s.k,
        max_new_tokens=s.max_new_tokens,
        uniforms=KeyedUniforms(s.seed, prompt_digest(prompt)),
        ended=ends_at(s.end_tokens),
        rule=rule,
    )
