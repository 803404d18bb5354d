"""The audit: do a pair, its rule and its machine keep the target's distribution? Eight checks that can fail.

Every check compares what the generating loop used or wrote with something it had no hand in: the rule's law, plain
decoding's distribution with the same prefix, logits without a cache, plain decoding's text. A pass is "no fault seen
in n positions", never a certificate. A check for which the budget leaves no time says so and has not passed.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from specgen.audit import DRIFT_BOUND, EDGE_FRACTION, CheckResult, SelfCheck, drift_bound, edge_fraction
from specgen.decoding import autoregressive, ends_at, speculative, start
from specgen.drafting import Drafter, NgramDrafter, Proposal
from specgen.generation import Pair
from specgen.models import LanguageModel, prefill
from specgen.rounds import Mode, Round
from specgen.sampling import (
    KeyedUniforms,
    Processors,
    SharedNoise,
    Stream,
    Uniforms,
    keyed_uniform,
    prompt_digest,
)
from specgen.verification import Rule, accept_exact, law, rule_for, total_variation

LAW_BOUND = 1e-6  # total variation: float64 arithmetic on float32 probabilities, normalised first
SAME_BOUND = 1e-5  # total variation of one processed row computed alone and among others, in float32
LEVEL = 1e-4  # of each of the sampler's three tests: how often it may reject an honest pair
RUN_LEVEL = 1e-3  # of the run's check of itself: seven z statistics, each 6e-5 where it is nearly normal
EXPECTED = 5.0  # the least expected count of a bin
INVARIANCE_K = (1, 2, 4, 8)
SHORT = 16  # tokens of a text of which one run says as much as a longer one
CONTINUED = 32  # tokens of its own that the target adds to a prompt for the law
SAMPLER_PREFIXES = 4

Loop = Callable[..., Iterator[Round]]
UniformsOf = Callable[[int, int], Uniforms]  # (seed, digest of the prompt)


# ------------------------------------------------------------------------------------------------ wrong on purpose


def raw_resample() -> Rule:
    """Accepts as it should, and draws the correction from the target instead of the residual."""
    return Rule("raw_resample", accept_exact, lambda target, draft, a: target)


def membership(n: int = 3) -> Rule:
    """Keeps whatever is among the target's n likeliest, and draws the correction from the target."""

    def accept(target: Tensor, draft: Tensor) -> Tensor:
        best = target.topk(min(n, target.shape[-1]), -1).indices
        return torch.zeros_like(target).scatter(-1, best, 1.0)

    return Rule("membership", accept, lambda target, draft, a: target)


# ---------------------------------------------------------------------------------------------------- what it says


class Status(StrEnum):
    PASS = "pass"
    FAIL = "FAIL"
    SHOWN = "shown"  # a bias: measured and printed, of a mode that promises no more
    NOT_APPLICABLE = "not applicable"
    NO_TIME = "no time"


MEANINGS = {
    "law": "The rule itself changes the distribution, whatever the machine does.",
    "sampler": "The code that generates draws tokens with other frequencies than its law.",
    "run": "Over whole texts, what was used or drawn is not what the target alone would give.",
    "caches": "What a model remembers of the text after a roll-back is not the text.",
    "processors": "A verified or drafted position is judged by another distribution than plain decoding's there.",
    "greedy": "The text is not the target's greedy text, and rounding does not explain it.",
    "invariance": "The text depends on the draft or on k, and rounding does not explain it.",
    "seeds": "A text cannot be reproduced from its seed on this machine.",
}
CHECKS = tuple(MEANINGS)
CONTROL_CHECKS = ("law", "sampler", "run")
# Run in this order, those that go in small steps first; each may take its weight's share of the time that is left.
_WEIGHTS = {
    "seeds": 1,
    "processors": 1,
    "law": 2,
    "sampler": 5,
    "run": 4,
    "caches": 2,
    "greedy": 4,
    "invariance": 5,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's row. value is what bound bounds, None where there is no one number; notes are worth a line each."""

    name: str
    status: Status
    measured: str
    bound: str = ""
    value: float | None = None
    positions: int = 0
    notes: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """What a failure would mean."""
        return MEANINGS[self.name]


@dataclass(frozen=True, slots=True)
class AuditResult:
    """All findings. passed: none failed. `complete`: there was time for all that apply."""

    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.findings if f.status is Status.FAIL)

    @property
    def no_time(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.findings if f.status is Status.NO_TIME)

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def verdict(self) -> str:
        if self.failed:
            return f"FAILED: {', '.join(self.failed)}"
        judged = [f for f in self.findings if f.status is Status.PASS]
        if not judged:
            return "nothing was judged"
        return f"no fault seen in {sum(f.positions for f in judged)} positions by {len(judged)} checks"

    def __getitem__(self, name: str) -> Finding:
        return next(f for f in self.findings if f.name == name)


# ------------------------------------------------------------------------------------------------ models that watch


