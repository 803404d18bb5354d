"""A bench's verdict in a sentence, with what would have to change, and its warnings. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from specgen.analysis.columns import Timed, paired_ratios, texts_and_ends
from specgen.analysis.intervals import Interval, interval_text
from specgen.analysis.prediction import LEAST_STEPS, Prices, View
from specgen.analysis.tables import ArmRow, Verdict
from specgen.rounds.expected import constant_alpha_tau

TOLERANCE = 0.10  # of a prediction, of an interval's half width, of runs of one prompt


def pays(speedup: Interval) -> bool | None:
    """Whether the whole interval lies above 1, or below it; None where it holds 1 or where there is none."""
    if speedup.low is None or speedup.high is None or speedup.low <= 1 <= speedup.high:
        return None
    return speedup.low > 1


def verdict_of(view: View, arms: Sequence[ArmRow]) -> Verdict:
    found = [row for row in arms if row.speedup is not None]
    if not found:
        return Verdict("Nothing to judge: no speculative arm was measured beside its baseline.", None, None, None, ())
    row = _best(found)
    speedup = _speedup(row)
    reasons = tuple(_reasons(view, row))
    beyond = _unproven(row, found)
    among = f", {'one' if beyond else 'the best'} of {len(found)}," if len(found) > 1 else ""
    text = f"{_subject(row, found)}{among} {_state(speedup, row.batch)}"
    if reasons:
        text += ": " + ", or ".join(reasons[:2])
    sentences = [f"{text}{beyond}.", *_by_batch(found, row.batch), *_fastest(arms), *_behind_ends(view, row)]
    return Verdict(" ".join(sentences), pays(speedup), row.name, speedup, reasons)


def _speedup(row: ArmRow) -> Interval:
    assert row.speedup is not None
    return row.speedup


def _best(rows: Sequence[ArmRow]) -> ArmRow:
    """The largest estimate, of equals the smallest k, among the arms whose whole interval lies above 1; where there
    is none among those with an interval; else among all."""
    proven = [row for row in rows if pays(_speedup(row))]
    known = [row for row in rows if _speedup(row).low is not None]
    return max(proven or known or rows, key=lambda row: (_speedup(row).estimate, -row.k))


def _unproven(best: ArmRow, rows: Sequence[ArmRow]) -> str:
    """A clause about the largest estimate, where it is not that of the arm chosen."""
    row = max(rows, key=lambda row: (_speedup(row).estimate, -row.k))
    speedup = _speedup(row)
    if speedup.estimate <= _speedup(best).estimate:
        return ""
    why = "it has no interval" if speedup.low is None else "its interval holds 1"
    return f"; {_subject(row, rows)} measured more, {interval_text(speedup)}, but did not prove it: {why}"


def _state(speedup: Interval, batch: int) -> str:
    shown, several = interval_text(speedup), _several(speedup.n, batch)
    if speedup.low is None:
        return f"measured a speedup of {shown}, with {several} too few for an interval"
    interval = f"({speedup.coverage:.1%} interval over {several})"
    if pays(speedup) is None:
        return f"makes no measurable difference: speedup {shown} {interval}"
    return f"{'pays' if pays(speedup) else 'does not pay here'}: speedup {shown} {interval}"


def _several(n: int, batch: int) -> str:
    plural = "" if n == 1 else "s"
    return f"{n} prompt{plural}" if batch == 1 else f"{n} group{plural} of prompts"


def _subject(row: ArmRow, rows: Sequence[ArmRow]) -> str:
    """k = 4, with whatever else tells this arm from the others."""
    text = f"k = {row.k}"
    if len({r.profile for r in rows}) > 1:
        text += f" of {row.profile}"
    if len({r.engine for r in rows}) > 1:
        text += f" in {row.engine}"
    if len({r.batch for r in rows}) > 1:
        text += f" at B = {row.batch}"
    return text


def _by_batch(rows: Sequence[ArmRow], told: int) -> Iterable[str]:
    """The best arm of every other batch than the one already told of."""
    for batch in sorted({row.batch for row in rows} - {told}):
        here = [row for row in rows if row.batch == batch]
        row = _best(here)
        state = _state(_speedup(row), batch)
        yield f"At B = {batch} {_subject(row, here)} {state}{_unproven(row, here)}."


def _fastest(arms: Sequence[ArmRow]) -> Iterable[str]:
    """A speedup is against the plain decoding of its own engine: of several engines, say which is fastest."""
    if len({row.engine for row in arms}) > 1:
        for batch in sorted({row.batch for row in arms}):
            here = [r for r in arms if r.batch == batch and r.tokens_per_second is not None]
            if here:
                row = max(here, key=lambda r: r.tokens_per_second or 0.0)
                yield f"Fastest at B = {batch}: {row.name} with {row.tokens_per_second:.1f} tokens/s."


def _behind_ends(view: View, row: ArmRow) -> Iterable[str]:
    """Nothing ends a text while timing: how many went on, and the speedup with what they went on with."""
    passed, texts = texts_and_ends(view.bench)
    if not passed:
        return
    whole = view.whole[row.name]
    ratios = paired_ratios(view.whole[whole.arm.baseline], whole)
    beyond = f"; behind it too, the speedup of {row.name} is {np.median(list(ratios.values())):.2f}" if ratios else ""
    yield f"{ends_text(passed, texts)}: α, τ and speedup are up to it{beyond}."


def ends_text(passed: int, texts: int) -> str:
    return f"{passed} of {texts} text{'s' * (texts != 1)} passed {'their' if texts != 1 else 'its'} end"


def rounds_tau(alpha: float, drafted: Mapping[int, int]) -> float:
    """τ of rounds that drafted so many tokens, if each were accepted with probability α, independently.

    drafted: {tokens drafted in a round: rounds}.
    """
    return sum(n * constant_alpha_tau(alpha, d) for d, n in drafted.items()) / sum(drafted.values())


def needed_alpha(alpha: float, drafted: Mapping[int, int], gain: float) -> float | None:
    """The constant acceptance rate at which rounds that draft what these did commit `gain` times what they do at
    `alpha`; None where even α = 1 does not. By bisection: τ grows with α."""
    wanted = gain * rounds_tau(alpha, drafted)
    if rounds_tau(1.0, drafted) < wanted:
        return None
    low, high = alpha, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rounds_tau(middle, drafted) < wanted else (low, middle)
    return high


def _reasons(view: View, row: ArmRow) -> Iterable[str]:
    """What alone, at its ideal, would bring the whole interval above 1, and the value that would be enough."""
    own, speedup = view.timed[row.name], _speedup(row)
    if not own.depth.any():
        had = f"the draft had no proposal in any of {own.with_room} rounds that had room for one"
        yield f"nothing was drafted: {had if own.with_room else 'no round had room for it'}"
        return
    needed = 1 / (speedup.low if speedup.low is not None else speedup.estimate)
    if needed < 1:
        return
    factors = sorted(_factors(view, row, needed), key=lambda f: -f[0])
    enough = [text for gain, text, _ in factors if gain > needed]
    if enough:
        yield from enough
    elif factors:
        tried = " nor ".join(ideal for _, _, ideal in factors)
        yield f"no single change would make it pay, neither {tried}: {_where(row)}"
    else:
        yield f"nothing that could be saved explains it: {_where(row)}"


def _where(row: ArmRow) -> str:
    return (
        f"draft {row.draft_share or 0:.0%}, verification {row.verify_share or 0:.0%}, other "
        f"{row.other_share or 0:.0%} of the time, for τ = {row.tau or 0:.2f}"
    )


_Factor = tuple[float, str, str]  # gain in speedup at the ideal, sentence, the ideal in words


def _factors(view: View, row: ArmRow, needed: float) -> Iterable[_Factor]:
    """The factors that cost anything. needed: what the speedup has to be multiplied by."""
    own, prices = view.timed[row.name], view.prices(row.profile, row.engine, row.batch)
    yield from _acceptance(own, row, needed)
    yield from _proposals(own, prices, row, needed)
    yield from _drafting(prices, row, needed)
    yield from _verification(own, prices, needed)
    yield from _overhead(row, needed)


def _allowed(share: float, needed: float) -> float:
    """Of what takes this share of the time, the part that may stay."""
    return 1 - (1 - 1 / needed) / share


def _acceptance(own: Timed, row: ArmRow, needed: float) -> Iterable[_Factor]:
    if row.alpha is not None and row.alpha < 1:
        alpha = needed_alpha(row.alpha, own.drafted, needed)
        yield (
            rounds_tau(1.0, own.drafted) / rounds_tau(row.alpha, own.drafted),
            (
                f"the acceptance is too low (α = {row.alpha:.2f}; at these costs it would pay with α above "
                f"{1.0 if alpha is None else alpha:.2f})"
            ),
            "α = 1",
        )


def _proposals(own: Timed, prices: Prices, row: ArmRow, needed: float) -> Iterable[_Factor]:
    """Rounds that could have drafted and had nothing to. A share p of rounds that draft k commits 1 + p · (τ_k − 1)
    tokens a round, at the present α, and takes p of what a round of depth k takes and 1 − p of one without."""
    silent = own.with_room - sum(n for d, n in own.drafted.items() if d)
    first, wide = prices.call(1), prices.call(row.k + 1)
    if silent <= 0 or row.alpha is None or first is None or wide is None:
        return
    tokens = constant_alpha_tau(row.alpha, row.k)
    priced = {0: first + prices.other(row.k), row.k: wide + row.k * prices.draft(row.k) + prices.other(row.k)}
    without, full = (_round_seconds(own, depth, priced[depth]) for depth in (0, row.k))
    wanted = needed * rounds_tau(row.alpha, own.drafted) / float(own.total.mean())  # tokens a second
    gain = needed * tokens / full / wanted
    share = (wanted * without - 1) / (tokens - 1 - wanted * (full - without)) if gain > needed else 1.0
    yield (
        gain,
        (
            f"the draft proposes too seldom (nothing in {silent} of {own.with_room} rounds; it would pay with a "
            f"proposal of {row.k} token{'s' if row.k > 1 else ''} in at least {math.ceil(100 * max(share, 0.0))}%)"
        ),
        "a proposal in every round",
    )


def _round_seconds(own: Timed, depth: int, priced: float) -> float:
    """Mean seconds of the arm's rounds with so many drafting steps; as priced where there are too few."""
    mine = own.total[own.depth == depth]
    return float(mine.mean()) if len(mine) >= LEAST_STEPS else priced


