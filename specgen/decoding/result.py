"""A generation → the result that a run's file holds of it."""

from __future__ import annotations

import torch

from specgen.decoding.generation import Generation
from specgen.decoding.self_check import CheckResult
from specgen.decoding.text import pieces
from specgen.results.run import Result


def engine_line(generation: Generation) -> str:
    """How the target's calls were executed, and why not as was asked for, where they were not."""
    target = generation.pair.target
    engine = "eager" if generation.engine_note else target.engine
    words = [f"{engine}, {str(generation.pair.dtype).removeprefix('torch.')} on {target.device}"]
    if str(target.device) == "cpu":
        words.append(f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}")
    return ", ".join(words) + (f" ({generation.engine_note})" if generation.engine_note else "")


def result_of(
    generation: Generation,
    check: CheckResult | None,
    cost: dict[str, float] | None,
    *,
    prompt: str,
    name: str,
    interrupted: bool = False,
) -> Result:
    """One prompt's result. check, cost: None where they were left out."""
    text = [*generation.prompt, *generation.tokens]
    finish = generation.finish and generation.finish.value
    return Result.model_validate(
        {
            "name": name,
            "prompt": prompt,
            "text": generation.text,
            "finish": "interrupted" if interrupted else finish,
            "prompt_tokens": generation.prompt,
            "tokens": generation.tokens,
            "pieces": pieces(generation.pair.tokenizer, text, len(generation.prompt)),
            "plain": generation.plain,
            "promise": generation.promise,
            "engine": engine_line(generation),
            "prefill_s": generation.prefill_s,
            "cost": cost,
            "check": check,
            "rounds": generation.rounds,
        }
    )
