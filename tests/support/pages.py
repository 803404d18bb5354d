"""The documents that pages are made of."""

from __future__ import annotations

from typing import Any

from specgen.results.files import SCHEMA_VERSION
from support.bench_documents import COSTS, Script, document

PAIR = "<i>pair</i>"


HOSTILE = "</script><script>window.hit=1</script><img src=x onerror='window.hit=2'>{{data}}<!--"


SETTINGS = {"mode": "exact", "k": 2, "temperature": 0.7, "stop": [HOSTILE], "end_tokens": [2]}


MACHINE = {"specgen": "0", "processor": "a <b>processor</b>", "threads": 1, "packages": {"torch": "2"}}


WORDS = ["The", " cat", " sat", "\n", " on", " <b>", " mat", HOSTILE]


def bench_document() -> dict[str, Any]:
    """Three arms over seven prompts and two runs; whatever text can be hostile is."""
    scripts = [
        Script("plain", profile=PAIR),
        Script("k = 1", k=1, accepted=(1, 0), profile=PAIR),
        Script("k = 2", k=2, accepted=(2, 0), profile=PAIR),
        Script("k = 4", k=4, accepted=(1, 4, 0), profile=PAIR),
    ]
    bench = document(
        scripts,
        runs=2,
        mode="exact",
        candidates=range(1, 7),
        ratios={PAIR: [0.5, 0.9, 1.0, 0.25] * 3},
        costs=[COSTS.model_copy(update={"profile": PAIR})],
    )
    data = bench.model_dump(mode="json")
    for prompt in data["prompts"]:
        prompt["text"] = HOSTILE
    pieces = {token: WORDS[token % len(WORDS)] for token in range(100, 112)}
    return {
        **data,
        "sampling": SETTINGS,
        "profiles": {PAIR: {"target": HOSTILE}},
        "notes": [HOSTILE],
        "pieces": pieces,
        "environment": {**data["environment"], **MACHINE},
    }


def run_document() -> dict[str, Any]:
    """A run of two rounds: two accepted and a bonus; none accepted and a correction."""

    def committed(token: int, origin: str, overlap: float | None) -> dict[str, Any]:
        return {"token": token, "origin": origin, "log_prob": -1.0, "entropy": 1.0, "support": 9, "overlap": overlap}

    def finished(index: int, accepted: int, tested: int, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "index": index,
            "drafted": 2,
            "tested": tested,
            "accepted": accepted,
            "committed": tokens,
            "overlaps": [0.5] * tested,
            "expected": [],
            "biases": [],
            "impossible": [],
            "draft_s": 0.001,
            "verify_s": 0.02,
            "rollback_s": 0.0005,
            "total_s": 0.024,
            "finish": None,
        }

    rounds = [
        finished(
            0, 2, 2, [committed(0, "accepted", 0.75), committed(1, "accepted", 0.5), committed(7, "bonus", None)]
        ),
        finished(1, 0, 1, [committed(3, "correction", 0.125)]),
    ]
    check = {
        "positions": 4,
        "reason": None,
        "passed": True,
        "verdict": "no fault seen in 4 positions",
        "rows": [
            {"name": "drift", "value": 2e-5, "bound": 0.01, "passed": True, "note": HOSTILE},
            {"name": "acceptance z", "value": None, "bound": 4.0, "passed": None, "note": "too little"},
        ],
    }
    result = {
        "name": "<p.txt>",
        "prompt": HOSTILE,
        "text": "",
        "finish": "length",
        "prompt_tokens": [1],
        "tokens": [0, 1, 7, 3],
        "pieces": [WORDS[n] for n in (0, 1, 7, 3)],
        "plain": False,
        "promise": "",
        "prefill_s": 0.1,
        "statistics": {},
        "cost": None,
        "check": check,
        "rounds": rounds,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "run",
        "profile": {"name": "a & b"},
        "sampling": SETTINGS,
        "checkpoints": {},
        "dtype": "float32",
        "device": "cpu",
        "environment": MACHINE,
        "results": [result],
    }