class Memoised:
    """A model whose logits are computed once a prefix, so that thousands of rounds cost few calls.

    The model behind it is brought to a prefix by its own roll-back and forward; the least recently used rows go
    first. Where it has sliding windows, it begins anew instead: a trimmed window cannot be rolled back far.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.role, self.vocabulary = model, model.role, model.vocabulary
        self.tokens: list[int] = []
        self.calls = 0
        self._held: list[int] = []  # what the model's cache holds
        self._rows: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._room = max(64, min(100_000, 2**27 // max(1, self.vocabulary)))
        config = getattr(getattr(model, "model", None), "config", None)
        self._windowed = config is not None and bool(getattr(config.get_text_config(), "sliding_window", None))
        model.reset()

    @property
    def lengths(self) -> tuple[int, ...]:
        return (len(self.tokens),)

    def logits(self, prefix: Sequence[int]) -> Tensor:
        """[V], of what follows the prefix."""
        return self._get(list(prefix), 1)[0]

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        self.tokens += tokens[0].tolist()
        return torch.stack(self._get(self.tokens, rows))[None]

    def rollback(self, counts: Sequence[int]) -> None:
        (count,) = counts
        if not 0 <= count <= len(self.tokens):
            raise ValueError(f"cannot roll back {count} of {len(self.tokens)} tokens")
        del self.tokens[len(self.tokens) - count :]

    def reset(self) -> None:
        self.tokens = []

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, Tensor]]:
        return self.model.score(tokens, start)

    def _get(self, text: list[int], rows: int) -> list[Tensor]:
        first = len(text) - rows + 1
        keys = [tuple(text[:end]) for end in range(first, len(text) + 1)]
        missing = next((i for i, key in enumerate(keys) if key not in self._rows), None)
        known = {key: self._rows[key] for key in keys[:missing]}
        if missing is not None:
            for i, row in enumerate(self._compute(text, first + missing), missing):
                known[keys[i]] = self._rows[keys[i]] = row
        for key in keys:
            self._rows.move_to_end(key)
        while len(self._rows) > self._room:
            self._rows.popitem(last=False)
        return [known[key] for key in keys]

    def _compute(self, text: list[int], end: int) -> Tensor:
        """Rows of what follows text[:end], text[:end + 1], … text."""
        self.calls += 1
        same = 0
        for a, b in zip(self._held, text[: end - 1], strict=False):
            if a != b:
                break
            same += 1
        if self._windowed and same < len(self._held):
            self.model.reset()
            same = 0
        else:
            self.model.rollback([len(self._held) - same])
        prefill(self.model, text[same : end - 1])
        self._held = list(text)
        return self.model.forward(torch.tensor([text[end - 1 :]]), len(text) - end + 1)[0]


class _LastCall:
    """A model that keeps the logits of its last call."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.role, self.vocabulary = model, model.role, model.vocabulary
        self.rows = torch.empty(0)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.model.lengths

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        logits = self.model.forward(tokens, rows)
        self.rows = logits[0]
        return logits

    def rollback(self, counts: Sequence[int]) -> None:
        self.model.rollback(counts)

    def reset(self) -> None:
        self.model.reset()

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, Tensor]]:
        return self.model.score(tokens, start)


