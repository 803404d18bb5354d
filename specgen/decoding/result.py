"""A generation → the record that a result file holds of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specgen.prompts.read import ANSWER_KEY
from specgen.results.document import plain_data

if TYPE_CHECKING:
    from specgen.decoding.generation import Generation
    from specgen.decoding.self_check import CheckResult


def engine_line(generation: Generation) -> str:
    """How the target's calls were executed, and why not as was asked for, where they were not."""
    import torch

    target: Any = generation.pair.target
    device = getattr(target, "device", "cpu")
    engine = "eager" if generation.engine_note else getattr(target, "engine", "eager")
    words = [f"{engine}, {str(generation.pair.dtype).removeprefix('torch.')} on {device}"]
    if str(device) == "cpu":
        words.append(f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}")
    return ", ".join(words) + (f" ({generation.engine_note})" if generation.engine_note else "")


def result_json(
    generation: Generation,
    check: CheckResult | None,
    cost: dict[str, float] | None,
    *,
    prompt: str,
    name: str,
    interrupted: bool = False,
) -> dict[str, Any]:
    """One prompt's result: text, every round with its raw timings, statistics, check. pieces: each token's text."""
    from specgen.decoding.text import pieces

    s = generation.statistics
    text = [*generation.prompt, *generation.tokens]
    rates = {n: getattr(s, n) for n in ("alpha", "tau", "accepted_fraction", "tokens_per_second")}
    return plain_data(
        {
            "name": name,
            "prompt": prompt,
            "text": generation.text,
            "finish": "interrupted" if interrupted else generation.finish,
            "prompt_tokens": generation.prompt,
            "tokens": generation.tokens,
            "pieces": pieces(generation.pair.tokenizer, text, len(generation.prompt)),
            "plain": generation.plain,
            "promise": generation.promise,
            "engine": engine_line(generation),
            "prefill_s": generation.prefill_s,
            "statistics": {**plain_data(s), **rates},
            "cost": cost,
            "check": None
            if check is None
            else {**plain_data(check), "passed": check.passed, "verdict": check.verdict},
            "rounds": generation.rounds,
        }
    )


def line_json(
    generation: Generation, check: CheckResult | None, *, record: dict[str, Any], interrupted: bool = False
) -> dict[str, Any]:
    """One line of output for one line of .jsonl input: its fields as they came, and under ANSWER_KEY what became of
    its prompt."""
    s = generation.statistics
    answer = plain_data(
        {
            "text": generation.text,
            "finish": "interrupted" if interrupted else generation.finish,
            "tokens": generation.tokens,
            "mode": generation.pair.sampling.mode,
            "promise": generation.promise,
            "check": None if check is None else {"passed": check.passed, "verdict": check.verdict},
            "statistics": {
                "committed": s.committed,
                "rounds": s.rounds,
                "drafted": s.drafted,
                "tested": s.tested,
                "accepted": s.accepted,
                "alpha": s.alpha,
                "predicted_alpha": s.predicted_alpha,
                "tau": s.tau,
                "tokens_per_second": s.tokens_per_second,
            },
        }
    )
    return {**record, ANSWER_KEY: answer}
