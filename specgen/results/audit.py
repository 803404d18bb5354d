"""What `specgen audit --json` writes: a finding a check, of the pair's rule or of rules wrong on purpose."""

from __future__ import annotations

from typing import Literal

from specgen.results.document import Head
from specgen.results.fields import Count, Free, Number, Record, Size


class Finding(Record):
    """One check's row. value: what bound bounds, null where there is no one number. meaning: what a failure would
    mean."""

    name: str
    status: str
    measured: str
    bound: str
    value: Number
    positions: Count
    notes: list[str]
    meaning: str


class Findings(Record):
    """All of one rule's. failed, no_time: names of checks."""

    passed: bool
    verdict: str
    failed: list[str]
    no_time: list[str]
    findings: list[Finding]


class Control(Findings):
    """Of a rule that is wrong on purpose. caught: whether a check failed."""

    rule: str
    caught: bool


class _Audited(Head):
    """prompts: their texts. seeds: how many each pooled check used. budget_s: null for no end. batch_size: prompts
    that decoded together. engine: the one that was audited."""

    kind: Literal["audit"]
    profile: Free
    promise: str
    prompts: list[str]
    seeds: Size
    budget_s: Number
    batch_size: Size = 1
    engine: str | None = None


class Audit(_Audited, Findings):
    """The file of an audit of the pair's own rule."""


class ControlAudit(_Audited):
    """The file of `specgen audit --control`. passed: all wrong rules were caught."""

    control: list[Control]
    passed: bool
