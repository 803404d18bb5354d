"""Why a measured speedup is not the predicted one, in a sentence."""

from __future__ import annotations

import math

import numpy as np

from specgen.analysis.prediction import View
from specgen.analysis.tables import ArmRow
from specgen.analysis.verdict import ms_text
from specgen.rounds.costs import speculative_time


def why_not_as_predicted(view: View, row: ArmRow) -> str:
    """What pulls the measured speedup furthest from the predicted one, with its two numbers.

    measured / predicted = (median over groups / all groups together, measured over predicted)
                           · (plain as measured / as priced)
                           / (1 + what counts, calls, drafting and the rest add to the predicted time).
    """
    own, prices = view.timed[row.name], view.prices(row.profile, row.engine, row.batch)
    expected, costs = view.expected(row.profile, row.batch, row.k), prices.at(row.k)
    if expected is None or costs is None or prices.plain is None or not prices.plain_step:
        return "for want of scores the data do not show why"
    if not row.speedup or not row.ratio:
        return "for want of scores the data do not show why"
    tokens, rounds, steps = own.row_tokens, len(own.width), int(own.depth.sum())
    counts, draft, other = expected.together, costs.draft, costs.other
    calls = {w: costs.call(w) for w in own.width.tolist()}
    priced = np.array([calls[w] for w in own.width.tolist()])
    predicted = speculative_time(counts, costs) / counts.tokens
    plain = view.timed[prices.plain.arm.name].per_row_token
    together = plain / own.per_row_token
    as_predicted = prices.plain_step / predicted

    def added(seconds: float) -> float:
        """Seconds beyond the prices, of all measurements → what they do to measured / predicted, as a logarithm."""
        return -seconds / tokens / predicted

    def took(what: str, mean: float, price: float) -> str:
        return f"{what} took {ms_text(mean)} on average and was priced at {ms_text(price)}"

    pulls = [
        (
            math.log(row.speedup.estimate / together) - math.log((row.predicted or 1.0) / as_predicted),
            f"the prompts differ: all together they give {together:.2f} of {as_predicted:.2f} predicted, and their "
            f"medians are {row.speedup.estimate:.2f} and {row.predicted:.2f}",
        ),
        (math.log(plain / prices.plain_step), took("a token of plain decoding", plain, prices.plain_step)),
        (
            added(float(priced.sum()) + rounds * other + steps * draft - predicted * tokens),
            f"acceptance is not what the baseline's texts say: {tokens / rounds:.2f} tokens a round measured, "
            f"{counts.tokens / counts.rounds:.2f} expected",
        ),
        (
            added(float(own.draft.sum()) - steps * draft),
            took("a draft step", float(own.draft.sum()) / max(steps, 1), draft),
        ),
        (added(float(own.other.sum()) - rounds * other), took("the rest of a round", float(own.other.mean()), other)),
    ]
    for width in sorted(set(own.width.tolist())):
        mine = own.verify[own.width == width]
        pulls.append(
            (
                added(float((mine - calls[width]).sum())),
                took(f"a call on {width} token{'s' if width > 1 else ''}", float(mine.mean()), calls[width]),
            )
        )
    direction = math.log(row.ratio)
    return max(pulls, key=lambda pull: pull[0] * direction)[1]
