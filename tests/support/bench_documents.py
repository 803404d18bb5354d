"""Bench results written by hand: whole numbers of 1/1024 s, so that medians, shares and ratios come out exactly.

`document()` gives a whole `Bench`: 7 prompts, 1 run, a plain arm and k = 2. Everything can be scripted by arm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from specgen.results.bench import (
    Arm,
    Bench,
    Costs,
    Design,
    Divergence,
    Measurement,
    Prompt,
    Row,
    Score,
    Steps,
)
from specgen.results.files import SCHEMA_VERSION

MS = 1 / 1024
CATEGORIES = ("chat", "chat", "chat", "code", "code", "code", "code")


@dataclass(frozen=True)
class Script:
    """One arm. Times in units of MS: draft per drafting step, calls by the tokens in the call, other per round.

    accepted: drafted tokens kept in the first, second, … round, over and over; or {prompt: the same}.
    scale(prompt, run): multiplies every time of a measurement (of a batch: its first prompt's).
    drafts: drafted tokens of the first, second, … round, over and over; k where not given.
    differs: (prompt, run) whose text is not the baseline's, from its second token on.
    ends: {prompt: tokens up to and with its end}.
    """

    name: str
    k: int = 0
    accepted: Sequence[int] | Mapping[int, Sequence[int]] = (0,)
    draft: float = 2.0
    calls: Mapping[int, float] = field(default_factory=lambda: {1: 14.0, 2: 16.0, 3: 18.0, 4: 20.0, 5: 22.0})
    other: float = 2.0
    scale: Callable[[int, int], float] = lambda prompt, run: 1.0
    profile: str = "small"
    engine: str = "eager"
    batch: int = 1
    mode: str = "greedy"
    baseline: str | None = None
    overlap: float = 0.75
    bias: float | None = None
    drafts: Sequence[int] | None = None
    differs: Sequence[tuple[int, int]] = ()
    ends: Mapping[int, int] = field(default_factory=dict)


PLAIN = Script("plain")
K2 = Script("k = 2", k=2, accepted=(2, 0))
COSTS = Costs(
    profile="small",
    engine="eager",
    context=32,
    draft_s=2 * MS,
    target_s={1: 7 * MS, 2: 8 * MS, 3: 9 * MS, 5: 14 * MS},
    target_bytes=1_000_000,
    target_bytes_a_token=1000,
    draft_bytes=100_000,
    draft_bytes_a_token=100,
    copy_bandwidth=1e9,
)


def _row(script: Script, prompt: int, run: int, limit: int) -> Row:
    pattern = script.accepted[prompt] if isinstance(script.accepted, Mapping) else script.accepted
    counts: list[tuple[int, int, int, int]] = []
    left = limit
    drafts = itertools.cycle(script.drafts or [script.k])
    for wanted, proposed in zip(itertools.cycle(pattern), drafts, strict=False):
        depth = min(proposed, left - 1)
        kept = min(wanted, depth)
        counts.append((depth, kept + (kept < depth), kept, kept + 1))
        left -= kept + 1
        if not left:
            break
    drafted, tested, accepted, committed = (list(column) for column in zip(*counts, strict=True))
    tokens = [100 + i for i in range(limit)]
    if (prompt, run) in script.differs:
        tokens[1:] = [t + 500 for t in tokens[1:]]
    biases = [] if script.bias is None else [script.bias] * sum(tested)
    return Row(
        prompt=prompt,
        seed=run,
        tokens=tokens,
        finish="length",
        drafted=drafted,
        tested=tested,
        accepted=accepted,
        committed=committed,
        overlaps=[script.overlap] * sum(tested),
        biases=biases,
        end=script.ends.get(prompt),
    )


def _steps(script: Script, rows: Sequence[Row], scale: float) -> Steps:
    columns: list[tuple[float, float, float, float, int, int]] = []
    for i in range(max(len(row.drafted) for row in rows)):
        alive = [row for row in rows if i < len(row.drafted)]
        depth = max(row.drafted[i] for row in alive)
        draft, verify = depth * script.draft * scale * MS, script.calls[depth + 1] * scale * MS
        columns.append((draft, verify, 0.0, draft + verify + script.other * scale * MS, depth + 1, len(alive)))
    draft_s, verify_s, rollback_s, total_s, width, size = (list(c) for c in zip(*columns, strict=True))
    return Steps(draft_s=draft_s, verify_s=verify_s, rollback_s=rollback_s, total_s=total_s, width=width, rows=size)


def document(
    scripts: Sequence[Script] = (PLAIN, K2),
    *,
    categories: Sequence[str | None] = CATEGORIES,
    runs: int = 1,
    warmup: Mapping[str, float] | None = None,
    tokens: int = 12,
    prompt_tokens: int = 5,
    ratios: Mapping[str, Sequence[float | None]] | None = None,
    costs: Sequence[Costs] = (COSTS,),
    candidates: Sequence[int] | None = None,
    divergences: Sequence[Divergence] = (),
    load: float | None = None,
    load_before: float = 0.0,
    load_after: float = 0.0,
    cores: int = 4,
    threads: int = 1,
    cut: str | None = None,
    runs_asked: int | None = None,
    mode: str | None = None,
    order: Sequence[int] | None = None,
) -> Bench:
    """One prompt a category. warmup: {arm: scale} of one warm-up measurement of the first group. ratios: {profile:
    the teacher-forced ratio of every token}, the same for each prompt and run. order: of the timed measurements,
    which come in the order (run, group, arm)."""
    mode = mode or scripts[0].mode
    baselines = {(s.engine, s.batch): s.name for s in scripts if s.k == 0}
    arms = [
        Arm(
            name=s.name,
            kind="speculative" if s.k else "plain",
            profile=s.profile,
            k=s.k,
            engine=s.engine,
            batch=s.batch,
            mode=mode,
            baseline=s.baseline or baselines[s.engine, s.batch],
        )
        for s in scripts
    ]
    measurements: list[Measurement] = []

    def measure(script: Script, group: int, run: int, scale: float) -> None:
        first = group * script.batch
        rows = [_row(script, p, run, tokens) for p in range(first, min(first + script.batch, len(categories)))]
        steps = _steps(script, rows, scale)
        prefill = 32 * MS * scale
        measurements.append(
            Measurement(
                arm=script.name,
                group=group,
                run=run,
                order=len(measurements),
                prefill_s=prefill,
                first_s=prefill + steps.total_s[0],
                load=load,
                steps=steps,
                rows=rows,
            )
        )

    for script in scripts:
        if warmup and script.name in warmup:
            measure(script, 0, -1, warmup[script.name])
    warm = len(measurements)
    for run in range(runs):
        for first in range(len(categories)):
            for script in scripts:
                if first % script.batch == 0:
                    measure(script, first // script.batch, run, script.scale(first, run))
    for place, measurement in zip(order or range(len(measurements) - warm), measurements[warm:], strict=True):
        measurement.order = warm + place
    ks = sorted({s.k for s in scripts} - {0})
    environment = {"cpu_count": cores, "threads": threads}
    return Bench(
        schema_version=SCHEMA_VERSION,
        kind="bench",
        created="2026-01-01T00:00:00+00:00",
        sampling={"mode": mode, "max_new_tokens": tokens, "seed": 0, "temperature": None, "k": ks[0] if ks else 0},
        profiles={name: {"target": "t", "draft": "d"} for name in sorted({s.profile for s in scripts})},
        checkpoints={},
        dtype="float32",
        device="cpu",
        environment={**environment, "load_average": [load_before] * 3},
        environment_after={**environment, "load_average": [load_after] * 3},
        design=Design(
            k=ks,
            auto=False,
            candidates=list(candidates if candidates is not None else ks),
            runs=runs_asked or runs,
            runs_done=runs,
            warmup=int(bool(warmup)),
            max_new_tokens=tokens,
            budget_s=None,
            order_seed=0,
            cut=cut,
        ),
        prompts=[
            Prompt(name=f"p{i}", category=c, text=f"prompt {i}", tokens=list(range(prompt_tokens)))
            for i, c in enumerate(categories)
        ],
        arms=arms,
        measurements=measurements,
        costs=list(costs),
        scores=[
            Score(profile=name, prompt=p, run=run, ratios=list(values), end=scripts[0].ends.get(p))
            for name, values in (ratios or {}).items()
            for p in range(len(categories))
            for run in range(runs)
        ],
        divergences=list(divergences),
        notes=[],
        pieces={100 + i: f" w{i}" for i in range(tokens)},
    )
