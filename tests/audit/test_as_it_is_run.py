"""An audit audits what a user runs: the captured loop under engine graph (called directly here), and batches."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.audit.auditor import Auditor
from specgen.audit.findings import CHECKS, AuditResult, Status
from specgen.decoding.captured.loop import GraphLoop
from specgen.decoding.pair import Pair
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.ngram import NgramDrafter
from specgen.machine.clocks import untimed
from specgen.models.causal import CausalLM
from specgen.models.ragged import RaggedLM
from specgen.sampling.processors import Processors
from specgen.settings import Mode, Sampling
from support.doubles import mutant
from support.tiny import noisy_copy, tiny_llama

PROMPTS = [[1, 2, 1], [3, 3], [4, 5, 6, 4, 5], [7]]
SETTINGS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}


def pair_of(way: str, mode: Mode = Mode.EXACT, *, ngram: bool = False, **settings: Any) -> Pair:
    """A tiny pair in float64, whose target runs under the engine of that way."""
    s = Sampling(mode=mode, k=3, max_new_tokens=12, **settings)
    s = replace(s, temperature=None, top_p=None) if mode is Mode.GREEDY else s
    model = tiny_llama(0, vocab=8, hidden=16, dtype=torch.float64)
    target = CausalLM(model, "target", engine="graph" if way == "graph" else "eager")
    processors = Processors.of(s)
    drafter = ModelDrafter(CausalLM(noisy_copy(model, 0.4), "draft"), processors)
    proposes = NgramDrafter(8, dtype=torch.float64) if ngram else drafter
    return Pair(target, proposes, processors, s, None, torch.float64, untimed)


def audited(pair: Pair, way: str, checks: Any = CHECKS) -> tuple[Auditor, AuditResult]:
    auditor = Auditor(pair, PROMPTS, seeds=2, rounds=60, batch=3 if way == "batch" else 1)
    return auditor, auditor.run(checks)


@pytest.mark.parametrize("mode", [Mode.EXACT, Mode.GREEDY, Mode.COUPLED], ids=str)
@pytest.mark.parametrize("way", ["graph", "batch"])
def test_an_honest_pair_passes_every_check(way: str, mode: Mode) -> None:
    auditor, result = audited(pair_of(way, mode, **SETTINGS), way)
    assert result.passed, result
    assert auditor.engine_note is None
    judged = {f.name for f in result.findings if f.status is Status.PASS}
    silent = {f.name for f in result.findings if f.status is Status.NOT_APPLICABLE}
    assert judged | silent == set(CHECKS)
    assert {"caches", "processors", "seeds"} <= judged


@pytest.mark.parametrize("way", ["graph", "batch"])
def test_prompt_lookup_passes(way: str) -> None:
    _, result = audited(pair_of(way, ngram=True, **SETTINGS), way)
    assert result.passed, result


def failed(way: str, check: str, mode: Mode = Mode.EXACT, **settings: Any) -> bool:
    return audited(pair_of(way, mode, **{**SETTINGS, **settings}), way, [check])[1].failed == (check,)


def test_the_captured_loop_is_what_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that only its own steps have."""

    def hotter(self: GraphLoop, logits: Tensor) -> Tensor:
        return GraphLoop_scores(self, logits) * 0.5

    GraphLoop_scores = GraphLoop._scores  # noqa: N806
    assert not failed("graph", "processors")
    monkeypatch.setattr(GraphLoop, "_scores", hotter)
    assert failed("graph", "processors")
    assert failed("graph", "run")
    assert not failed("batch", "processors")


def test_fault_the_captured_loop_keeps_what_it_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(GraphLoop.kept, "* self.spread < a", "* self.spread <= a")
    monkeypatch.setattr(GraphLoop, "kept", wrong)
    assert failed("graph", "sampler", top_p=None, top_k=3)


def test_fault_captured_slots_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(GraphLoop._commit, "self.n += accepted + 1", "self.n += accepted.clamp(max=1) + 1")
    monkeypatch.setattr(GraphLoop, "_commit", wrong)
    assert failed("graph", "caches") or failed("graph", "run")


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED], ids=str)
def test_fault_rows_that_stay_get_their_neighbours_cache(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(inspect.unwrap(RaggedLM.keep), "layer.keep(kept)", "layer.keep(kept - 1)")
    monkeypatch.setattr(RaggedLM, "keep", wrong)
    assert failed("batch", "caches", mode)


def test_a_pair_that_cannot_be_captured_is_audited_eagerly_and_says_so() -> None:
    auditor, result = audited(pair_of("graph", repetition_penalty=1.2), "graph", ["seeds"])
    assert result.passed
    assert "engine graph cannot serve" in str(auditor.engine_note)
