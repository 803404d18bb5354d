"""Acceptance from text alone: two teacher-forced passes and no speculation; numbers a position are all that is kept.

First plain arithmetic on those numbers, then what asks the models for them, then what costs of calls are measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specgen.bench import interleaved_medians
from specgen.decoding import start as prefill_both
from specgen.drafting import Drafter, ModelDrafter
from specgen.generation import Pair
from specgen.graph import CaptureError, loop_for
from specgen.models import LanguageModel
from specgen.rounds import Sampling
from specgen.sampling import KeyedUniforms, Processors, build_processors, check_finite, prompt_digest
from specgen.theory import ExpectedRounds, expected_rounds, pooled, predicted_speedup
from specgen.verification import coupled_joint, overlap

TEMPERATURES = (0.0, 0.5, 0.7, 1.0)
BINS = 10  # of the distribution of overlap over positions
MIN_COUNT = 3  # a token seen less often is not listed among the worst
WORST_TOKENS = 10
BLOCK = 32  # rows that are processed at once, at each temperature
PROBE_PREFIX = 256  # tokens before the calls whose cost is measured


# ------------------------------------------------------------------------------------------- numbers of a text


@dataclass(frozen=True, slots=True)
class TextScores:
    """A text's scored positions, n of them; all but `overlaps` at the profile's own temperature.

    target_log_probs: of the text's token. ratios: min(1, draft(x)/target(x)) of it; where the target gives it 0, so
    that it cannot be the target's own text, the overlap stands in. Both ratio and overlap are 0 where the draft
    proposes nothing (`proposes`): nothing is tested there, and means leave these positions out.
    overlaps: {temperature: [n]}, 0 being greedy, where an overlap is 1 or 0: agreement.
    """

    tokens: tuple[int, ...]
    target_log_probs: tuple[float, ...]
    ratios: tuple[float, ...]
    proposes: tuple[bool, ...]
    overlaps: Mapping[float, tuple[float, ...]]
    temperature: float
    windows: int = 1

    @property
    def overlap(self) -> tuple[float, ...]:
        return self.overlaps[self.temperature]

    @property
    def impossible(self) -> int:
        """Tokens to which the target, at the profile's settings, gives probability 0."""
        return sum(lp == -math.inf for lp in self.target_log_probs)

    def at(self, temperature: float) -> list[float]:
        """The overlaps at a temperature, where there is a proposal."""
        return list(itertools.compress(self.overlaps[temperature], self.proposes))

    def rounds(self, k: int, limit: int | None = None) -> ExpectedRounds:
        return expected_rounds(self.ratios, k, limit=limit, proposes=self.proposes)

    def positions(self) -> dict[str, list[Any]]:
        """The columns of the JSON: null for a log-probability of −∞, and for what nothing was proposed for."""

        def proposed(values: Sequence[float]) -> list[float | None]:
            return [v if p else None for v, p in zip(values, self.proposes, strict=True)]

        return {
            "token": list(self.tokens),
            "target_log_prob": [lp if math.isfinite(lp) else None for lp in self.target_log_probs],
            "ratio": proposed(self.ratios),
            "overlap": proposed(self.overlap),
        }


def scores_from_positions(columns: Mapping[str, Sequence[Any]], temperature: float) -> TextScores:
    """What `positions` wrote, read again; of the overlaps only those at the profile's own temperature."""
    return TextScores(
        tokens=tuple(columns["token"]),
        target_log_probs=tuple(-math.inf if lp is None else lp for lp in columns["target_log_prob"]),
        ratios=tuple(0.0 if r is None else r for r in columns["ratio"]),
        proposes=tuple(r is not None for r in columns["ratio"]),
        overlaps={temperature: tuple(0.0 if o is None else o for o in columns["overlap"])},
        temperature=temperature,
    )


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def histogram(overlaps: Sequence[float]) -> list[int]:
    """Positions with an overlap in [0, .1), [.1, .2), … [.9, 1]. Rounding may carry an overlap over 1."""
    return [int(n) for n in np.histogram(np.clip(overlaps, 0, 1), bins=BINS, range=(0, 1))[0]]