class _LastProposal:
    """A drafter that keeps its last proposal."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.kind = drafter, drafter.kind
        self.proposal = Proposal((), torch.empty(0))

    @property
    def cached(self) -> int:
        return self.drafter.cached

    def start(self, prompt: Sequence[int]) -> None:
        self.drafter.start(prompt)

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal:
        self.proposal = self.drafter.propose(prefix, k, round_index, uniforms)
        return self.proposal

    def rollback(self, count: int) -> None:
        self.drafter.rollback(count)

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, list[Tensor | None]]]:
        return self.drafter.score(tokens, start)


class _LastProbs(Processors):
    """Processors that keep what they last returned."""

    def __init__(self, inner: Processors) -> None:
        super().__init__(inner.chain, greedy=inner.greedy)
        self.inner = inner
        self.probs = torch.empty(0)

    def scores(self, logits: Tensor, prefix: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
        return self.inner.scores(logits, prefix, drafted)

    def __call__(self, logits: Tensor, prefix: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
        self.probs = self.inner(logits, prefix, drafted)
        return self.probs


class AlwaysAccepts:
    """Every acceptance draw is 0.0, the lowest that a uniform can be; all other draws are real."""

    def __init__(self, uniforms: Uniforms) -> None:
        self.uniforms = uniforms

    def __call__(self, stream: Stream, position: int, round_index: int, edges: Tensor) -> float:
        if stream is Stream.ACCEPT:
            return 0.0
        return self.uniforms(stream, position, round_index, edges)


def _plain(processors: Processors) -> Processors:
    """The same chain in the class that plain decoding uses."""
    return Processors(processors.chain, greedy=processors.greedy)


def _short_name(processor: Any) -> str:
    return type(processor).__name__.removesuffix("LogitsProcessor").removesuffix("LogitsWarper")


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _wide(probs: Tensor) -> Tensor:
    """In float64 (on the CPU where the device has none), rows summing to 1."""
    wide = probs.cpu().double() if probs.device.type == "mps" else probs.double()
    return wide / wide.sum(-1, keepdim=True)


@dataclass
class _Rows:
    """The distributions of plain decoding by prefix, of both sides, from memoised logits; the last few are kept."""

    target: Memoised
    drafter: Drafter
    processors: Processors
    kept: OrderedDict[tuple[str, tuple[int, ...]], Tensor | None] = field(default_factory=OrderedDict)

    def _of(self, side: str, prefix: Sequence[int], compute: Callable[[], Tensor | None]) -> Tensor | None:
        key = (side, tuple(prefix))
        if key not in self.kept:
            self.kept[key] = compute()
            while len(self.kept) > max(16, 2**24 // self.target.vocabulary):
                self.kept.popitem(last=False)
        return self.kept[key]

    def of_target(self, prefix: Sequence[int]) -> Tensor:
        row = self._of("target", prefix, lambda: _wide(self.processors(self.target.logits(prefix)[None], prefix)[0]))
        assert row is not None
        return row

    def of_draft(self, prefix: Sequence[int]) -> Tensor | None:
        """None where the drafter would propose nothing."""

        def compute() -> Tensor | None:
            model, processors = getattr(self.drafter, "model", None), getattr(self.drafter, "processors", None)
            if isinstance(model, Memoised) and processors is not None:
                row = _plain(processors)(model.logits(prefix)[None], prefix)[0]
            else:
                _, rows = next(iter(self.drafter.score([*prefix, prefix[-1]], len(prefix))))
                if rows[0] is None:
                    return None
                row = rows[0]
            return _wide(row).to(self.of_target(prefix).device)

        return self._of("draft", prefix, compute)


@dataclass
class _Distance:
    """Rows that should be one: the largest total variation, and how often only the tokens let through differ."""

    rows: int = 0
    edges: int = 0
    worst: float = 0.0
    where: str = ""

    def add(self, used: Tensor, plain: Tensor, where: str) -> None:
        """used, plain: [V]. At the edge of top-p or top-k one token's rounding moves all the others."""
        self.rows += 1
        used, plain = _wide(used), _wide(plain)
        plain = plain.to(used.device)
        distance = float(total_variation(used, plain))
        if not distance <= SAME_BOUND and int((used > 0).sum()) != int((plain > 0).sum()):
            self.edges += 1
            self.where = self.where or where
            return
        if not distance <= self.worst:
            self.worst, self.where = distance, where

    @property
    def passed(self) -> bool:
        return self.worst <= SAME_BOUND and self.edges <= EDGE_FRACTION * self.rows


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position where two texts differ. margins: of the token chosen over the other's, by kind of call.

    explained: each call's own logits give the token it wrote, and the two calls' logits differ by rounding only.
    """

    position: int
    plain_token: int
    token: int
    plain_margin: float
    margin: float
    difference: float
    explained: bool

    def __str__(self) -> str:
        verdict = "a tie broken by arithmetic" if self.explained else "not explained by rounding: a bug"
        return (
            f"position {self.position}: plain decoding wrote {self.plain_token} (margin {self.plain_margin:.3g} in "
            f"its one-token call), the loop {self.token} (margin {self.margin:.3g} in its verification call); the "
            f"calls' scores of the two differ by {self.difference:.3g}: {verdict}"
        )


# -------------------------------------------------------------------------------------------------------- the checks


@dataclass
class Auditor:
    """Audits a pair with a draft on prompts (token ids). `run()` gives the findings.

    seeds: how many each pooled check uses. rounds: of the sampler. budget: seconds, all checks together, by clock.
    loop, rule, uniforms: what is audited in place of the product's own.
    progress: told the name of each check as it begins.
    """

    pair: Pair
    prompts: Sequence[Sequence[int]]
    seeds: int = 4
    rounds: int = 2000
    budget: float = math.inf
    loop: Loop = speculative
    rule: Rule | None = None
    uniforms: UniformsOf | None = None
    clock: Callable[[], float] = time.perf_counter
    progress: Callable[[str], None] = lambda name: None

    def __post_init__(self) -> None:
        if self.pair.drafter is None:
            raise ValueError("an audit needs a pair with a draft")
        if not self.prompts or not all(self.prompts):
            raise ValueError("an audit needs prompts, none of them empty")
        self.drafter: Drafter = self.pair.drafter
        self.sampling = self.pair.sampling
        self.mode = self.sampling.mode
        self.rule = self.rule or self.pair.rule or rule_for(self.sampling)
        if self.uniforms is None:
            self.uniforms = SharedNoise if self.mode is Mode.COUPLED else KeyedUniforms
        self.processors = _plain(self.pair.processors)
        self.bound = DRIFT_BOUND.get(self.pair.dtype, DRIFT_BOUND[torch.bfloat16])
        self.left_out = 0
        self._texts: dict[int, list[int]] = {}

    def run(self, checks: Sequence[str] = CHECKS) -> AuditResult:
        """The checks of those names, in the time there is."""
        self.pair.holder[0] = self  # a generation that was going on finds that the caches hold another text
        end = self.clock() + self.budget
        found: dict[str, Finding] = {}
        due = []
        for name in _WEIGHTS:
            if name in checks:
                reason = self._not_applicable(name)
                if reason:
                    found[name] = Finding(name, Status.NOT_APPLICABLE, reason)
                else:
                    due.append(name)
        for i, name in enumerate(due):
            now = self.clock()
            if now >= end:
                found[name] = Finding(name, Status.NO_TIME, "no time within the budget; not checked")
                continue
            self.progress(name)
            share = _WEIGHTS[name] / sum(_WEIGHTS[n] for n in due[i:])
            found[name] = getattr(self, f"check_{name}")(now + share * (end - now))
        return AuditResult(tuple(found[name] for name in CHECKS if name in found))

    def _not_applicable(self, name: str) -> str:
        """Why a check says nothing of this mode; empty where it applies."""
        mode = self.mode
        if name == "law" and mode is Mode.GREEDY:
            return "greedy: there is one token to draw"
        if name == "law" and mode is Mode.COUPLED:
            return "coupled: the draft's draw and the correction are not independent; see sampler and invariance"
        if name == "sampler" and mode is Mode.GREEDY:
            return "greedy draws nothing; see greedy"
        if name == "run" and mode is Mode.GREEDY:
            return "greedy draws nothing; see greedy"
        if name == "run" and mode.approximate:
            return f"{mode.value} does not promise the target's distribution; its bias is under law"
        if name == "greedy" and mode is not Mode.GREEDY:
            return f"{mode.value} is not greedy"
        if name == "invariance" and mode is not Mode.COUPLED:
            return f"only coupled promises it, not {mode.value}"
        return ""

    # ------------------------------------------------------------------------------------------------ generating

    def _source(self, seed: int, prompt: Sequence[int]) -> Uniforms:
        assert self.uniforms is not None
        return self.uniforms(seed, prompt_digest(prompt))

    def _seeds(self) -> range:
        return range(self.sampling.seed, self.sampling.seed + max(1, self.seeds))

    def _rounds(
        self, prompt: Sequence[int], seed: int, *, target: LanguageModel | None = None,
        drafter: Drafter | None = None, processors: Processors | None = None, k: int | None = None,
        length: int | None = None, uniforms: Uniforms | None = None,
    ) -> Iterator[Round]:  # fmt: skip
        """A run of the audited loop from the prompt on."""
        target, drafter = target or self.pair.target, drafter or self.drafter
        start(target, drafter, prompt)
        return self.loop(
            target, drafter, processors or self.pair.processors, prompt, k=k or self.sampling.k,
            max_new_tokens=length or self.sampling.max_new_tokens,
            uniforms=uniforms or self._source(seed, prompt), ended=ends_at(self.sampling.end_tokens),
            rule=self.rule, clock=self.pair.clock,
        )  # fmt: skip

    def _plain_rounds(
        self, prompt: Sequence[int], seed: int, *, target: LanguageModel | None = None, length: int | None = None
    ) -> Iterator[Round]:
        target = target or self.pair.target
        source = SharedNoise if self.mode is Mode.COUPLED else KeyedUniforms
        start(target, None, prompt)
        return autoregressive(
            target, self.processors, prompt, max_new_tokens=length or self.sampling.max_new_tokens,
            uniforms=source(seed, prompt_digest(prompt)), ended=ends_at(self.sampling.end_tokens),
            clock=self.pair.clock,
        )  # fmt: skip

    def _text(self, index: int) -> list[int]:
        """A prompt with the target's own continuation."""
        if index not in self._texts:
            prompt = self.prompts[index]
            length = min(CONTINUED, self.sampling.max_new_tokens)
            rounds = self._plain_rounds(prompt, self.sampling.seed, length=length)
            self._texts[index] = [*prompt, *(t for r in rounds for t in r.tokens)]
        return self._texts[index]

    def _units(self, deadline: float, units: Sequence[Any]) -> Iterator[Any]:
        """As many as there is time for, and one at least. `left_out` then holds how many there was none for."""
        self.left_out = 0
        for i, unit in enumerate(units):
            if i and self.clock() >= deadline:
                self.left_out = len(units) - i
                return
            yield unit

    def _prompts_and_seeds(self) -> list[tuple[Sequence[int], int]]:
        return [(prompt, seed) for seed in self._seeds() for prompt in self.prompts]

    def _finding(
        self, name: str, passed: bool, measured: str, bound: str, value: float | None, positions: int,
        notes: Sequence[str] = (), unit: str = "prompts × seeds",
    ) -> Finding:  # fmt: skip
        if self.left_out:
            notes = [*notes, f"no time for {self.left_out} more {unit}"]
        if positions == 0 and passed:
            return Finding(name, Status.NOT_APPLICABLE, "no position to judge", bound, None, 0, tuple(notes))
        if passed:
            measured = f"{measured}; no fault seen in {positions} positions"
        status = Status.PASS if passed else Status.FAIL
        return Finding(name, status, measured, bound, value, positions, tuple(notes))

    # ------------------------------------------------------------------------------------------------- one by one

    def check_seeds(self, deadline: float) -> Finding:
        positions, differing = 0, []
        length = min(SHORT, self.sampling.max_new_tokens)
        for prompt, seed in self._units(deadline, self._prompts_and_seeds()[: 2 * len(self.prompts)]):
            first, second = ([_bits(r) for r in self._rounds(prompt, seed, length=length)] for _ in range(2))
            positions += sum(len(bits[0]) for bits in first)
            if first != second:
                differing.append(f"seed {seed}, prompt {list(prompt)[:8]}…: two runs differ")
        return self._finding("seeds", not differing, f"{len(differing)} runs differ when repeated", "0, bit for bit",
                             float(len(differing)), positions, differing)  # fmt: skip

    def check_processors(self, deadline: float) -> Finding:
        target, drafter = Memoised(self.pair.target), self._memoised_drafter()
        rows = _Rows(target, drafter, self.processors)
        watched, probs = _LastProposal(drafter), _LastProbs(self.pair.processors)
        kinds = [("all", self.pair.processors, self.processors)]
        for processor in self.pair.processors.chain:
            alone = copy.copy(self.pair.processors)
            alone.chain, alone.greedy = (processor,), False  # the argmax would hide most of what differs
            kinds.append((_short_name(processor), alone, Processors((processor,))))
        found = {name: _Distance() for name in ["all", "draft", *(name for name, _, _ in kinds[1:])]}
        for prompt, seed in self._units(deadline, self._prompts_and_seeds()[: 2 * len(self.prompts)]):
            text = list(prompt)
            for r in self._rounds(prompt, seed, target=target, drafter=watched, processors=probs):
                drafted, drawn_from = watched.proposal.tokens, watched.proposal.probs
                prefixes = [[*text, *drafted[:j]] for j in range(len(drafted) + 1)]
                logits = torch.stack([target.logits(prefix) for prefix in prefixes])
                for j, prefix in enumerate(prefixes):
                    where = f"position {len(prefix)}, row {j} of its round"
                    found["all"].add(probs.probs[j], rows.of_target(prefix), where)
                    plain = rows.of_draft(prefix) if j < len(drafted) else None
                    if plain is not None:
                        found["draft"].add(drawn_from[j], plain, where)
                for name, batch, single in kinds[1:]:
                    used = batch(logits, text, drafted)
                    for j, prefix in enumerate(prefixes):
                        found[name].add(used[j], single(logits[j : j + 1], prefix)[0], f"position {len(prefix)}")
                text += r.tokens
                if self.clock() >= deadline:
                    break
        worst = max((d.worst for d in found.values()), default=0.0)
        bad = [name for name, d in found.items() if not d.passed]
        notes = [
            f"{name}: largest total variation {d.worst:.2g} in {d.rows} rows, {d.edges} with other tokens let "
            f"through (first or worst at {d.where})"
            for name, d in found.items() if not d.passed
        ]  # fmt: skip
        measured = f"largest total variation {worst:.2g} over {', '.join(n for n, d in found.items() if d.rows)}"
        return self._finding("processors", not bad, measured, f"{SAME_BOUND:g}", worst, found["all"].rows, notes)

    def _memoised_drafter(self) -> Drafter:
        model = getattr(self.drafter, "model", None)
        if model is None:
            return self.drafter
        drafter = copy.copy(self.drafter)
        drafter.model = Memoised(model)  # type: ignore[attr-defined]
        return drafter

    def check_law(self, deadline: float) -> Finding:
        assert self.rule is not None
        biases: list[float] = []
        for i in self._units(deadline, range(len(self.prompts))):
            text = self._text(i)
            drafts = (row for _, rows in self.drafter.score(text, 1) for row in rows)
            for first, logits in self.pair.target.score(text, 1):
                for row in self.processors(logits, text[:first], text[first : first + len(logits) - 1]):
                    draft = next(drafts)
                    if draft is not None:
                        target_probs = _wide(row)
                        out = law(self.rule, target_probs, _wide(draft.to(row)).to(target_probs))
                        biases.append(float(total_variation(out, target_probs)))
        if not biases:
            return self._finding("law", True, "", f"{LAW_BOUND:g}", None, 0)
        worst, mean = max(biases), sum(biases) / len(biases)
        measured = f"total variation from the target {worst:.2g} worst, {mean:.2g} mean"
        if self.mode.approximate:
            measured = f"bias: {measured}, at {len(biases)} positions"
            return Finding("law", Status.SHOWN, measured, "none is promised", worst, len(biases))
        return self._finding(
            "law", worst <= LAW_BOUND, measured, f"{LAW_BOUND:g}", worst, len(biases), unit="prompts"
        )

    def check_caches(self, deadline: float) -> Finding:
        worst, flips, calls, notes = {"target": 0.0}, 0, 0, []
        for prompt, seed in self._units(deadline, self._prompts_and_seeds()):
            probe = _CacheProbe(self.pair.target, self.drafter, self._source(seed, prompt))
            text = list(prompt)
            for r in self._rounds(prompt, seed, length=min(SHORT, self.sampling.max_new_tokens)):
                text += r.tokens
                probe.after_round(text)
                if probe.faults:
                    break  # what a loop does with caches that are too long is anybody's guess
            probe.judge(text)
            flips, calls = flips + probe.flips, calls + probe.calls
            notes += probe.faults
            for role, value in probe.worst.items():
                worst[role] = max(worst.get(role, 0.0), value)
        largest = max(worst.values())
        shown = ", ".join(f"{role} {value:.2g}" for role, value in worst.items())
        measured = f"largest difference of logits: {shown}; {flips} argmax flips"
        return self._finding("caches", largest <= self.bound and not notes, measured, f"{self.bound:g}", largest,
                             calls, notes[:3])  # fmt: skip

    def check_greedy(self, deadline: float) -> Finding:
        drafts = [("draft", self.drafter)]
        return self._same_texts("greedy", deadline, [(name, d, self.sampling.k) for name, d in drafts], [0])

    def check_invariance(self, deadline: float) -> Finding:
        ngram = NgramDrafter(self.pair.target.vocabulary, device=getattr(self.pair.target, "device", "cpu"))
        drafts: list[tuple[str, Drafter]] = [("draft", self.drafter)]
        if self.drafter.kind != ngram.kind:
            drafts.append(("ngram", ngram))
        kinds = [(name, d, k) for name, d in drafts for k in INVARIANCE_K]
        return self._same_texts("invariance", deadline, kinds, self._seeds())

    def _same_texts(
        self, name: str, deadline: float, kinds: Sequence[tuple[str, Drafter, int]], seeds: Sequence[int]
    ) -> Finding:
        """Every kind (draft and k) against plain decoding with that seed."""
        positions, texts = 0, 0
        ties: list[str] = []
        bugs: list[str] = []
        plain: dict[tuple[int, int], list[int]] = {}
        units = [(seed, i, kind) for seed in seeds for i in range(len(self.prompts)) for kind in kinds]
        for seed, i, (draft, drafter, k) in self._units(deadline, units):
            prompt = self.prompts[i]
            if (seed, i) not in plain:
                plain[seed, i] = [t for r in self._plain_rounds(prompt, seed) for t in r.tokens]
            same, divergence = self._compare(prompt, seed, plain[seed, i], drafter, k)
            positions, texts = positions + same + (divergence is not None), texts + 1
            if divergence is not None:
                where = f"{draft}, k = {k}, seed {seed}, prompt {i + 1}: {divergence}"
                (ties if divergence.explained else bugs).append(where)
        measured = f"{texts} texts against plain decoding: {len(bugs)} differ"
        if ties:
            measured += f", and {len(ties)} at a tie that rounding breaks"
        return self._finding(name, not bugs, measured, "0, ties aside", float(len(bugs)), positions,
                             [*bugs[:3], *ties[:3]], unit="texts")  # fmt: skip

    def _compare(
        self, prompt: Sequence[int], seed: int, plain: list[int], drafter: Drafter, k: int
    ) -> tuple[int, Divergence | None]:
        """How many tokens are the same, and what became of the first other one."""
        watched = _LastCall(self.pair.target)
        text: list[int] = []
        for r in self._rounds(prompt, seed, target=watched, drafter=drafter, k=k):
            for j, token in enumerate(r.tokens):
                n = len(text)
                if n >= len(plain) or token != plain[n]:
                    return n, self._explain(prompt, seed, plain, token, watched.rows[j], n)
                text.append(token)
        if len(text) < len(plain):
            missing = Divergence(len(prompt) + len(text), plain[len(text)], -1, 0.0, 0.0, math.inf, False)
            return len(text), missing
        return len(text), None

    def _explain(
        self, prompt: Sequence[int], seed: int, plain: list[int], token: int, verified: Tensor, n: int
    ) -> Divergence:
        position, prefix = len(prompt) + n, [*prompt, *plain[:n]]
        if n >= len(plain):
            return Divergence(position, -1, token, 0.0, 0.0, math.inf, False)
        watched = _LastCall(self.pair.target)
        for _ in self._plain_rounds(prompt, seed, target=watched, length=n + 1):
            pass
        alone = watched.rows[-1]
        a, b = self._choices(alone, prefix, seed, prompt), self._choices(verified, prefix, seed, prompt)
        own = plain[n]
        near = float((a - b)[[own, token]].abs().nan_to_num(nan=0.0).sum())
        rounding = float((alone.double() - verified.double()).abs().max()) <= self.bound
        explained = int(a.argmax()) == own and int(b.argmax()) == token and rounding
        margins = float(a[own] - a[token]), float(b[token] - b[own])
        return Divergence(position, own, token, *margins, near, explained)

    def _choices(self, logits: Tensor, prefix: Sequence[int], seed: int, prompt: Sequence[int]) -> Tensor:
        """[V] whose argmax is the token that this call's logits give."""
        if self.mode is not Mode.COUPLED:
            return self.processors.scores(_at_least_float32(logits)[None], prefix)[0].double()
        noise = SharedNoise(seed, prompt_digest(prompt))
        probs = self.processors(logits[None], prefix)[0]
        return probs.double().log() + noise.gumbel(len(prefix), probs)

    def check_run(self, deadline: float) -> Finding:
        check = SelfCheck(
            drift_bound(self.pair.dtype, self.sampling.temperature), self.mode, edge_fraction(self.pair.dtype)
        )
        runs = 0
        for prompt, seed in self._units(deadline, self._prompts_and_seeds()):
            rounds = list(self._rounds(prompt, seed))
            check.add(self.pair.target, self.drafter, self.processors, prompt, rounds)
            runs += 1
        result = check.result()
        notes = [f"{r.name}: {r.value:.3g} (bound {r.bound:g}): {r.note}" for r in result.rows if r.passed is False]
        return self._finding("run", result.passed, f"{_worst(result)} over {runs} texts",
                             f"|z| 4; drift {check.tolerance:g}; impossible events 0", None, result.positions,
                             notes)  # fmt: skip

    def check_sampler(self, deadline: float) -> Finding:
        sampler = _Sampler(self, Memoised(self.pair.target), self._memoised_drafter())
        boundary = 0 if self.mode is Mode.COUPLED else self.rounds // 4
        began = self.clock()
        third = min(deadline, began + (deadline - began) / 3)
        for n in self._units(third, range(boundary)):
            sampler.round(n, boundary=True)
        for n in self._units(deadline, range(self.rounds)):
            sampler.round(n)
        return sampler.finding()


