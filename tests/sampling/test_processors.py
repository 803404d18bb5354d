"""specgen's forms of two processors against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import generation as hf

from specgen.sampling.device import _SortedTopP
from specgen.sampling.processors import Ban, TopP

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
