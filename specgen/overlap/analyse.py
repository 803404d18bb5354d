"""A text, or the target's own, through target and draft → the document of `specgen overlap`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specgen.errors import UsageError
from specgen.settings import Mode

if TYPE_CHECKING:
    from specgen.overlap.failures import Group
    from specgen.overlap.predict import Prediction, UnitCosts
    from specgen.overlap.score import TextScores
    from specgen.prompts.read import Prompt
    from specgen.results.overlap import Overlap
    from specgen.session import Session


INDICATIVE = (
    "the target did not write this text: τ, α by k and speedup are only indicative, and too high where the target "
    "finds the text unlikely (--own N lets the target write)"
)


OWN = "text that the target wrote itself: τ and α by k are what generation shows, on average"


@dataclass(frozen=True)
class Found:
    """One text's scores with what its tokens read. limit: max_new_tokens of the run that it is, if it is one."""

    name: str
    scores: TextScores
    pieces: list[str]
    before: list[str]  # the last piece before each that is not empty
    text: list[int]  # with what precedes the scored tokens


def text_tokens(session: Session, prompt: Prompt) -> list[int]:
    """The text as it stands, as the target's tokens. Raises UsageError where there is nothing to score."""
    tokens = list(session.pair.tokenizer(prompt.text).input_ids)
    if len(tokens) < 2:
        raise UsageError(
            f"{prompt.name}: holds {len(tokens)} token{'s' * (len(tokens) != 1)}: needs at least 2, since the first "
            "has nothing before it"
        )
    try:
        session.check_rows(tokens)
    except UsageError as error:
        raise UsageError(f"{prompt.name}: {error}") from None
    return tokens


def prompt_tokens(session: Session, prompt: Prompt) -> list[int]:
    """The prompt's tokens, for the target to go on from. Raises UsageError."""
    try:
        return session.encode(prompt.text)
    except UsageError as error:
        raise UsageError(f"{prompt.name}: {error}".replace("--max-new-tokens", "--own")) from None


def own_text(session: Session, tokens: Sequence[int]) -> tuple[list[int], int]:
    """A prompt's tokens and behind them what the target writes, decoded plainly; and where that begins."""
    generation = session.generate(tokens, plain=True).run()
    return [*tokens, *generation.tokens], len(tokens)


