"""Seeded texts, round by round, as they were when they were first written down: a change of the house changes none.

`PYTHONPATH=tests python tests/decoding/test_seeded_texts.py --write` writes them anew; that changes every user's
seeded texts, and belongs in the changelog. The models are tiny and in float64, so that no machine's rounding decides.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.decoding.batch import BatchGeneration
from specgen.decoding.generation import Generation
from specgen.decoding.pair import Pair
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.ngram import NgramDrafter
from specgen.machine.clocks import untimed
from specgen.models.causal import CausalLM
from specgen.rounds.record import Round
from specgen.sampling.processors import Processors
from specgen.settings import Mode, Sampling
from support import tiny

STORED = Path(__file__).with_name("seeded_texts.json")
PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6, 9, 2, 6, 9, 2), (7,), (5, 3, 5, 8, 9, 7, 9, 3, 2, 3)]
MODES = ["exact", "greedy", "coupled", "lenient", "typical", "plain"]
WARPERS: dict[str, dict[str, Any]] = {
    "bare": {},
    "warped": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "ban": (0, 7)},
    "penalty": {"temperature": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 4},
}
WAYS = ["eager", "captured", "batch of 3"]
# Captured loops refuse processors that read the text: those two are left out. Greedy has no temperature.
CASES = [
    f"{mode}, {drafter}, {warpers}, {way}"
    for mode, drafter, warpers, way in itertools.product(MODES, ["checkpoint", "ngram"], WARPERS, WAYS)
    if not (mode == "plain" and drafter == "ngram")
    and not (warpers == "penalty" and way == "captured")
    and not (mode in ("lenient", "typical") and (drafter == "ngram" or warpers == "penalty"))
]


def texts_of(case: str) -> list[Any]:
    """Of each prompt the rounds: [drafted, tested, accepted, tokens, origins by their first letters, finish]."""
    mode, drafter, warpers, way = case.split(", ")
    settings = dict(WARPERS[warpers])
    if mode == "greedy":
        settings = {k: v for k, v in settings.items() if k in ("ban", "repetition_penalty", "no_repeat_ngram_size")}
        settings["temperature"] = None
    sampling = Sampling(
        mode=Mode("exact" if mode == "plain" else mode), k=3, max_new_tokens=24, seed=11, end_tokens=(13,), **settings
    )
    model = tiny.tiny_llama(0, dtype=torch.float64)
    target, processors = CausalLM(model, "target"), Processors.of(sampling)
    draft = CausalLM(tiny.noisy_copy(model, 0.3), "draft")
    proposes: Any = ModelDrafter(draft, processors)
    if drafter == "ngram":
        proposes = NgramDrafter(target.vocabulary, dtype=torch.float64)
    pair = Pair(target, proposes, processors, sampling, None, torch.float64, untimed)
    plain = mode == "plain"
    if way == "captured":
        target.engine = "graph"
    if way == "batch of 3":
        batch = BatchGeneration(pair, PROMPTS[:3], seeds=[11, 12, 13], plain=plain).run()
        return [told(rounds) for rounds in batch.rows_rounds]
    found = []
    for seed, prompt in enumerate(PROMPTS, 11):
        generation = Generation(replace(pair, sampling=replace(sampling, seed=seed)), prompt, plain=plain).run()
        assert generation.engine_note is None
        found.append(told(generation.rounds))
    return found


def told(rounds: list[Round]) -> list[Any]:
    return [
        [r.drafted, r.tested, r.accepted, list(r.tokens), "".join(c.origin[0] for c in r.committed), r.finish]
        for r in rounds
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_text_is_the_one_written_down(case: str) -> None:
    assert texts_of(case) == json.loads(STORED.read_text())[case]


def test_the_cases_tell_modes_apart_and_accept_and_reject() -> None:
    """A stored file in which every case were the same would prove little."""
    stored = json.loads(STORED.read_text())
    assert set(stored) == set(CASES)
    assert len({json.dumps(texts) for texts in stored.values()}) > len(CASES) / 3
    origins = "".join(r[4] for texts in stored.values() for rounds in texts for r in rounds)
    assert min(origins.count(letter) for letter in "acbp") > 100


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    lines = [f"{json.dumps(case)}: {json.dumps(texts_of(case))}" for case in CASES]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(CASES)} cases written to {STORED.name}")