def _bits(r: Round) -> tuple[Any, ...]:
    """What two runs with one seed must share, to the bit."""
    return (r.committed, r.overlaps, r.drafted, r.tested, r.accepted, r.finish)


def _worst(result: CheckResult) -> str:
    drift = next(r.value or 0.0 for r in result.rows if r.name == "drift")
    events = next(r.value or 0.0 for r in result.rows if r.name == "impossible events")
    z = [abs(r.value) for r in result.rows if " z" in r.name and r.value is not None]
    largest = f"largest |z| {max(z):.2f} of {len(z)}" if z else "not enough variation for a z"
    return f"{largest}, drift {drift:.2g}, {events:.0f} impossible events"


class _CacheProbe:
    """After each round one more call of either side, with its cache; in the end all of them from scratch."""

    def __init__(self, target: LanguageModel, drafter: Drafter, uniforms: Uniforms) -> None:
        self.models = {"target": target}
        self.drafter, self.uniforms = drafter, uniforms
        if (model := getattr(drafter, "model", None)) is not None:
            self.models["draft"] = model
        self.rows: dict[str, list[tuple[int, Tensor]]] = {role: [] for role in self.models}
        self.worst = dict.fromkeys(self.models, 0.0)
        self.flips = self.calls = 0
        self.faults: list[str] = []

    def after_round(self, text: Sequence[int]) -> None:
        for role, model in self.models.items():
            cached = model.lengths[0]
            if cached >= len(text):
                self.faults.append(f"{role}: {cached} tokens cached of a text of {len(text)}; it may keep one less")
                continue
            logits = model.forward(torch.tensor([text[cached:]]), 1)[0, -1]
            model.rollback([model.lengths[0] - cached])
            self.rows[role].append((len(text), logits))
        if "draft" not in self.models:
            self._compare_proposal(text)

    def _compare_proposal(self, text: Sequence[int]) -> None:
        """A drafter without a model: its next proposal against one made from scratch."""
        cached = self.drafter.cached
        proposal = self.drafter.propose(text, 1, 0, self.uniforms)
        self.drafter.rollback(self.drafter.cached - cached)
        _, (fresh,) = next(iter(self.drafter.score([*text, text[-1]], len(text))))
        self.calls += 1
        if (fresh is None) != (not proposal.tokens) or (
            fresh is not None and not torch.equal(fresh.double().cpu(), proposal.probs[0].double().cpu())
        ):
            self.flips += 1
            self.faults.append(f"draft: another proposal than from scratch at position {len(text)}")

    def judge(self, text: Sequence[int]) -> None:
        for role, model in self.models.items():
            due = dict(self.rows[role])
            if not due:
                continue
            for first, logits in model.score([*text, text[-1]], min(due)):
                for position, fresh in enumerate(logits, first):
                    if position in due:
                        used = due[position]
                        difference = float((used.double() - fresh.double()).abs().max())
                        if not difference <= self.worst[role]:
                            self.worst[role] = difference
                        self.flips += int(used.argmax() != fresh.argmax())
                        self.calls += 1