def deciles(overlaps: Sequence[float]) -> list[float]:
    """The overlap that 10 %, 20 %, … 90 % of the positions lie below."""
    return [float(q) for q in np.quantile(overlaps, np.arange(1, 10) / 10)] if overlaps else []


@dataclass(frozen=True, slots=True)
class Group:
    """Positions that have something in common. lost: their share of all rejections, Σ (1 − overlap)."""

    name: str
    count: int
    overlap: float
    lost: float


def groups(names: Sequence[str], overlaps: Sequence[float]) -> list[Group]:
    """Positions by name, the lowest mean overlap first; names: [n], overlaps: [n]."""
    by_name: dict[str, list[float]] = {}
    for name, value in zip(names, overlaps, strict=True):
        by_name.setdefault(name, []).append(value)
    missing = math.fsum(1 - v for v in overlaps)
    found = [
        Group(name, len(v), math.fsum(v) / len(v), math.fsum(1 - x for x in v) / missing if missing > 0 else 0.0)
        for name, v in by_name.items()
    ]
    return sorted(found, key=lambda g: (g.overlap, -g.count, g.name))


def worst(found: Sequence[Group], *, min_count: int = MIN_COUNT, most: int = WORST_TOKENS) -> list[Group]:
    """The groups with the lowest overlap among those that were seen often enough and that ever fail."""
    return [g for g in found if g.count >= min_count and g.overlap < 1][:most]


KINDS = ("word start", "word continuation", "digits", "punctuation", "whitespace", "other")


def kind_of(piece: str, before: str) -> str:
    """The kind of a token by its decoded text; before: the text of the one before it."""
    core = piece.strip()
    if not core:
        return "whitespace" if piece else "other"
    if core.isdigit():
        return "digits"
    if all(unicodedata.category(c)[0] in "PS" and c != "\ufffd" for c in core):
        return "punctuation"
    if not any(c.isalpha() for c in core):
        return "other"
    continues = core[0].isalpha() and not piece[0].isspace() and before[-1:].isalpha()
    return "word continuation" if continues else "word start"


# ---------------------------------------------------------------------------------------------- predictions by k


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one k would give. alpha: accepted / tested, None where nothing would be tested."""

    k: int
    tau: float
    alpha: float | None
    tested: tuple[float, ...]
    accepted: tuple[float, ...]
    rounds: float
    drafted: float
    speedup: float


def predictions(
    texts: Sequence[TextScores], ks: Sequence[int], *, draft_cost: float, verify_cost: Sequence[float],
    limit: int | None = None,
) -> list[Prediction]:  # fmt: skip
    """For each k, over all texts together. draft_cost, verify_cost: as for `predicted_speedup`."""
    found = []
    for k in ks:
        e = pooled([text.rounds(k, limit) for text in texts])
        speedup = predicted_speedup(e, draft_cost=draft_cost, verify_cost=verify_cost[: k + 1])
        found.append(Prediction(k, e.tau, e.alpha, e.tested, e.accepted, e.rounds, e.drafted, speedup))
    return found


def interpolated(widths: Mapping[int, float], most: int) -> list[float]:
    """Costs of calls on 1, 2, … `most` tokens from those of some widths, by straight lines; flat beyond the last."""
    known = sorted(widths)
    return [float(c) for c in np.interp(range(1, most + 1), known, [widths[w] for w in known])]


# ------------------------------------------------------------------------------------------------- asking models


def at_temperature(processors: Processors, sampling: Sampling, temperature: float) -> Processors:
    """The same processors with another temperature; 0: greedy, which leaves out all that only shapes a sample."""
    warpers = _warpers(sampling)
    kept = [p for p in processors.chain if type(p) not in warpers]
    if temperature == 0:
        return Processors(kept, greedy=True)
    return Processors([*kept, *_warpers(dataclasses.replace(sampling, temperature=temperature)).values()])


def _warpers(sampling: Sampling) -> dict[type, Any]:
    """The processors that `generate` leaves out when it is greedy: temperature and what truncates, by type."""
    only = {"ban": (), "bad_words_ids": (), "repetition_penalty": None, "no_repeat_ngram_size": None}
    return {type(p): p for p in build_processors(dataclasses.replace(sampling, **only))}  # type: ignore[arg-type]


def spans(length: int, first: int, context: int | None) -> list[tuple[int, int, int]]:
    """(begin, end, first scored) of the windows that score each of the tokens first … length − 1 once.

    A text that fits is one window. Otherwise they have the context's length, and each but the first scores its
    second half.
    """
    if context is None or length <= context:
        return [(0, length, first)]
    step = max(1, context // 2)
    found, scored, begin = [], first, 0
    while scored < length:
        end = min(begin + context, length)
        if end > scored:
            found.append((begin, end, scored))
            scored = end
        begin += step
    return found


Row = tuple[Tensor, Tensor | None]  # target logits [V]; draft logits, or its own distribution, or None


def _rows(target: LanguageModel, drafter: Drafter, tokens: Sequence[int], first: int) -> Iterator[Row]:
    """Both sides' rows, whatever the chunks that each computes them in."""
    source = drafter.model.score(tokens, first) if isinstance(drafter, ModelDrafter) else drafter.score(tokens, first)
    theirs: Iterator[Tensor | None] = (row for _, rows in source for row in rows)
    ours = (row for _, rows in target.score(tokens, first) for row in rows)
    return zip(ours, theirs, strict=True)


