"""specgen's forms of two processors against transformers' own."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from transformers import generation as hf

from specgen.errors import RunError
from specgen.sampling import processors as processors_module
from specgen.sampling.device import _SortedTopP
from specgen.sampling.processors import (
    FAULT_OF_LOGITS,
    FAULT_OF_SCORES,
    Ban,
    Processors,
    TopP,
    check_finite,
    fault_error,
    faults,
    faulty,
)
from specgen.settings import Sampling

IDS = torch.zeros(1, 1, dtype=torch.int64)


def rows(vocabulary: int, scale: float, seed: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(7, vocabulary, generator=drawn, dtype=torch.float64) * scale


@pytest.mark.parametrize("vocabulary", [5, 64, 65, 3000])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.95, 0.999])
def test_top_p_keeps_what_transformers_keeps(vocabulary: int, scale: float, top_p: float) -> None:
    """In float64 no edge is near enough to rounding for the two to differ; flat rows need the whole vocabulary."""
    scores = rows(vocabulary, scale, seed=vocabulary)
    ours, theirs = TopP(top_p)(IDS, scores.clone()), hf.TopPLogitsWarper(top_p)(IDS, scores.clone())
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, _SortedTopP(top_p)(IDS, scores))
    assert int(torch.isfinite(ours).sum()) > 0


def test_top_p_after_tokens_were_banned() -> None:
    scores = rows(200, 3.0, seed=1)
    scores[:, ::2] = -torch.inf
    assert torch.equal(TopP(0.9)(IDS, scores), hf.TopPLogitsWarper(0.9)(IDS, scores.clone()))


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.95])
def test_of_equals_at_the_edge_the_lower_ids_are_kept(top_p: float) -> None:
    """Whatever the other rows of the call, and in the captured form too; sets are as small as without ties."""
    drawn = torch.Generator().manual_seed(4)
    scores = (torch.randn(64, 3000, generator=drawn) * 3).round() / 2  # a handful of values
    scores[::7] *= 6  # rows that need few tokens beside rows that need many
    together = TopP(top_p)(IDS, scores)
    alone = torch.cat([TopP(top_p)(IDS, row[None]) for row in scores])
    assert torch.equal(together, alone)
    assert torch.equal(together, _SortedTopP(top_p)(IDS, scores))
    theirs = hf.TopPLogitsWarper(top_p)(IDS, scores.clone())
    sizes = [torch.isfinite(kept).sum(-1) for kept in (together, theirs)]
    assert (sizes[0] - sizes[1]).abs().max() <= 1  # the edge itself is float32's
    for row, kept in zip(scores, together, strict=True):
        least = row[torch.isfinite(kept)].min()
        equal = (row == least).nonzero()[:, 0]
        inside = torch.isfinite(kept)[equal]
        assert torch.equal(inside, inside.sort(descending=True).values)


def test_top_p_looks_further_only_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    right = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda t, k, **options: sizes.append(k) or right(t, k, **options))
    TopP(0.9)(IDS, rows(4000, 30.0, seed=2))
    assert sizes == [64]
    TopP(0.9)(IDS, rows(4000, 0.0, seed=2))
    assert sizes[1:] == [64, 512, 4000]


def test_a_ban_is_transformers_own() -> None:
    scores = rows(50, 2.0, seed=3)
    before = scores.clone()
    ours = Ban((3, 49, 3))(IDS, scores)
    assert torch.equal(ours, hf.SuppressTokensLogitsProcessor([3, 49])(IDS, scores.clone()))
    assert torch.equal(scores, before)


@pytest.mark.parametrize(("equals", "top_p", "kept"), [(4, 0.25, 1), (4, 0.5, 2), (8, 0.375, 3), (8, 0.875, 7)])
def test_top_p_where_the_mass_is_reached_exactly(equals: int, top_p: float, kept: int) -> None:
    """Powers of two: the sum of the first `kept` is top_p to the bit, and no further token is needed."""
    scores = torch.full((2, 100), -torch.inf, dtype=torch.float64)
    scores[:, 10 : 10 + equals] = 0
    assert scores.softmax(-1)[0, 10] == 1 / equals
    for processor in (TopP(top_p), _SortedTopP(top_p)):
        found = processor(IDS, scores)
        assert torch.isfinite(found).nonzero()[:, 1].tolist() == 2 * [*range(10, 10 + kept)]
    theirs = hf.TopPLogitsWarper(top_p)(IDS, scores.clone())
    assert torch.isfinite(theirs).sum(-1).tolist() == [kept, kept]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_a_faulty_row_is(dtype: torch.dtype) -> None:
    """−inf is a mask as long as anything is left; numbers whose sum overflows are fine."""
    inf, nan, most = torch.inf, torch.nan, torch.finfo(dtype).max
    wanted = {
        (0.0, 1.0): False,
        (-inf, 1.0): False,
        (most, most): False,
        (-most, -inf): False,
        (-inf, -inf): True,
        (inf, 1.0): True,
        (-inf, inf): True,
        (nan, 1.0): True,
        (-inf, nan): True,
    }
    logits = torch.tensor([*wanted], dtype=dtype)
    assert faulty(logits).tolist() == [*wanted.values()]
    for row, bad in zip(logits, wanted.values(), strict=True):
        with pytest.raises(RunError, match=r"the draft .* position 9;") if bad else contextlib.nullcontext():
            check_finite(torch.stack([logits[0], logits[1], row]), "draft", 7)


def test_faults_tell_logits_from_what_processors_made_of_them() -> None:
    inf = torch.inf
    logits = torch.tensor([[0.0, 1.0], [-inf, 1.0], [torch.nan, 1.0], [-inf, -inf]])
    processors = Processors.of(Sampling(ban=(1,)))
    codes = faults(logits, processors.scores(logits, [])).tolist()
    assert codes == [0, FAULT_OF_SCORES, FAULT_OF_LOGITS, FAULT_OF_LOGITS]
    assert "not finite" in str(fault_error(FAULT_OF_LOGITS, "draft", 5, processors))
    assert "no token left to draw for position 5: ban rules out" in str(
        fault_error(FAULT_OF_SCORES, "draft", 5, processors)
    )


def test_what_never_empties_a_row_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look is a read from the device: only chains that may leave no token pay for it."""
    looked = []
    right = processors_module.faulty
    monkeypatch.setattr(processors_module, "faulty", lambda scores: looked.append(1) or right(scores))
    kept = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    for sampling, looks in ((kept, 0), (replace(kept, ban=(1,)), 1), (replace(kept, no_repeat_ngram_size=2), 1)):
        looked.clear()
        Processors.of(sampling)(rows(50, 2.0, seed=3), [1, 2])
        assert len(looked) == looks
