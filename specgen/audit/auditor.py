"""The audit: do a pair, its rule and its machine keep the target's distribution? Eight checks that can fail.

Every check compares what the generating loop used or wrote with something it had no hand in: the rule's law, plain
decoding's distribution with the same prefix, logits without a cache, plain decoding's text. A pass is "no fault seen
in n positions", never a certificate. A check for which the budget leaves no time says so and has not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specgen.audit import caches, itself, law, processors, sampler, texts
from specgen.audit.findings import CHECKS, WEIGHTS, AuditResult, Finding, Status
from specgen.audit.subject import Subject, Work
from specgen.settings import Mode

# By name: a check at work on a subject.
CHECKED_BY: dict[str, Callable[[Subject], Work]] = {
    "law": law.check,
    "sampler": sampler.check,
    "run": itself.check,
    "caches": caches.check,
    "processors": processors.check,
    "greedy": texts.check_greedy,
    "invariance": texts.check_invariance,
    "seeds": texts.check_seeds,
}


class Auditor(Subject):
    """Audits a pair. `run()` gives the findings."""

    def run(self, checks: Sequence[str] = CHECKS) -> AuditResult:
        """The checks of those names, in the time there is: what tells most for its time first, and a first unit of
        every check's work before any does a second; then each by the weight of what it tells."""
        self.pair.hold.take(self)  # a generation that was going on finds that the caches hold another text
        end = self.clock() + self.budget
        found: dict[str, Finding] = {}
        at_work: dict[str, Work] = {}
        spent: dict[str, float] = {}
        for name in WEIGHTS:
            if name not in checks:
                continue
            if reason := not_applicable(name, self.mode):
                found[name] = Finding(name, Status.NOT_APPLICABLE, reason)
            elif self.clock() >= end:
                found[name] = Finding(name, Status.NO_TIME, "no time within the budget; not checked")
            else:
                at_work[name], spent[name] = CHECKED_BY[name](self), 0.0
                self._advance(name, at_work, spent, found)
        while at_work:
            name = min(at_work, key=lambda n: spent[n] / WEIGHTS[n])
            self._advance(name, at_work, spent, found, time_left=self.clock() < end)
        return AuditResult(tuple(found[name] for name in CHECKS if name in found))

    def _advance(
        self,
        name: str,
        at_work: dict[str, Work],
        spent: dict[str, float],
        found: dict[str, Finding],
        *,
        time_left: bool | None = None,
    ) -> None:
        """Another unit of a check's work, or its finding. time_left: None begins it."""
        self.progress(name)
        began = self.clock()
        try:
            at_work[name].send(time_left)  # type: ignore[arg-type]  # a generator begins with None
        except StopIteration as done:
            found[name] = done.value
            del at_work[name]
        spent[name] += self.clock() - began


def not_applicable(name: str, mode: Mode) -> str:
    """Why a check says nothing of this mode; empty where it applies."""
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
