"""What a text says about rounds that were never run. No torch.

In exact mode, given that token x was committed at a tested position, it had been accepted with probability
min(1, draft(x)/target(x)), independently of everything else given the text so far. So one text that the target wrote,
with that ratio at each of its positions, determines the expected rounds for every k. A constant α does not:
acceptance is sticky.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpectedRounds:
    """Expected counts of generating a given text with k drafted tokens a round.

    tested, accepted: [k] by position in the round. rounds is the number of target calls; lengths: [k+1], how many
    of them verify 0, 1, … k drafted tokens.
    """

    k: int
    tokens: int
    rounds: float
    drafted: float
    tested: tuple[float, ...]
    accepted: tuple[float, ...]
    lengths: tuple[float, ...]

    @property
    def tau(self) -> float:
        """Block efficiency: committed tokens per target call."""
        return self.tokens / self.rounds

    @property
    def alpha(self) -> float | None:
        """Acceptance rate: accepted / tested; None where nothing is tested."""
        return sum(self.accepted) / sum(self.tested) if sum(self.tested) else None


def expected_rounds(
    ratios: Sequence[float | None], k: int, *, limit: int | None = None, proposes: Sequence[bool] | None = None
) -> ExpectedRounds:
    """The recursion over one text: O(len(ratios) · k).

    ratios: [n], min(1, draft(x)/target(x)) of each committed token x; None where the draft has no proposal, given the
    text before. limit: max_new_tokens of the run, near which rounds draft less; the text's own length where it is not
    given. proposes: [n], whether there is a proposal, for ratios that do not say so by None. Raises ValueError for
    k < 0 or an empty text.

    `begins[i]` is the probability that a round begins at token i. From there, j tokens are accepted and the next is
    rejected with probability Π r · (1 − r), and the next round begins behind it; all accepted, behind the bonus.
    A draft with nothing to propose at a token ends there: untested, that token is the bonus. Only what is drafted
    behind a rejected token does not follow from the text: `drafted` and `lengths` count it as all that k allows,
    the upper bound for a draft that does not propose everywhere.
    """
    n = len(ratios)
    if k < 0 or n == 0:
        raise ValueError("needs k >= 0 and at least one token")
    if proposes is not None and len(proposes) != n:
        raise ValueError(f"proposes needs {n} entries, one a token")
    if proposes is None:
        proposes = [x is not None for x in ratios]
    r = [float(x or 0.0) for x in ratios]
    room = n if limit is None else limit
    begins = [0.0] * (n + k + 2)
    begins[0] = 1.0
    tested, accepted, lengths = [0.0] * k, [0.0] * k, [0.0] * (k + 1)
    for i in range(n):
        depth = min(k, room - i - 1)
        reach = begins[i]  # probability of a round that began here and accepted everything so far
        whole = begins[i]  # and of one that drafts to its full depth
        for j in range(min(depth, n - i)):
            if not proposes[i + j]:
                lengths[j] += reach
                begins[i + j + 1] += reach
                whole, reach = whole - reach, 0.0
                break
            tested[j] += reach
            begins[i + j + 1] += reach * (1 - r[i + j])
            reach *= r[i + j]
            accepted[j] += reach
        begins[i + depth + 1] += reach  # the bonus; behind the text's end it begins nothing
        lengths[depth] += whole
    drafted = sum(m * count for m, count in enumerate(lengths))
    return ExpectedRounds(k, n, sum(begins[:n]), drafted, tuple(tested), tuple(accepted), tuple(lengths))


def pooled(texts: Sequence[ExpectedRounds]) -> ExpectedRounds:
    """The counts of several texts, generated one after another with the same k."""
    if len({t.k for t in texts}) != 1:
        raise ValueError("needs texts with one k")
    sums = (
        tuple(sum(column) for column in zip(*(getattr(t, name) for t in texts), strict=True))
        for name in ("tested", "accepted", "lengths")
    )
    totals = (sum(t.tokens for t in texts), sum(t.rounds for t in texts), sum(t.drafted for t in texts))
    return ExpectedRounds(texts[0].k, *totals, *sums)


def constant_alpha_tau(alpha: float, k: int) -> float:
    """τ if every drafted token were accepted with probability α, independently (Leviathan et al. 2023, eq. 1)."""
    return k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def best_k(speedups: dict[int, float]) -> int:
    """The k with the largest predicted speedup; of equals the smallest."""
    return min(speedups, key=lambda k: (-speedups[k], k))
