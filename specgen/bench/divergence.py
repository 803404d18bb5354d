"""Greedy texts that differ from the baseline's: where, and by what margin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgen.decoding.eager import start
from specgen.decoding.pair import Pair
from specgen.models.protocol import LanguageModel
from specgen.results.bench import Row


def margins_at(pair: Pair, prompt: list[int], plain: Row, row: Row, at: int) -> tuple[float, float, float]:
    """Of the top two processed logits at generated position `at`: the margin in plain decoding's call, that in the
    call that verified, and the largest difference between the two calls' logits. Both texts are the same before it.

    Each side's calls are made once more as they were, a row alone: a batch's own arithmetic may differ a little.
    """
    pair.hold.take(None)
    rows = []
    for side in (plain, row):
        logits = replayed(pair.target, prompt, side, at)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        rows.append(pair.processors.scores(wide[None], [*prompt, *plain.tokens[:at]])[0])
    known = torch.isfinite(rows[0]) & torch.isfinite(rows[1])
    first, second = (float(top[0] - top[1]) for top in (r[known].topk(2).values for r in rows))
    return first, second, float((rows[0] - rows[1])[known].abs().max())


def replayed(target: LanguageModel, prompt: Sequence[int], row: Row, at: int) -> Tensor:
    """Logits [V] that generated token `at` was verified by, from the same calls as the row's rounds made."""
    start(target, None, prompt)
    text, done = [*prompt, *row.tokens], 0
    for drafted, committed in zip(row.drafted, row.committed, strict=True):
        end = len(prompt) + done
        feed = text[target.lengths[0] : end + drafted]
        feed += [text[-1]] * (end + drafted - target.lengths[0] - len(feed))  # what was drafted there is not known
        logits = target.forward(torch.tensor([feed]), drafted + 1)[0]
        if at < done + committed:
            return logits[at - done]
        done += committed
        target.rollback([max(0, target.lengths[0] - (len(prompt) + done - 1))])
    raise ValueError(f"the row has no token {at}")
