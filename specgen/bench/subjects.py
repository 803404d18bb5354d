"""What a bench measures: sessions that may be measured together, prompts, and one job of an arm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from specgen.decoding.generation import Generation
from specgen.decoding.pair import Pair
from specgen.errors import UsageError
from specgen.results.bench import Arm, Prompt, Steps
from specgen.results.document import plain_data
from specgen.rounds.record import Round
from specgen.session import Session

CANDIDATES = range(1, 9)  # of --k auto
UNPREDICTED = (2, 4, 8)  # what auto times where nothing predicts


def engine_of(session: Session) -> str:
    """The engine that the target's calls really run under."""
    return session.pair.target.engine


def check_sessions(sessions: Sequence[Session]) -> None:
    """Raises UsageError unless all have a draft, and one target under the same settings, each in a way of its own."""
    first, seen = sessions[0], {}
    for session in sessions:
        name = session.profile.name
        if session.pair.drafter is None:
            raise UsageError(f"profile {name} has no draft: nothing to bench against plain decoding")
        if session.located.get("target") != first.located.get("target") or session.pair.dtype != first.pair.dtype:
            raise UsageError(
                f"profiles {first.profile.name} and {name} have different targets: a bench has one target, with "
                "one dtype; bench them apart"
            )
        theirs, ours = (_without_k(s) for s in (session, first))
        if differing := sorted(key for key in ours if ours[key] != theirs[key]):
            raise UsageError(
                f"profiles {first.profile.name} and {name} differ in {', '.join(differing)}: bench them apart, or "
                "set it by a flag"
            )
        way = (name, engine_of(session))
        if way in seen:
            raise UsageError(f"profile {name} is there twice under engine {way[1]}: leave one out")
        seen[way] = session


def _without_k(session: Session) -> dict[str, Any]:
    settings = dataclasses.asdict(session.sampling)
    return {key: value for key, value in settings.items() if key not in ("k", "sources")}


def encoded(sessions: Sequence[Session], prompts: Iterable[tuple[str, str | None, str]]) -> list[Prompt]:
    """(name, category, text) of each prompt → its tokens, the same in every session. Raises UsageError."""
    found = []
    for name, category, text in prompts:
        try:
            tokens = [session.encode(text) for session in sessions]
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
        for session, theirs in zip(sessions, tokens, strict=True):
            if theirs != tokens[0]:
                raise UsageError(
                    f"{name}: profiles {sessions[0].profile.name} and {session.profile.name} make different tokens "
                    "of it: bench them apart"
                )
        found.append(Prompt(name=name, category=category, text=text, tokens=tokens[0]))
    return found


def checkpoints_of(sessions: Sequence[Session]) -> dict[str, Any]:
    """As in a run's result; of several profiles each with its name, the target once."""
    if len({s.profile.name for s in sessions}) == 1:
        return dict(plain_data(sessions[0].located))
    found = {f"draft {s.profile.name}": s.located["draft"] for s in sessions if "draft" in s.located}
    return dict(plain_data({"target": sessions[0].located.get("target"), **found}))


_Measured = tuple[float, Steps, list[list[Round]]]  # prefill seconds; the steps; the rounds of each row


def measured_one(pair: Pair, arm: Arm, prompt: Sequence[int]) -> _Measured:
    generation = Generation(pair, prompt, plain=arm.kind == "plain", ignore_ends=True).run()
    rounds = generation.rounds
    steps = Steps(
        draft_s=[r.draft_s for r in rounds],
        verify_s=[r.verify_s for r in rounds],
        rollback_s=[r.rollback_s for r in rounds],
        total_s=[r.total_s for r in rounds],
        width=[r.drafted + 1 for r in rounds],
        rows=[1] * len(rounds),
    )
    return generation.prefill_s, steps, [rounds]


def measured_batch(pair: Pair, arm: Arm, prompts: Sequence[list[int]], seeds: Sequence[int]) -> _Measured:
    from specgen.decoding.batch import BatchGeneration

    generation = BatchGeneration(pair, list(prompts), plain=arm.kind == "plain", ignore_ends=True, seeds=list(seeds))
    done = list(generation)
    steps = Steps(
        draft_s=[s.draft_s for s in done],
        verify_s=[s.verify_s for s in done],
        rollback_s=[s.rollback_s for s in done],
        total_s=[s.total_s for s in done],
        width=[s.width for s in done],
        rows=[s.rows for s in done],
    )
    rounds = [[s.rounds[row] for s in done if row in s.rounds] for row in range(len(prompts))]
    return generation.prefill_s, steps, rounds
