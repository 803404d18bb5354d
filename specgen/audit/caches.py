"""Check `caches`: what a model remembers of the text after a roll-back, against a pass without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgen.audit.subject import SHORT, Subject, Watched, Work
from specgen.audit.watching import largest_difference
from specgen.drafting.drafter import Drafter
from specgen.models.protocol import LanguageModel
from specgen.sampling.randomness import Uniforms


class CacheProbe:
    """After each round of a row one more call of either side, with its cache; in the end all of them from scratch."""

    def __init__(self, target: LanguageModel, drafter: Drafter, uniforms: Uniforms) -> None:
        self.models = {"target": target} | ({} if drafter.model is None else {"draft": drafter.model})
        self.drafter, self.uniforms = drafter, uniforms
        self.rows: dict[str, list[tuple[int, Tensor]]] = {role: [] for role in self.models}
        self.worst = dict.fromkeys(self.models, 0.0)
        self.flips = self.calls = 0
        self.faults: list[str] = []

    def after_round(self, watched: Watched, place: int) -> None:
        """place: where the row stands among those still decoding."""
        text = watched.text
        for role, cached, logits in watched.executor.peek(place, text):
            if logits is None:
                self.faults.append(f"{role}: {cached} tokens cached of a text of {len(text)}; it may keep one less")
            else:
                self.rows[role].append((len(text), logits))
        drafter = watched.executor.drafter_of(place)
        if "draft" not in self.models and drafter is not None:
            self._compare_proposal(drafter, text)

    def _compare_proposal(self, drafter: Drafter, text: Sequence[int]) -> None:
        """A drafter without a model: its next proposal against one made from scratch."""
        cached = drafter.cached
        proposal = drafter.propose(text, 1, 0, self.uniforms)
        drafter.rollback(drafter.cached - cached)
        _, (fresh,) = next(iter(drafter.score([*text, text[-1]], len(text))))
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
                        difference = largest_difference(used, fresh)
                        if not difference <= self.worst[role]:
                            self.worst[role] = difference
                        self.flips += int(used.argmax() != fresh.argmax())
                        self.calls += 1


def check(subject: Subject) -> Work:
    worst, flips, calls, notes = {"target": 0.0}, 0, 0, []
    length = min(SHORT, subject.sampling.max_new_tokens)
    groups, left_out = subject.groups(subject.prompts_and_seeds()), 0
    for i, group in enumerate(groups):
        if i and not (yield):
            left_out = len(groups) - i
            break
        probes = [
            CacheProbe(subject.pair.target, subject.drafter, subject.source(seed, prompt)) for prompt, seed in group
        ]
        texts = [list(prompt) for prompt, _ in group]
        live = list(range(len(group)))
        step: list[Watched] = []
        for watched in subject.generate(group, length=length):
            step.append(watched)
            texts[watched.number] = watched.text
            if len(step) < len(live):
                continue
            # Once a step's rows are all committed: those that have ended left the caches.
            live = [w.number for w in step if w.round.finish is None]
            for w in step:
                if w.number in live or len(group) == 1:
                    probes[w.number].after_round(w, live.index(w.number) if w.number in live else 0)
            step = []
            if any(probe.faults for probe in probes):
                break  # what a loop does with caches that are too long is anybody's guess
        for probe, text in zip(probes, texts, strict=True):
            probe.judge(text)
            flips, calls = flips + probe.flips, calls + probe.calls
            notes += probe.faults
            for role, value in probe.worst.items():
                if not value <= worst.get(role, 0.0):  # also a NaN, which max() would pass over
                    worst[role] = value
    largest = max(worst.values())
    shown = ", ".join(f"{role} {value:.2g}" for role, value in worst.items())
    measured = f"largest difference of logits: {shown}; {flips} argmax flips"
    passed = all(value <= subject.bound for value in worst.values()) and not notes
    bound = f"{subject.bound:g}"
    return subject.finding("caches", passed, measured, bound, largest, calls, notes[:3], left_out=left_out)
