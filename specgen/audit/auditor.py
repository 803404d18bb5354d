"""The audit: do a pair, its rule and its machine keep the target's distribution? Eight checks that can fail.

Every check compares what the generating loop used or wrote with something it had no hand in: the rule's law, plain
decoding's distribution with the same prefix, logits without a cache, plain decoding's text. A pass is "no fault seen
in n positions", never a certificate. A check for which the budget leaves no time says so and has not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specgen.audit import caches, itself, law, processors, sampler, texts
from specgen.audit.findings import CHECKS, WEIGHTS, AuditResult, Finding, Status
from specgen.audit.subject import Subject
from specgen.settings import Mode

# By name: a check of a subject within a deadline.
CHECKED_BY: dict[str, Callable[[Subject, float], Finding]] = {
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
        """The checks of those names, in the time there is: what tells most for its time first, and to each at least
        one unit of its work before any gets a second share."""
        self.pair.hold.take(self)  # a generation that was going on finds that the caches hold another text
        end = self.clock() + self.budget
        found: dict[str, Finding] = {}
        due = []
        for name in WEIGHTS:
            if name in checks:
                reason = not_applicable(name, self.mode)
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
            found[name] = CHECKED_BY[name](self, now + share * (end - now))
        return AuditResult(tuple(found[name] for name in CHECKS if name in found))


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
