"""What an audit says: its checks, a finding a check, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
WEIGHTS = {
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
