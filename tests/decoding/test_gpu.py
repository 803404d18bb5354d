"""The same loop on a CUDA device: skipped without one."""

from __future__ import annotations

import pytest
import torch

from specgen.decoding.eager import speculative, start
from specgen.decoding.self_check import SelfCheck
from specgen.drafting.checkpoint import ModelDrafter
from specgen.machine.clocks import clock_for
from specgen.models.causal import CausalLM
from specgen.rounds.record import ends_at
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms
from specgen.settings import Mode, Sampling
from specgen.verification.rules import RULES
from support import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPT = [1, 2, 3]


def run(device: str, sampling: Sampling) -> tuple[list, SelfCheck]:
    target = CausalLM(tiny.tiny_llama(0).to(device), "target")
    processors = Processors.of(sampling, device)
    drafter = ModelDrafter(CausalLM(tiny.tiny_llama(1).to(device), "draft"), processors)
    start(target, drafter, PROMPT)
    rounds = list(
        speculative(
            target,
            drafter,
            processors,
            PROMPT,
            k=4,
            max_new_tokens=60,
            uniforms=KeyedUniforms(0, 0),
            ended=ends_at([]),
            rule=RULES[sampling.mode],
            clock=clock_for(torch.device(device)),
        )
    )
    check = SelfCheck(1e-3)
    if sampling.mode is Mode.EXACT:
        check.add(target, drafter, processors, PROMPT, rounds)
    return rounds, check


def test_an_exact_run_on_cuda_finds_no_fault_in_itself() -> None:
    rounds, check = run("cuda", Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1))
    assert sum(len(r.tokens) for r in rounds) == 60
    assert check.result().passed, check.result()
    assert all(r.verify_s > 0 for r in rounds)


def test_greedy_on_cuda_is_greedy_on_the_cpu() -> None:
    sampling = Sampling(mode=Mode.GREEDY, temperature=None)
    on_gpu, on_cpu = (run(device, sampling)[0] for device in ("cuda", "cpu"))
    assert [r.tokens for r in on_gpu] == [r.tokens for r in on_cpu]