def _drafting(prices: Prices, row: ArmRow, needed: float) -> Iterable[_Factor]:
    first = prices.call(1)
    c = prices.draft(row.k) / first if first else 0.0
    if row.draft_share and c and row.draft_share < 1:
        yield (
            1 / (1 - row.draft_share),
            (
                f"the draft is too dear (a draft step costs c = {c:.2f} of a target step, drafting "
                f"{row.draft_share:.0%} of the time; it would pay with c below "
                f"{c * _allowed(row.draft_share, needed):.2f})"
            ),
            "a free draft",
        )


def _verification(own: Timed, prices: Prices, needed: float) -> Iterable[_Factor]:
    """Calls wider than one token, by the widths really called; named for the width that costs most in all."""
    first = prices.call(1)
    if not first:
        return
    excess = {}
    for width in sorted(set(own.width.tolist())):
        calls = own.verify[own.width == width]
        excess[width] = len(calls) * ((prices.call(width) or float(np.median(calls))) - first)
    share = sum(excess.values()) / float(own.total.sum())
    if not 0 < share < 1:
        return
    worst = max(excess, key=lambda width: excess[width])
    relative = 1 + excess[worst] / int((own.width == worst).sum()) / first
    yield (
        1 / (1 - share),
        (
            f"verification is not free (T({worst})/T(1) = {relative:.2f}; it would pay with a ratio below "
            f"{1 + (relative - 1) * _allowed(share, needed):.2f})"
        ),
        "a flat call cost",
    )


def _overhead(row: ArmRow, needed: float) -> Iterable[_Factor]:
    if row.other_share and row.other_s and 0 < row.other_share < 1:
        yield (
            1 / (1 - row.other_share),
            (
                f"the overhead is too large ({row.other_share:.0%} of the time is neither drafting nor a target "
                f"call; it would pay with less than {ms_text(row.other_s * _allowed(row.other_share, needed))} of it "
                f"a round, now {ms_text(row.other_s)})"
            ),
            "a round without overhead",
        )


def ms_text(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"
