"""A draft whose context is shorter than the target's: behind it the text goes on without a draft, and stays exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import specgen
from specgen.decoding.batch import BatchGeneration
from specgen.decoding.generation import Generation
from specgen.decoding.pair import Pair
from specgen.drafting.checkpoint import ModelDrafter
from specgen.machine.clocks import untimed
from specgen.models.causal import CausalLM
from specgen.sampling.processors import Processors
from specgen.settings import Mode, Sampling
from support.command import PROMPT, process, write_model, write_pair, write_tokenizer
from support.tiny import noisy_copy, tiny_llama

CONTEXT = 20
PROMPTS = [(3, 1, 4, 1, 5), tuple(range(18)), tuple(range(40))]


def pair_of(sampling: Sampling, engine: str = "eager") -> Pair:
    model = tiny_llama(0, dtype=torch.float64)
    draft = noisy_copy(model, 0.1)
    draft.config.max_position_embeddings = CONTEXT
    target, processors = CausalLM(model, "target", engine=engine), Processors.of(sampling)
    drafter = ModelDrafter(CausalLM(draft, "draft"), processors)
    return Pair(target, drafter, processors, sampling, None, torch.float64, untimed)


@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_drafting_ends_where_the_draft_s_context_does(prompt: tuple[int, ...], engine: str) -> None:
    pair = pair_of(Sampling(k=3, max_new_tokens=30), engine)
    fed: list[int] = []
    assert pair.drafter is not None
    model: CausalLM = pair.drafter.model  # type: ignore[assignment]
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[-1]), with_kwargs=True
    )
    generation = Generation(pair, prompt).run()
    assert generation.engine_note is None
    assert len(generation.tokens) == 30
    at = len(prompt)
    for r in generation.rounds:
        left = 30 - (at - len(prompt)) - 1
        assert r.drafted == max(0, min(3, left, CONTEXT + 1 - at))
        at += len(r.tokens)
    if len(prompt) > CONTEXT and engine == "eager":
        assert not fed
    assert generation.check().passed


def test_batches_and_captured_rounds_are_the_single_eager_ones() -> None:
    sampling = Sampling(k=3, max_new_tokens=24, seed=4)
    pair = pair_of(sampling)
    singles = [Generation(pair, prompt).run().rounds for prompt in PROMPTS]
    counts = [[(r.drafted, r.accepted, r.tokens) for r in rounds] for rounds in singles]
    batch = BatchGeneration(pair, PROMPTS).run()
    assert [[(r.drafted, r.accepted, r.tokens) for r in rounds] for rounds in batch.rows_rounds] == counts
    graph = pair_of(sampling, "graph")
    captured = [Generation(graph, prompt).run().rounds for prompt in PROMPTS]
    assert [[(r.drafted, r.accepted, r.tokens) for r in rounds] for rounds in captured] == counts


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED], ids=str)
def test_the_text_is_plain_decoding_s(mode: Mode) -> None:
    sampling = Sampling(mode=mode, k=3, max_new_tokens=30, seed=2)
    sampling = replace(sampling, temperature=None) if mode is Mode.GREEDY else sampling
    pair = pair_of(sampling)
    assert Generation(pair, PROMPTS[0]).run().tokens == Generation(pair, PROMPTS[0], plain=True).run().tokens


def test_it_is_said_once_and_nothing_is_refused(tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    model = tiny_llama(seed=3, vocab=25)
    write_model(tmp_path / "draft", noisy_copy(model, 0.3))
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    write_tokenizer(tmp_path / "draft")
    session = specgen.load(str(profile), device="cpu", max_new_tokens=60)
    assert (session.context, session.both_hold) == (30_000, 40)
    done = process(tmp_path, "run", "--prompt", PROMPT, "--profile", "pair.yaml", "--max-new-tokens", "60")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the draft holds 40 tokens: behind them the target goes on without it") == 1
    plain = process(
        tmp_path, "run", "--prompt", PROMPT, "--profile", "pair.yaml", "--plain", "--max-new-tokens", "60"
    )
    assert (plain.returncode, "the draft holds" in plain.stderr) == (0, False)
