"""Small result files made by hand: a bench's, a run's, an overlap's, without any model."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "specgen": "0.2.0",
    "python": "3.12.1",
    "packages": {"torch": "2.13.0", "transformers": "5.24.0"},
    "platform": "Linux",
    "processor": "a processor",
    "cpu_count": 8,
    "load_average": [0.25, 0.2, 0.1],
    "git": {"commit": "c0ffee", "dirty": False},
    "threads": 2,
}
SAMPLING = {
    "mode": "exact",
    "k": 4,
    "max_new_tokens": 10,
    "seed": 0,
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "lenience": 0.5,
    "typical_epsilon": 0.3,
    "typical_delta": 0.09,
    "sources": {},
    "end_tokens": [2],
    "stop": [],
}
CHECKPOINTS = {
    "target": {"path": "/there/target", "checkpoint": "org/target", "kind": "hub", "revision": "abc"},
    "draft": {"path": "/there/draft", "checkpoint": "org/draft", "kind": "hub", "revision": "def"},
}

Times = Mapping[tuple[int, ...], Sequence[float]]  # seconds per token in each run, by the prompts of a group


def arm(
    name: str, k: int, *, profile: str = "pair", engine: str = "eager", batch: int = 1, baseline: str = "plain"
) -> dict[str, Any]:
    kind = "speculative" if k else "plain"
    return {
        "name": name,
        "kind": kind,
        "profile": profile,
        "k": k,
        "engine": engine,
        "batch": batch,
        "mode": "exact",
        "baseline": name if k == 0 else baseline,
    }


def measurement(name: str, k: int, group: int, prompts: Sequence[int], run: int, per_token: float) -> dict[str, Any]:
    """Two rounds a row that commit k+1 and 2 tokens (all accepted, then one of two tested), or two plain steps."""
    first = k + 1
    committed = [first, 2] if k else [1, 1]
    seconds = per_token * sum(committed) * len(prompts)
    row = {
        "seed": 0,
        "tokens": [5] * sum(committed),
        "finish": "length",
        "drafted": [k, k],
        "committed": committed,
        "tested": [k, 2] if k else [0, 0],
        "accepted": [k, 1] if k else [0, 0],
        "overlaps": [0.5] * (k + 2) if k else [],
    }
    return {
        "arm": name,
        "group": group,
        "run": run,
        "order": 0,
        "prefill_s": 9.0,
        "first_s": 9.5,
        "load": 0.1,
        "steps": {
            "draft_s": [0.0, 0.0],
            "verify_s": [seconds / 4, seconds / 2],
            "rollback_s": [0.0, 0.0],
            "total_s": [seconds / 4, 3 * seconds / 4],
            "width": [k + 1, k + 1],
            "rows": [len(prompts)] * 2,
        },
        "rows": [{"prompt": p, **row} for p in prompts],
    }


def bench(
    arms: Sequence[tuple[dict[str, Any], Times]],
    *,
    prompts: Sequence[Sequence[int]] = ((1, 2), (3, 4), (5, 6)),
    **changes: Any,
) -> dict[str, Any]:
    """A bench's document. A warm-up of each group, a thousand times slower, must enter nothing."""
    measurements = []
    for settings, times in arms:
        for at, (group, runs) in enumerate(times.items()):
            for run, seconds in enumerate([1000 * runs[0], *runs], -1):
                measurements.append(measurement(settings["name"], settings["k"], at, group, run, seconds))
    document = {
        "schema_version": 2,
        "kind": "bench",
        "created": "2025-01-01T00:00:00+00:00",
        "sampling": SAMPLING,
        "profiles": {settings["profile"]: {"draft": {"kind": "checkpoint"}} for settings, _ in arms},
        "checkpoints": CHECKPOINTS,
        "dtype": "float32",
        "device": "cpu",
        "environment": ENVIRONMENT,
        "environment_after": ENVIRONMENT,
        "design": {
            "k": [4],
            "auto": False,
            "candidates": [4],
            "runs": 3,
            "runs_done": 3,
            "warmup": 1,
            "max_new_tokens": 10,
            "budget_s": None,
            "order_seed": 0,
        },
        "prompts": [
            {"name": f"p{i}", "category": None, "text": f"text {tokens}", "tokens": list(tokens)}
            for i, tokens in enumerate(prompts)
        ],
        "arms": [settings for settings, _ in arms],
        "measurements": measurements,
        "costs": [],
        "scores": [],
        "divergences": [],
    }
    return copy.deepcopy({**document, **changes})


