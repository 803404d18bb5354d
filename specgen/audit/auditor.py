"""The audit: do a pair, its rule and its machine keep the target's distribution? Eight checks that can fail.

Every check compares what the generating loop used or wrote with something it had no hand in: the rule's law, plain
decoding's distribution with the same prefix, logits without a cache, plain decoding's text. A pass is "no fault seen
in n positions", never a certificate. A check for which the budget leaves no time says so and has not passed.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgen.audit.caches import CacheProbe, worst_row
from specgen.audit.findings import CHECKS, WEIGHTS, AuditResult, Finding, Status
from specgen.audit.law import LAW_BOUND, SAME_BOUND, Distance, PlainRows
from specgen.audit.sampler import Sampler
from specgen.audit.subject import CONTINUED, SHORT
from specgen.audit.texts import INVARIANCE_K, Divergence, bits_of
from specgen.audit.watching import (
    LastCall,
    LastProbs,
    LastProposal,
    Memoised,
    at_least_float32,
    plain_chain,
    short_name,
    widened,
)
from specgen.decoding.eager import autoregressive, speculative, start
from specgen.decoding.pair import Pair
from specgen.decoding.self_check import DRIFT_BOUND, SelfCheck, drift_bound, edge_fraction
from specgen.drafting.drafter import Drafter
from specgen.drafting.ngram import NgramDrafter
from specgen.models.protocol import LanguageModel
from specgen.rounds.record import Round, ends_at
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, SharedNoise, Uniforms, prompt_digest
from specgen.settings import Mode
from specgen.verification.law import law, total_variation
from specgen.verification.rules import Rule, rule_for

RUN_LEVEL = 1e-3  # of the run's check of itself: seven z statistics, each 6e-5 where it is nearly normal


Loop = Callable[..., Iterator[Round]]


UniformsOf = Callable[[int, int], Uniforms]  # (seed, digest of the prompt)


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
        self.processors = plain_chain(self.pair.processors)
        self.bound = DRIFT_BOUND.get(self.pair.dtype, DRIFT_BOUND[torch.bfloat16])
        self.left_out = 0
        self._texts: dict[int, list[int]] = {}

    def run(self, checks: Sequence[str] = CHECKS) -> AuditResult:
        """The checks of those names, in the time there is."""
        self.pair.hold.take(self)  # a generation that was going on finds that the caches hold another text
        end = self.clock() + self.budget
        found: dict[str, Finding] = {}
        due = []
        for name in WEIGHTS:
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
            share = WEIGHTS[name] / sum(WEIGHTS[n] for n in due[i:])
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
        self,
        prompt: Sequence[int],
        seed: int,
        *,
        target: LanguageModel | None = None,
        drafter: Drafter | None = None,
        processors: Processors | None = None,
        k: int | None = None,
        length: int | None = None,
        uniforms: Uniforms | None = None,
    ) -> Iterator[Round]:
        """A run of the audited loop from the prompt on."""
        target, drafter = target or self.pair.target, drafter or self.drafter
        start(target, drafter, prompt)
        return self.loop(
            target,
            drafter,
            processors or self.pair.processors,
            prompt,
            k=k or self.sampling.k,
            max_new_tokens=length or self.sampling.max_new_tokens,
            uniforms=uniforms or self._source(seed, prompt),
            ended=ends_at(self.sampling.end_tokens),
            rule=self.rule,
            clock=self.pair.clock,
        )

    def _plain_rounds(
        self, prompt: Sequence[int], seed: int, *, target: LanguageModel | None = None, length: int | None = None
    ) -> Iterator[Round]:
        target = target or self.pair.target
        source = SharedNoise if self.mode is Mode.COUPLED else KeyedUniforms
        start(target, None, prompt)
        return autoregressive(
            target,
            self.processors,
            prompt,
            max_new_tokens=length or self.sampling.max_new_tokens,
            uniforms=source(seed, prompt_digest(prompt)),
            ended=ends_at(self.sampling.end_tokens),
            clock=self.pair.clock,
        )

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
        self,
        name: str,
        passed: bool,
        measured: str,
        bound: str,
        value: float | None,
        positions: int,
        notes: Sequence[str] = (),
        unit: str = "prompts × seeds",
    ) -> Finding:
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
            first, second = ([bits_of(r) for r in self._rounds(prompt, seed, length=length)] for _ in range(2))
            positions += sum(len(bits[0]) for bits in first)
            if first != second:
                differing.append(f"seed {seed}, prompt {list(prompt)[:8]}…: two runs differ")
        return self._finding(
            "seeds",
            not differing,
            f"{len(differing)} runs differ when repeated",
            "0, bit for bit",
            float(len(differing)),
            positions,
            differing,
        )

    def check_processors(self, deadline: float) -> Finding:
        target, drafter = Memoised(self.pair.target), self._memoised_drafter()
        rows = PlainRows(target, drafter, self.processors)
        watched, probs = LastProposal(drafter), LastProbs(self.pair.processors)
        kinds = [("all", self.pair.processors, self.processors)]
        for processor in self.pair.processors.chain:
            alone = copy.copy(self.pair.processors)
            alone.chain, alone.greedy = (processor,), False  # the argmax would hide most of what differs
            kinds.append((short_name(processor), alone, Processors((processor,))))
        found = {name: Distance() for name in ["all", "draft", *(name for name, _, _ in kinds[1:])]}
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
            for name, d in found.items()
            if not d.passed
        ]
        measured = f"largest total variation {worst:.2g} over {', '.join(n for n, d in found.items() if d.rows)}"
        return self._finding("processors", not bad, measured, f"{SAME_BOUND:g}", worst, found["all"].rows, notes)

    def _memoised_drafter(self) -> Drafter:
        model = self.drafter.model
        return self.drafter if model is None else self.drafter.over(Memoised(model))

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
                        target_probs = widened(row)
                        out = law(self.rule, target_probs, widened(draft.to(row)).to(target_probs))
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
            probe = CacheProbe(self.pair.target, self.drafter, self._source(seed, prompt))
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
        return self._finding(
            "caches", largest <= self.bound and not notes, measured, f"{self.bound:g}", largest, calls, notes[:3]
        )

    def check_greedy(self, deadline: float) -> Finding:
        drafts = [("draft", self.drafter)]
        return self._same_texts("greedy", deadline, [(name, d, self.sampling.k) for name, d in drafts], [0])

    def check_invariance(self, deadline: float) -> Finding:
        ngram = NgramDrafter(self.pair.target.vocabulary, device=self.pair.target.device)
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
        return self._finding(
            name,
            not bugs,
            measured,
            "0, ties aside",
            float(len(bugs)),
            positions,
            [*bugs[:3], *ties[:3]],
            unit="texts",
        )

    def _compare(
        self, prompt: Sequence[int], seed: int, plain: list[int], drafter: Drafter, k: int
    ) -> tuple[int, Divergence | None]:
        """How many tokens are the same, and what became of the first other one."""
        watched = LastCall(self.pair.target)
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
        watched = LastCall(self.pair.target)
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
            return self.processors.scores(at_least_float32(logits)[None], prefix)[0].double()
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
        return self._finding(
            "run",
            result.passed,
            f"{worst_row(result)} over {runs} texts",
            f"|z| 4; drift {check.tolerance:g}; impossible events 0",
            None,
            result.positions,
            notes,
        )

    def check_sampler(self, deadline: float) -> Finding:
        sampler = Sampler(self, Memoised(self.pair.target), self._memoised_drafter())
        boundary = 0 if self.mode is Mode.COUPLED else self.rounds // 4
        began = self.clock()
        third = min(deadline, began + (deadline - began) / 3)
        for n in self._units(third, range(boundary)):
            sampler.round(n, boundary=True)
        for n in self._units(deadline, range(self.rounds)):
            sampler.round(n)
        return sampler.finding()