@torch.inference_mode()
def score_text(
    target: LanguageModel, drafter: Drafter, processors: Processors, sampling: Sampling, tokens: Sequence[int],
    first: int, *, temperatures: Sequence[float] = TEMPERATURES, context: int | None = None, coupled: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> TextScores:  # fmt: skip
    """Scores tokens[first:], each once, given all before it (in its window). first >= 1.

    processors, sampling: of the target's side; a drafter that is a model has its own, for its device. coupled: the
    ratios are those of mode coupled, the probability that the draft had drawn the token too under shared noise.
    progress is told how many positions are done.
    """
    if not 1 <= first < len(tokens):
        raise ValueError(f"cannot score from token {first} of {len(tokens)}: the first has nothing before it")
    own = sampling.temperature or 0.0
    wanted = sorted({*temperatures, own})
    chains = {t: at_temperature(processors, sampling, t) for t in wanted}
    drafts = {t: at_temperature(drafter.processors, sampling, t) for t in wanted} \
        if isinstance(drafter, ModelDrafter) else {}  # fmt: skip
    log_probs: list[float] = []
    ratios: list[float] = []
    proposes: list[bool] = []
    overlaps: dict[float, list[float]] = {t: [] for t in wanted}
    windows = spans(len(tokens), first, context)
    for begin, end, scored in windows:
        text = list(tokens[begin:end])
        rows = _rows(target, drafter, text, scored - begin)
        at = scored - begin
        while block := list(itertools.islice(rows, BLOCK)):
            n, prefix, inside = len(block), text[:at], text[at : at + len(block) - 1]
            logits = torch.stack([row for row, _ in block])
            check_finite(logits, target.role, begin + at)
            theirs = [row for _, row in block]
            offered = [row is not None for row in theirs]
            raw = torch.stack([torch.zeros_like(logits[0]) if row is None else row for row in theirs])
            if isinstance(drafter, ModelDrafter):
                check_finite(raw, drafter.model.role, begin + at)
            for t in wanted:
                target_probs = chains[t](logits, prefix, inside).double()
                draft_probs = (drafts[t](raw, prefix, inside) if drafts else raw).to(target_probs)
                betas = overlap(target_probs, draft_probs).tolist()
                overlaps[t] += [beta if is_there else 0.0 for beta, is_there in zip(betas, offered, strict=True)]
                if t == own:
                    chosen = (range(n), text[at : at + n])
                    p, q = target_probs[chosen].tolist(), draft_probs[chosen].tolist()
                    log_probs += [math.log(x) if x > 0 else -math.inf for x in p]
                    if coupled:
                        q = coupled_joint(target_probs, draft_probs, text[at : at + n])
                    ratios += [
                        0.0 if not is_there else min(1.0, y / x) if x > 0 else min(1.0, beta)
                        for x, y, beta, is_there in zip(p, q, betas, offered, strict=True)
                    ]
            proposes += offered
            at += n
            progress(len(ratios))
    return TextScores(
        tuple(tokens[first:]), tuple(log_probs), tuple(ratios), tuple(proposes),
        {t: tuple(values) for t, values in overlaps.items()}, own, len(windows),
    )  # fmt: skip


def pieces(tokenizer: Any, tokens: Sequence[int], first: int) -> list[str]:
    """The text of each of tokens[first:], which may depend on the one before it (a space that a lone token lacks)."""

    def decode(ids: Sequence[int]) -> str:
        if tokenizer is None:
            return "".join(f" {i}" for i in ids)
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    found = []
    for i in range(first, len(tokens)):
        alone = decode(tokens[i - 1 : i]) if i else ""
        both = decode(tokens[max(0, i - 1) : i + 1])
        found.append(both[len(alone) :] if both.startswith(alone) else decode(tokens[i : i + 1]))
    return found


# ---------------------------------------------------------------------------------------------- costs, measured


@dataclass(frozen=True, slots=True)
class Costs:
    """c, and [k+1] costs of calls on 1, 2, … tokens, in units of a single-token target call; seconds as measured."""

    c: float
    verify: tuple[float, ...]
    draft_s: float | None = None
    target_s: Mapping[int, float] | None = None  # by the number of tokens in the call


def measure_costs(
    pair: Pair, tokens: Sequence[int], max_k: int, *, context: int | None = None, repeats: int = 9,
    widths: Sequence[int] | None = None,
) -> Costs:  # fmt: skip
    """A short interleaved probe behind the text's beginning: a draft step, and target calls on 1 … max_k + 1 tokens.

    widths: the numbers of tokens called with, 1 and max_k + 1 among them; a few of them where not given.
    Raises ValueError where the context does not hold max_k + 1 tokens more than one. Starts both sides anew.
    """
    target, drafter = pair.target, pair.drafter
    assert drafter is not None
    room = PROBE_PREFIX if context is None else min(PROBE_PREFIX, context - max_k - 1)
    prefix = list(tokens[:room]) if room >= 1 else []
    if not prefix:
        raise ValueError(f"a context of {context} tokens has no room for k = {max_k}")
    feed = list(itertools.islice(itertools.cycle(tokens), max_k))
    uniforms = KeyedUniforms(pair.sampling.seed, prompt_digest(prefix))
    prefill_both(target, drafter, prefix)

    def draft_step() -> None:
        drafter.propose(prefix, 1, 0, uniforms)
        drafter.rollback(max(0, drafter.cached - (len(prefix) - 1)))

    def call(width: int) -> Callable[[], None]:
        def step() -> None:
            target.forward(torch.tensor([[prefix[-1], *feed[: width - 1]]]), width)
            target.rollback([width])

        return step

    if widths is None:
        widths = sorted({w for w in (1, 2, 3, 5, 9, 17, 33) if w <= max_k} | {max_k + 1})
    steps: dict[str, Callable[[], object]] = {"draft": draft_step, **{str(w): call(w) for w in widths}}
    if getattr(target, "engine", "eager") == "graph":
        with contextlib.suppress(CaptureError):  # such a pair is run by the eager loop
            wide = dataclasses.replace(pair, sampling=dataclasses.replace(pair.sampling, k=max_k))
            steps |= loop_for(wide).probes(prefix, widths)
    medians = interleaved_medians(steps, pair.clock, repeats=repeats)
    target_s = {w: medians[str(w)] for w in widths}
    unit = target_s[1]
    verify = interpolated({w: s / unit for w, s in target_s.items()}, max_k + 1)
    return Costs(medians["draft"] / unit, tuple(verify), medians["draft"], target_s)