def scored_bench(
    scores: Mapping[str, Sequence[Sequence[float | None]]],
    *,
    costs: Sequence[dict[str, Any]] = (),
    limit: int = 10,
    mode: str = "exact",
) -> dict[str, Any]:
    """A bench's document with these ratios by profile, a prompt each; measured is plain decoding alone, too short to
    price a call and with nothing beside its calls. candidates: every k of the probes."""
    engines = list(dict.fromkeys(c["engine"] for c in costs)) or ["eager"]
    plain = [arm("plain" if e == engines[0] else f"plain {e}", 0, profile="one", engine=e) for e in engines]
    prompts = [(i, i + 1) for i in range(max(map(len, scores.values()), default=1))]
    times: Times = {(p,): [1.0] for p in range(len(prompts))}
    document = bench([(x, times) for x in plain], prompts=prompts, sampling={**SAMPLING, "mode": mode})
    for m in document["measurements"]:
        m["steps"]["total_s"] = m["steps"]["verify_s"]
    most = max((int(w) for c in costs for w in c["target_s"]), default=5)
    document["design"] |= {"max_new_tokens": limit, "candidates": list(range(1, max(2, most)))}
    document["profiles"] |= {profile: {} for profile in scores}
    document["costs"] = list(costs)
    document["scores"] = [
        {"profile": profile, "prompt": i, "run": 0, "ratios": list(ratios)}
        for profile, texts in scores.items()
        for i, ratios in enumerate(texts)
    ]
    return document


def probe(
    profile: str, target_s: Mapping[int, float], draft_s: float | None, engine: str = "eager"
) -> dict[str, Any]:
    return {
        "profile": profile,
        "engine": engine,
        "context": 64,
        "draft_s": draft_s,
        "target_s": {str(w): s for w, s in target_s.items()},
        "target_bytes": 8,
        "target_bytes_a_token": 1,
        "draft_bytes": 2,
        "draft_bytes_a_token": 1,
        "copy_bandwidth": 1e9,
    }


def run(*texts: Sequence[float | None], cs: Sequence[float] = (), limit: int = 10, **changes: Any) -> dict[str, Any]:
    """A run's document with these ratios, a prompt each."""
    results = [
        {
            "name": f"p{i}",
            "prompt": f"prompt {i}",
            "tokens": [],
            "rounds": [],
            "plain": False,
            "finish": "length",
            "cost": {"c": cs[i], "draft_s": cs[i], "target_s": 1.0} if i < len(cs) else None,
            "check": {
                "positions": len(ratios),
                "rows": [],
                "reason": None,
                "ratios": list(ratios),
                "passed": True,
                "verdict": f"no fault seen in {len(ratios)} positions",
            },
        }
        for i, ratios in enumerate(texts)
    ]
    document = {
        "schema_version": 2,
        "kind": "run",
        "profile": {"name": "pair"},
        "sampling": {**SAMPLING, "max_new_tokens": limit},
        "checkpoints": CHECKPOINTS,
        "dtype": "float32",
        "device": "cpu",
        "environment": ENVIRONMENT,
        "results": results,
    }
    return copy.deepcopy({**document, **changes})


def overlap(
    *texts: Sequence[float | None], own: int | None = None, c: float = 0.1, verify: Sequence[float] = (1.0,) * 17
) -> dict[str, Any]:
    """An overlap's document with these ratios, a text each; of what simulations do not read, nothing."""

    def scores(n: int) -> dict[str, Any]:
        return {"tokens": n, "proposed": n, "greedy_agreement": None, "temperatures": [], "predictions": []}

    def columns(ratios: Sequence[float | None]) -> dict[str, Any]:
        n = len(ratios)
        return {"token": [5] * n, "target_log_prob": [-1.0] * n, "ratio": list(ratios), "overlap": list(ratios)}

    return {
        "schema_version": 1,
        "kind": "overlap",
        "profile": {"name": "pair"},
        "sampling": SAMPLING,
        "temperature": 1.0,
        "checkpoints": CHECKPOINTS,
        "dtype": "float32",
        "device": "cpu",
        "environment": ENVIRONMENT,
        "own": own,
        "costs": {"from": "given", "c": c, "verify": list(verify), "draft_s": None, "target_s": None},
        "notes": [],
        "results": [
            {"name": f"t{i}", **scores(len(r)), "windows": 1, "impossible": 0, "positions": columns(r)}
            for i, r in enumerate(texts)
        ],
        "overall": {**scores(sum(map(len, texts))), "kinds": [], "worst_tokens": []},
    }


def write(folder: Path, document: Any, name: str = "result.json") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path