def analyse(
    session: Session,
    prompts: Sequence[Prompt],
    *,
    own: int | None,
    max_k: int,
    costs: UnitCosts | None = None,
    verify_cost: Sequence[float] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Overlap:
    """Scores every text and predicts: everything in numbers, with the positions from which all of it can be computed
    again. costs: given; otherwise measured, but for verify_cost where that is given."""
    from specgen.decoding.probe import few_widths, probe
    from specgen.decoding.text import pieces
    from specgen.overlap.predict import UnitCosts, predictions
    from specgen.overlap.score import score_text
    from specgen.results.overlap import Overlap
    from specgen.session import head

    pair = session.pair
    assert pair.drafter is not None
    texts = [(p.name, text_tokens(session, p), 1) for p in prompts] if own is None else []
    asked = [(p.name, prompt_tokens(session, p)) for p in prompts] if own is not None else []
    for name, tokens in asked:
        progress(f"{name}: writing {own} tokens")
        texts.append((name, *own_text(session, tokens)))
    found = []
    for name, tokens, first in texts:
        n = len(tokens) - first

        def tell(done: int, name: str = name, n: int = n) -> None:
            progress(f"{name}: {done} of {n} tokens scored")

        scores = score_text(
            pair.target,
            pair.drafter,
            pair.processors,
            pair.sampling,
            tokens,
            first,
            context=session.both_hold,
            progress=tell,
        )
        read = pieces(pair.tokenizer, tokens, first - 1)
        before: list[str] = []
        for piece in read[:-1]:
            before.append(piece or (before[-1] if before else ""))
        found.append(Found(name, scores, read[1:], before, tokens))
    costs_from = "given"
    if costs is None:
        progress("measuring the cost of calls")
        try:
            measured = probe(pair, found[0].text, few_widths(max_k), context=session.both_hold)
        except ValueError as error:
            raise UsageError(f"{error}: use a smaller --max-k, or give --c") from None
        costs, costs_from = UnitCosts.measured(measured, max_k), "measured here"
        if verify_cost is not None:
            costs = dataclasses.replace(costs, verify=tuple(verify_cost))
            costs_from = "measured here, calls as given"
    ks = range(1, max_k + 1)

    def scored(scores: list[TextScores]) -> dict[str, Any]:
        return _scores(scores, predictions(scores, ks, costs.calls, limit=own))

    results = [
        {
            "name": f.name,
            **scored([f.scores]),
            "windows": f.scores.windows,
            "impossible": f.scores.impossible,
            "positions": f.scores.positions(),
        }
        for f in found
    ]
    kinds, worst_tokens = _failures(found)
    return Overlap.model_validate(
        {
            **head(session),
            "kind": "overlap",
            "temperature": found[0].scores.temperature,
            "own": own,
            "costs": {"from": costs_from, **dataclasses.asdict(costs)},
            "notes": _notes(session, found, own),
            "results": results,
            "overall": {**scored([f.scores for f in found]), "kinds": kinds, "worst_tokens": worst_tokens},
        }
    )


def _failures(found: Sequence[Found]) -> tuple[list[Group], list[Group]]:
    """Kinds of text and single tokens by overlap, over all texts, where there is a proposal."""
    from specgen.overlap.failures import groups, kind_of, worst

    kinds: list[str] = []
    names: list[str] = []
    overlaps: list[float] = []
    for f in found:
        rows = zip(f.scores.tokens, f.pieces, f.before, f.scores.overlap, f.scores.proposes, strict=True)
        for token, piece, before, value, proposed in rows:
            if proposed:
                kinds.append(kind_of(piece, before))
                names.append(f"{piece!r} ({token})")
                overlaps.append(value)
    return groups(kinds, overlaps), worst(groups(names, overlaps))


def _notes(session: Session, found: Sequence[Found], own: int | None) -> list[str]:
    notes = [INDICATIVE if own is None else OWN]
    mode = session.sampling.mode
    if mode not in (Mode.EXACT, Mode.GREEDY):
        notes.append(f"the profile's mode is {mode.value}: what is shown is acceptance in mode exact")
    total = sum(len(f.scores.tokens) for f in found)
    if silent := sum(f.scores.proposes.count(False) for f in found):
        notes.append(
            f"the draft proposes nothing at {silent} of {total} tokens: overlaps are means over the others, a round "
            "ends its draft there, and what is drafted behind a rejected token is taken to be all that k allows"
        )
    if impossible := sum(f.scores.impossible for f in found):
        notes.append(
            f"{impossible} of {total} tokens have probability 0 under the target's settings; the overlap stands in "
            "for their ratio"
        )
    for f in found:
        if f.scores.windows > 1:
            notes.append(
                f"{f.name}: longer than the context of {session.both_hold} tokens: {f.scores.windows} windows with "
                "half overlap, each token scored once"
            )
    return notes


def _scores(scores: Sequence[TextScores], predicted: list[Prediction]) -> dict[str, Any]:
    """What is said of one text, or of all together (`results.overlap.Scores`)."""
    from specgen.overlap.failures import deciles, histogram, mean

    rows = []
    for t in scores[0].overlaps:
        values = [v for s in scores for v in s.at(t)]
        rows.append(
            {"temperature": t, "overlap": mean(values), "histogram": histogram(values), "deciles": deciles(values)}
        )
    return {
        "tokens": sum(len(s.tokens) for s in scores),
        "proposed": sum(sum(s.proposes) for s in scores),
        "greedy_agreement": next(r["overlap"] for r in rows if r["temperature"] == 0),
        "temperatures": rows,
        "predictions": predicted,
    }