class _Sampler:
    """Single rounds from fixed prefixes through the audited loop, and what their committed tokens say of its law.

    Given the text before it, and that the round got there, a committed token has the law of the target (approximate
    modes: of their rule, at tested positions). So its probability integral transform, randomised within its own cell,
    is uniform and independent of all before it; tokens are put in order of draft/target, so that a lean toward or
    away from the draft shows as a shift.
    """

    def __init__(self, auditor: Auditor, target: Memoised, drafter: Drafter) -> None:
        self.auditor, self.target = auditor, target
        self.drafter = _LastProposal(drafter)
        self.rows = _Rows(target, drafter, auditor.processors)
        self.prefixes = self._prefixes()
        self.counts: dict[tuple[tuple[int, ...], bool], Counter[int]] = {}
        self.transforms: dict[str, list[float]] = {"all": [], "bonus": []}
        self.zeros: list[str] = []
        self.done = self.boundary_rounds = self.tried = self.tested = 0

    def _prefixes(self) -> list[list[int]]:
        """Places where the draft has something to propose: the prompts' ends, or else in the target's own text."""
        found = [list(prompt) for prompt in self.auditor.prompts[:SAMPLER_PREFIXES]]
        silent = [prefix for prefix in found if self.rows.of_draft(prefix) is None]
        found = [prefix for prefix in found if prefix not in silent]
        for i in range(len(self.auditor.prompts)):
            if len(found) >= 2:  # few, so that each is drawn from often
                break
            text, n = self.auditor._text(i), len(self.auditor.prompts[i])
            places = range(n + (len(text) - n) // 2, len(text))
            found += [text[:end] for end in places if self.rows.of_draft(text[:end]) is not None][:1]
        return found or silent

    def round(self, n: int, *, boundary: bool = False) -> None:
        auditor = self.auditor
        prefix = self.prefixes[n % len(self.prefixes)]
        seed = auditor.sampling.seed + n
        uniforms = auditor._source(seed, prefix)
        if boundary:
            uniforms = AlwaysAccepts(uniforms)
        r = next(
            auditor._rounds(prefix, seed, target=self.target, drafter=self.drafter, uniforms=uniforms,
                            length=auditor.sampling.k + 1)
        )  # fmt: skip
        text = list(prefix)
        spread = keyed_uniform(
            seed, prompt_digest(prefix), int(Stream.CHECK), torch.arange(len(prefix), len(prefix) + len(r.tokens))
        )
        drafted = self.drafter.proposal.tokens
        for i, token in enumerate(r.tokens):
            row = self._expected(text, i < r.drafted)
            if boundary and i < len(drafted):
                self.tried += int(self.rows.of_target(text)[drafted[i]] == 0)
            if row[token] <= 0:
                where = "a boundary draw" if boundary else "an ordinary draw"
                self.zeros.append(f"token {token}, which the target gives 0, was committed at {where}")
            elif not boundary:
                key = (tuple(text), i < r.drafted)
                self.counts.setdefault(key, Counter())[token] += 1
                u = self._transform(row, self.rows.of_draft(text), token, float(spread[i]))
                self.transforms["all"].append(u)
                self.tested += i < r.drafted
                if i >= r.drafted:
                    self.transforms["bonus"].append(u)
            text.append(token)
        self.done += not boundary
        self.boundary_rounds += boundary

    def _expected(self, text: Sequence[int], tested: bool) -> Tensor:
        row = self.rows.of_target(text)
        if tested and self.auditor.mode.approximate:
            draft = self.rows.of_draft(text)
            assert draft is not None
            assert self.auditor.rule is not None
            return law(self.auditor.rule, row, draft)
        return row

    @staticmethod
    def _transform(row: Tensor, draft: Tensor | None, token: int, spread: float) -> float:
        ids = torch.arange(len(row), device=row.device)
        if draft is None:
            below = ids < token
        else:
            lean = torch.where(row > 0, draft / row, torch.zeros_like(row))
            below = (lean < lean[token]) | ((lean == lean[token]) & (ids < token))
        return min(1.0, float(row[below].sum()) + spread * float(row[token]))

    def _g_test(self) -> tuple[float, int]:
        """G and its degrees of freedom, summed over the places with counts enough; by Williams' correction."""
        total, freedom = 0.0, 0
        for (text, tested), counter in self.counts.items():
            n = sum(counter.values())
            if n < 2 * EXPECTED:
                continue
            expected = self._expected(text, tested).cpu() * n
            observed = torch.zeros_like(expected)
            observed[list(counter)] = torch.tensor(list(counter.values()), dtype=expected.dtype)
            alone = expected >= EXPECTED
            e, o = expected[alone].tolist(), observed[alone].tolist()
            rest_e, rest_o = float(expected[~alone].sum()), float(observed[~alone].sum())
            if rest_e >= EXPECTED:
                e.append(rest_e)
                o.append(rest_o)
            elif e:
                least = e.index(min(e))
                e[least] += rest_e
                o[least] += rest_o
            if len(e) < 2:
                continue
            g = 2 * sum(b * math.log(b / a) for a, b in zip(e, o, strict=True) if b)
            total += g / (1 + (sum(n / a for a in e) - 1) / (6 * n * (len(e) - 1)))
            freedom += len(e) - 1
        return total, freedom

    def finding(self) -> Finding:
        from scipy import stats

        g, freedom = self._g_test()
        p = {}
        if freedom:
            p[f"G {g:.1f} on {freedom} degrees of freedom"] = float(stats.chi2.sf(g, freedom))
        for name, values in self.transforms.items():
            if len(values) >= 2 * EXPECTED:
                p[f"uniformity, {name} ({len(values)})"] = float(stats.kstest(values, "uniform").pvalue)
        positions = len(self.transforms["all"])
        notes = [f"{name}: p = {value:.2g}" for name, value in p.items() if value < LEVEL] + self.zeros[:3]
        if self.auditor.mode is not Mode.COUPLED and not self.tried:
            notes.append(f"no token of target probability 0 was drafted in {self.boundary_rounds} boundary rounds")
        least = min(p.values(), default=None)
        tests = ", ".join(f"{name}: p {value:.2g}" for name, value in p.items()) or "too few rounds for a test"
        measured = f"{self.done} rounds, {self.tested} tested tokens: {tests}"
        measured += f"; {len(self.zeros)} tokens of target probability 0 committed ({self.tried} drafted at u = 0)"
        passed = not self.zeros and (least is None or least >= LEVEL)
        if passed and least is None:
            status = Status.NO_TIME if self.auditor.left_out else Status.NOT_APPLICABLE
            return Finding("sampler", status, measured, f"p {LEVEL:g}", None, positions)
        bound = f"p {LEVEL:g} each; 0"
        return self.auditor._finding("sampler", passed, measured, bound, least, positions, notes, unit="rounds")


# --------------------------------------------------------------------------------------------------------- control


@dataclass(frozen=True, slots=True)
class Control:
    """A wrong rule, and what the audit found of it."""

    rule: str
    result: AuditResult

    @property
    def caught(self) -> bool:
        return bool(self.result.failed)


def control(auditor: Auditor) -> list[Control]:
    """The audit of two rules that are wrong on purpose; each must be caught. In mode exact only."""
    if auditor.mode is not Mode.EXACT:
        raise ValueError(f"the wrong rules take the place of mode exact's, not of {auditor.mode.value}'s")
    found = []
    for rule in (raw_resample(), membership()):
        wrong = dataclasses.replace(auditor, rule=rule, budget=auditor.budget / 2)
        wrong._texts = auditor._texts  # the target's own: no rule has a part in them
        found.append(Control(rule.name, wrong.run(CONTROL_CHECKS)))
    return found
