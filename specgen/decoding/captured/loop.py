"""The captured loop: a round is a few CUDA graphs replayed one after another, and one read by the host.

Everything that a round needs is a tensor on the device: the text's length, the tokens to feed, the key words of the
uniforms, the drafted tokens with their distributions. Caches are written in place, at slots computed there too. What
a round did comes back as one row of numbers. Without CUDA the very same step functions are called instead of
replayed: that is how the tests prove them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specgen.decoding.captured.capture import Capture, Captured, Step
from specgen.decoding.loop import Seen
from specgen.decoding.settle import recorded, until_the_end
from specgen.drafting.checkpoint import within
from specgen.drafting.drafter import Drafter, Row
from specgen.errors import CaptureError, RunError
from specgen.models.static import AHEAD, StaticCache, first_line, tier
from specgen.rounds.record import Round
from specgen.sampling.device import DeviceNoise, DeviceUniforms, on_device
from specgen.sampling.processors import Processors, fault_error, faults
from specgen.sampling.randomness import KeyedUniforms, Stream, draw
from specgen.settings import Mode, Sampling
from specgen.verification.judge import describe, verify
from specgen.verification.rules import Rule, rule_for


class GraphLoop:
    """Speculative generation, or plain decoding where there is neither draft nor drafter, of one text after another.

    draft: a model, whose steps are captured too. drafter: one that proposes on the host instead, such as n-grams.

    An `Executor` of one row. Usage: `prepare`, `start`, `begin`, then `loop.steps`. The numbers that a round leaves,
    one row of float64, are named in `_names`.
    """

    def __init__(
        self,
        target: StaticCache,
        draft: StaticCache | None,
        processors: Processors,
        sampling: Sampling,
        capture: Capture,
        drafter: Drafter | None = None,
    ) -> None:
        self.target, self.draft, self.drafter = target, draft, drafter
        self.chain, self.greedy = on_device(processors), processors.greedy
        self.processors = processors  # kept alive: loops are told apart by it
        self.drafts = draft is not None or drafter is not None
        self.k = sampling.k if self.drafts else 0
        self.rule: Rule = rule_for(sampling)
        self.capture = capture
        self.coupled = sampling.mode is Mode.COUPLED
        device = target.model.device
        self.uniforms: Any = (DeviceNoise if self.coupled else DeviceUniforms)(device)
        self._steps: dict[tuple[str, int], Captured] = {}
        self._versions: tuple[int, ...] = ()
        self._failed: CaptureError | None = None
        self._extent = self._drafting = self._known = 0
        self._last: list[int] = []
        self._allocate(device)

    @torch.inference_mode()
    def _allocate(self, device: torch.device) -> None:
        whole = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        k, vocabulary = self.k, self.target.model.vocabulary
        self.n = whole(1)  # committed tokens, the prompt's among them
        self.limit = whole(1)  # the most there may be
        self.offered = torch.full((1,), k, device=device)  # drafted tokens, where there is room for them
        self.round = whole(1)
        self.spread = torch.ones(1, dtype=torch.float64, device=device)  # what acceptance draws are multiplied by
        self.tail = whole(2)  # the last two committed tokens
        self.drafted = whole(k)
        self.j = whole(1)  # which of them was drafted last
        self.ahead = torch.arange(k + 1, device=device)
        self.bad_draft = torch.zeros(k, dtype=torch.uint8, device=device)
        self.logits = torch.zeros(k + 1, vocabulary, dtype=self.target.dtype, device=device)
        draft_dtype = self.draft.dtype if self.draft is not None else self.target.dtype
        wide = torch.float64 if draft_dtype == torch.float64 else torch.float32
        self.draft_probs = torch.zeros(0 if self.greedy else k, vocabulary, dtype=wide, device=device)
        self._names = self._layout()
        self.out = torch.zeros(sum(self._names.values()), dtype=torch.float64, device=device)
        self._moving = (self.n, self.round, self.tail, self.drafted, self.j, self.draft_probs, self.bad_draft)

    def _layout(self) -> dict[str, int]:
        """What a round leaves, and how many numbers each is."""
        k = self.k
        names = {
            "accepted": 1,
            "next": 1,
            "drafted": k,
            "bad_draft": k,
            "bad_target": k + 1,
            "log_prob": k + 1,
            "entropy": k + 1,
            "support": k + 1,
            "overlap": k,
            "impossible": 2,
        }
        if self.k and self.rule.name not in (Mode.EXACT, Mode.GREEDY):
            names["expected"] = k
            if not self.rule.by_match:
                names["biases"] = k
        return names

    # ----------------------------------------------------------------------------- steps: no host read in any of them

    def _scores(self, logits: Tensor) -> Tensor:
        """Processed logits [n, V], in float32 (float64 stays)."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        for processor in self.chain:
            scores = processor(None, scores)
        return scores

    def _first_draft_step(self, extent: int) -> None:
        """Feeds the last two tokens: the one before the last is known already unless everything was accepted."""
        self.j.zero_()
        # A text of one token feeds it twice, to one slot.
        self._draft_step(self.tail, (self.n - 2 + self._arange(2)).clamp(min=0), extent)

    def _next_draft_step(self, extent: int) -> None:
        token = self.drafted.index_select(0, self.j)
        self.j += 1
        self._draft_step(token, self.n - 1 + self.j, extent)

    def _draft_step(self, tokens: Tensor, slots: Tensor, extent: int) -> None:
        assert self.draft is not None
        logits = self.draft.forward(tokens, slots, 1, extent)
        scores = self._scores(logits)
        self.bad_draft.index_copy_(0, self.j, faults(logits, scores))
        if self.greedy:
            token = scores.argmax(-1)
        else:
            probs = scores.softmax(-1)
            token = self._draw(probs[0], Stream.DRAFT, self.n + self.j, self.round)
            self.draft_probs.index_copy_(0, self.j, probs)
        self.drafted.index_copy_(0, self.j, token.view(1))

    def _arange(self, n: int) -> Tensor:
        return self.ahead[:n] if n <= len(self.ahead) else torch.arange(n, device=self.ahead.device)

    def _draw(self, weights: Tensor, stream: Any, position: Any, round_index: Any) -> Tensor:
        return draw(weights, stream, position, round_index, self.uniforms)

    def _room(self) -> Tensor:
        """How many tokens are drafted this round [1]: what was offered, and fewer at the text's end."""
        return torch.minimum(self.limit - self.n - 1, self.offered)

    def _target_step(self, width: int, extent: int) -> None:
        """The last token and width − 1 drafted ones. Those behind what was drafted this round are fed for nothing:
        one width serves the text's end too."""
        ahead = self._arange(width)
        slots = self.n - 1 + ahead
        # No position beyond the text's limit, for which a model may have no embedding.
        positions = torch.minimum(slots, self.n - 1 + self._room())
        tokens = torch.cat([self.tail[1:], self.drafted[: width - 1]])
        self.logits[:width] = self.target.forward(tokens, slots, width, extent, positions)

    def _judge_step(self) -> None:
        """The rule on every drafted token at once, the token that follows, and what the host is told."""
        k, scores = self.k, self._scores(self.logits)
        target_probs = scores if self.greedy else scores.softmax(-1)
        draft_probs = target_probs[:k] if self.greedy else self.draft_probs.to(target_probs)  # greedy looks at none
        verdict = verify(self.rule, target_probs, draft_probs, self.drafted, self, self._room())
        written = torch.where(self.ahead < verdict.accepted, torch.cat([self.drafted, verdict.token]), verdict.token)
        told = describe(self.rule, target_probs, draft_probs, written, self.drafted)
        told |= {"accepted": verdict.accepted, "next": verdict.token, "impossible": verdict.impossible}
        told |= {"drafted": self.drafted, "bad_draft": self.bad_draft}
        told["bad_target"] = faults(self.logits, scores)
        self.out.copy_(torch.cat([told[name].reshape(-1).double() for name in self._names]))
        self._commit(verdict.accepted, verdict.token)

    # The judge's draws, with every key word on the device.

    def kept(self, a: Tensor) -> Tensor:
        return self.uniforms(Stream.ACCEPT, self.n + self.ahead[: self.k], self.round, a) * self.spread < a

    def own(self, target_probs: Tensor, drafted: Tensor) -> Tensor:
        rows = enumerate(target_probs)
        return torch.stack([self._draw(row, Stream.CORRECTION, self.n + j, self.round) for j, row in rows])

    def following(self, weights: Tensor, at: Tensor, rejected: Tensor) -> Tensor:
        if not self.drafts:
            return self._draw(weights, Stream.PLAIN, self.n, torch.zeros_like(self.round)).view(1)
        stream = self.uniforms.either(rejected, Stream.CORRECTION, Stream.BONUS)
        return self._draw(weights, stream, self.n + at, self.round).view(1)

    def _commit(self, accepted: Tensor, token: Tensor) -> None:
        """The next round's start. Both caches are rolled back by this: what lies behind is hidden by the mask."""
        before = torch.cat([self.tail[1:], self.drafted]).index_select(0, accepted)
        self.tail.copy_(torch.cat([before, token]))
        self.n += accepted + 1
        self.round += 1

    # ----------------------------------------------------------------------------------------------- the host's side

    def _step(self, kind: str, extent: int) -> Step:
        """kind: a name, or how many tokens the target is called with."""
        if kind == "judge":
            return self._judge_step
        draft = {"first": self._first_draft_step, "next": self._next_draft_step}
        if kind in draft:
            return functools.partial(draft[kind], extent)
        return functools.partial(self._target_step, int(kind), extent)

    def _kinds(self) -> list[str]:
        """The steps of a round, each once."""
        draft = ["first", "next"][: self.k] if self.draft is not None else []
        return [*draft, str(self.k + 1), "judge"]

    @torch.inference_mode()
    def _ready(self, slots: int, kinds: Sequence[str] = ()) -> int:
        """Buffers and graphs for calls that write up to slot slots − 1; the extent to call with.

        Raises CaptureError.
        """
        extent = tier(slots)
        caches = [c for c in (self.target, self.draft) if c is not None]
        for cache in caches:
            cache.grow(extent)
        versions = tuple(cache.version for cache in caches)
        if versions != self._versions:  # graphs write to addresses that are no longer the cache's
            self._steps, self._versions = {k: s for k, s in self._steps.items() if k[0] == "judge"}, versions
        for kind in kinds or self._kinds():
            key = (kind, 0 if kind == "judge" else extent)
            if key not in self._steps:
                self._steps[key] = self._captured(kind, extent)
        return extent

    def _captured(self, kind: str, extent: int) -> Captured:
        if self._failed is not None:  # it would fail again, after as long a time
            raise self._failed
        kept = [tensor.clone() for tensor in self._moving]

        def undo() -> None:
            for tensor, before in zip(self._moving, kept, strict=True):
                tensor.copy_(before)
            self.j.zero_()  # between rounds it counts all that were drafted: one more has no place

        try:
            undo()
            return self.capture(self._step(kind, extent), undo)
        except (RuntimeError, RunError) as error:
            self._failed = CaptureError(f"a step could not be captured: {first_line(error)}")
            raise self._failed from error

    @torch.inference_mode()
    def _replay(self, kind: str, extent: int) -> None:
        self._steps[kind, 0 if kind == "judge" else extent].replay()

    def _read(self) -> dict[str, list[float]]:
        """What the last round left: the one read of a round, which also waits for it."""
        values = iter(self.out.tolist())
        return {name: [next(values) for _ in range(n)] for name, n in self._names.items()}

    @torch.inference_mode()
    def prepare(self, prompt: int, max_new_tokens: int) -> None:
        """Room and graphs for a prompt of so many tokens, so that neither is made while the text is timed.

        Raises CaptureError.
        """
        self._place([0] * 2, prompt, prompt + max_new_tokens)
        for cache in (self.target, self.draft):
            if cache is not None:
                cache.grow(tier(prompt + min(max_new_tokens, AHEAD) + self.k + 1))
        self._ready(prompt + self.k + 1)

    def _place(self, tail: Sequence[int], n: int, limit: int) -> None:
        """The state of a text of n tokens that ends with these two."""
        with torch.inference_mode():
            self.tail.copy_(torch.tensor(tail))
            self.n.fill_(n)
            self.limit.fill_(limit)

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill: both sides take in all of the one prompt but its last token."""
        (prompt,) = prompts
        if not prompt:
            raise ValueError("the prompt holds no token")
        for cache in (self.target, self.draft):
            if cache is not None:
                cache.model.reset()  # the eager loop's cache, which would only take up memory
                cache.grow(tier(len(prompt)))
                if within(cache.model, len(prompt), 1):
                    cache.prefill(prompt[:-1])
        if self.drafter is not None:
            self.drafter.start(prompt)

    # ---------------------------------------------------------------------------------- the four steps of a round

    def begin(self, rows: Sequence[Row]) -> None:
        """From now on the rounds are that one row's, whose prompt has been taken in."""
        (row,) = rows
        with torch.inference_mode():
            self.round.zero_()
            self.spread.fill_(1.0)
        if isinstance(row.uniforms, KeyedUniforms):
            self.uniforms.take(row.uniforms)
        else:  # a test's own
            self.uniforms = row.uniforms
        self._known = 0
        self.roll_back([row])

    def ready(self, live: Sequence[Row]) -> None:
        (row,) = live
        try:
            self._extent = self._ready(len(row.tokens) + self.k + 1)
        except CaptureError as error:
            raise RunError(f"engine graph: {error}; use --engine eager") from error
        self._drafting = 0

    def propose(self, live: Sequence[Row], most: Sequence[int], index: int) -> None:
        (row,), (room,) = live, most
        if self.drafter is None:
            assert self.draft is not None
            room = within(self.draft.model, len(row.tokens), room)
            with torch.inference_mode():
                self.offered.fill_(room)
            for j in range(room):
                self._replay("next" if j else "first", self._extent)
            self._drafting = room
            return
        proposal = self.drafter.propose(row.tokens, room, index, row.uniforms)
        self._drafting = n = len(proposal.tokens)
        with torch.inference_mode():
            self.offered.fill_(n)
            if n:
                self.drafted[:n] = torch.tensor(proposal.tokens)
                if not self.greedy:
                    self.draft_probs[:n] = proposal.probs

    def score(self, live: Sequence[Row]) -> int:
        self._replay(str(self.k + 1), self._extent)
        return self.k + 1

    def settle(self, live: Sequence[Row], index: int) -> list[Round]:
        (row,) = live
        self._known = 0  # until the device's round is known to be the one that is committed
        self._replay("judge", self._extent)
        told = self._read()
        self._check_finite(told, len(row.tokens))
        accepted, token = int(told["accepted"][0]), int(told["next"][0])
        drafted = self._last = [int(t) for t in told["drafted"][: self._drafting]]
        written, finish = until_the_end([*drafted[:accepted], token], row.ended, row.room)
        if finish is None:
            self._known = len(row.tokens) + len(written)
        plain = not self.drafts
        return [recorded(self.rule, index, drafted, accepted, token, written, finish, told, plain=plain)]

    def roll_back(self, live: Sequence[Row]) -> None:
        """The device rolled itself back by its state; it is told of the text where it went on behind an end, or where
        a round was broken off."""
        (row,) = live
        if self._known != len(row.tokens):
            self._place([*row.tokens[-1:], *row.tokens[-2:]][-2:], len(row.tokens), row.limit)
            self._known = len(row.tokens)
        if self.drafter is not None:
            self.drafter.rollback(max(0, self.drafter.cached - (len(row.tokens) - 1)))

    def keep(self, rows: Sequence[int]) -> None:
        """There is no other row to leave."""

    def seen(self, row: int) -> Seen:
        n = self._drafting
        with torch.inference_mode():
            scores = self._scores(self.logits[: n + 1])
            if self.greedy:
                probs = torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
            else:
                probs = scores.softmax(-1)
            drafted = self._last[:n]
            return Seen(tuple(drafted), self.draft_probs[:n].clone(), self.logits[: n + 1].clone(), probs)

    def peek(self, row: int, text: Sequence[int]) -> Iterator[tuple[str, int, Tensor | None]]:
        """With the calls that the next round will make: what they write to a cache it would write again."""
        extent = self._ready(len(text) + self.k + 1)
        for role, cache, fed in (("target", self.target, 1), ("draft", self.draft, 2)):
            if cache is not None:
                known = max(0, len(text) - fed)
                slots = torch.arange(known, len(text), device=self.n.device)
                tokens = torch.tensor(list(text[known:]), device=self.n.device)
                with torch.inference_mode():
                    yield role, known, cache.forward(tokens, slots, 1, extent)[0]

    def drafter_of(self, row: int) -> Drafter | None:
        return self.drafter

    def at_boundary(self) -> None:
        """For audits: from now on and until the next `begin` every acceptance draw is 0, the lowest that there is."""
        with torch.inference_mode():
            self.spread.zero_()

    def _check_finite(self, told: dict[str, list[float]], position: int) -> None:
        sides = (
            (self.draft, told["bad_draft"], self._drafting),
            (self.target, told["bad_target"], self._drafting + 1),
        )
        for model, bad, rows in sides:
            if model is not None and any(bad[:rows]):
                for cache in (self.target, self.draft):
                    if cache is not None:  # the next text is not to find it there
                        cache.clear()
                first = next(i for i, fault in enumerate(bad) if fault)
                raise fault_error(int(bad[first]), model.model.role, position + first, self.processors)

    # ------------------------------------------------------------------------------------------------- for the probes

    def probes(self, text: Sequence[int], widths: Sequence[int]) -> dict[str, Step]:
        """Calls to be timed behind a text: "draft", a single draft step, and the target on so many tokens by number.

        widths: none above k + 1. Starts the text anew. Raises CaptureError.
        """
        draft = ["next" if self.k > 1 else "first"] if self.draft is not None else []
        kinds = [*draft, *(str(w) for w in widths)]
        n = max(1, len(text) - 1)  # a draft step behind the first is one token further on
        self._place([text[-1]] * 2, n, n + self.k + 1)
        extent = self._ready(n + self.k + 1, kinds)
        self.start([text])

        def call(kind: str) -> None:
            with torch.inference_mode():
                self.j.zero_()
                self._replay(kind, extent)

        return {"draft" if kind in draft else kind: functools.partial(call, kind) for kind in kinds}
