"""The engine, measured: specgen beside transformers, its rounds taken apart, and the issue's goals beside the found.

    python tests/benchmarks/engine.py --pairs smollm2,stretched,tiny --k 4 --json engine.json

speed: plain and speculative decoding against transformers' `generate` and its assisted generation (prompt lookup
where the draft is): same weights, k, prompts and lengths; then where specgen's rounds go, and its measured against
its predicted speedup. calls: what a target call on 1, 2, … 17 tokens costs under specgen's engine and eagerly, and a
single-token call's bytes against the machine's copy bandwidth. context: a round behind a long text against one behind
a short one. equality: the same texts under the engine and eagerly? startup: seconds of the command itself.

Every arm generates exactly --tokens tokens: end tokens end nothing, and both sides ban them. A time of `speed` is
that of the whole generation, prefill included; for plain decoding also that behind the first token. All arms of all
prompts come in a random order drawn from --seed, anew in each run. A ratio is transformers' time over specgen's:
above 1, specgen is faster. Of the runs of one prompt the median counts; of the prompts' ratios the median is printed,
with the smallest and the largest.

Nothing here is asserted: run it on a machine that does nothing else. It needs torch, transformers and numpy; SmolLM2
needs all of specgen.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch is imported, which reads it once
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from contests import BUILDERS, DECODINGS, PROMPTS, SMALL, TEMPERATURE, Contest, both_sides, random_llama

from specgen.decoding.generation import Generation
from specgen.decoding.pair import Pair
from specgen.drafting.checkpoint import ModelDrafter
from specgen.machine import environment
from specgen.machine.clocks import clock_for
from specgen.models.causal import CausalLM
from specgen.models.engines import ENGINES, prepare
from specgen.models.protocol import prefill
from specgen.models.traffic import cache_bytes, call_bytes
from specgen.overlap.score import score_text
from specgen.rounds.costs import CallCosts, predicted_speedup
from specgen.rounds.expected import pooled
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms, prompt_digest
from specgen.settings import Mode, Sampling
from support.tiny import noisy_copy, tiny_llama

SCHEMA_VERSION = 2
BUSY = 0.5  # load average per core above which a table is no evidence
SECTIONS = ("context", "equality", "speed", "calls", "startup")  # the first is that whose memory others would hide
PLAIN, SPECULATIVE = "plain", "speculative"
SIDES = ("specgen", "transformers")
WIDTHS = (1, 2, 3, 5, 9, 17)
CALL_CONTEXT = 200  # tokens before the calls whose cost is measured
CALL_REPEATS = 9
LEAST_STEPS = 5  # measured rounds of one width that stand for its cost; with fewer the probe does
COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
SKIPPED_ROUNDS = 2  # of a text, before its rounds are looked at
NO_GROWTH = 1.1  # ratios up to it count as none

Records = list[dict[str, Any]]
Progress = Callable[[str], None]


class OutOfTimeError(Exception):
    """The budget is used up: what is measured so far counts."""


def wall_clock(device: torch.device | str) -> Callable[[], float]:
    """The host's seconds, once the device has nothing left to do."""
    if torch.device(device).type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def peak_bytes(device: torch.device | str) -> int:
    """The most memory that was in use: of the device on CUDA, since it was last reset; else of the whole process."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_peak()


def process_peak() -> int:
    """0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def specgen_arm(contest: Contest, decoding: str, kind: str, prompt: list[int], run: int) -> dict[str, Any]:
    """One generation of specgen: its seconds, and what became of them."""
    pair = contest.pairs[decoding]
    pair = replace(pair, sampling=replace(pair.sampling, seed=pair.sampling.seed + run))
    clock = wall_clock(contest.target.device)
    began = clock()
    generation = Generation(pair, prompt, plain=kind == PLAIN)
    first = None
    for _ in generation:
        first = first or time.perf_counter()  # a finished round waited for the device
    end = clock()
    s, rounds = generation.statistics, generation.rounds
    steps = {name: [getattr(r, name) for r in rounds] for name in ("drafted", "draft_s", "verify_s", "total_s")}
    return {
        "seconds": end - began,
        "after_first_s": end - (first or end),
        "tokens": list(generation.tokens),
        "decode_s": s.decode_s,
        "other": s.other.share,
        "prefill_s": generation.prefill_s,
        "alpha": s.alpha,
        "tau": s.tau,
        "steps": steps,
        "engine_note": generation.engine_note,
    }


class FirstToken:
    """A streamer that notes when the first new token came; the prompt comes before it."""

    def __init__(self) -> None:
        self.puts: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(time.perf_counter())

    def end(self) -> None:
        pass


def transformers_arm(contest: Contest, decoding: str, kind: str, prompt: list[int], run: int) -> dict[str, Any]:
    """One generation of transformers, set up to do the same work."""
    sampling = contest.pairs[decoding].sampling
    tokens, k = sampling.max_new_tokens, sampling.k
    options: dict[str, Any] = {"do_sample": decoding == "sampled"}
    if decoding == "sampled":
        options |= {"temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
    if kind == SPECULATIVE and contest.assistant is None:
        options["prompt_lookup_num_tokens"] = k
    elif kind == SPECULATIVE:
        settings = contest.assistant.generation_config
        settings.num_assistant_tokens = k
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0
        options["assistant_model"] = contest.assistant
    streamer = FirstToken()
    if kind == PLAIN:
        options["streamer"] = streamer
    inputs = torch.tensor([prompt], device=contest.target.device)
    torch.manual_seed(sampling.seed + run)
    clock = wall_clock(contest.target.device)
    began = clock()
    with torch.inference_mode():
        out = contest.target.generate(
            inputs, attention_mask=torch.ones_like(inputs), min_new_tokens=tokens, max_new_tokens=tokens, **options
        )
    end = clock()
    after_first = end - streamer.puts[1] if kind == PLAIN else None
    return {"seconds": end - began, "after_first_s": after_first, "tokens": out[0, len(prompt) :].tolist()}


ARMS: dict[str, Callable[..., dict[str, Any]]] = {"specgen": specgen_arm, "transformers": transformers_arm}


def measure(
    contest: Contest, options: argparse.Namespace, order: random.Random, records: Records, progress: Progress
) -> None:
    """Adds every raw time to `records`: all arms of all prompts, in a fresh random order each run, after one untimed
    call an arm. Raises OutOfTimeError."""
    cases = [(d, kind, side) for d in DECODINGS for kind in (PLAIN, SPECULATIVE) for side in SIDES]
    graphs = any(getattr(p.target, "engine", None) == "graph" for p in contest.pairs.values())
    warm = {  # a graph is captured for the lengths that are timed
        d: pair if graphs else replace(pair, sampling=replace(pair.sampling, max_new_tokens=4))
        for d, pair in contest.pairs.items()
    }
    longest = max(contest.prompts, key=len)
    for decoding, kind, side in cases:
        progress(f"{contest.name}: warming up {side}, {kind}, {decoding}")
        ARMS[side](replace(contest, pairs=warm), decoding, kind, longest if graphs else longest[:8], 0)
    for run in range(options.runs):
        jobs = [(*case, i) for case in cases for i in range(len(contest.prompts))]
        order.shuffle(jobs)
        for done, (decoding, kind, side, i) in enumerate(jobs):
            progress(f"{contest.name}: run {run + 1} of {options.runs}, {done} of {len(jobs)}")
            in_time(options)
            reset_peak(options.device)
            result = ARMS[side](contest, decoding, kind, contest.prompts[i], run)
            case = {"pair": contest.name, "decoding": decoding, "kind": kind, "side": side, "prompt": i, "run": run}
            records.append({**case, **result, "peak_bytes": peak_bytes(options.device)})


def in_time(options: argparse.Namespace) -> None:
    if options.budget is not None and time.monotonic() > options.began + options.budget:
        raise OutOfTimeError


def of(records: Records, **case: Any) -> Records:
    return [r for r in records if all(r[key] == value for key, value in case.items())]


def seconds_by_prompt(records: Records, timed: str = "seconds", **case: Any) -> dict[int, float]:
    """Each prompt's median over the runs of one arm."""
    times: dict[int, list[float]] = {}
    for record in of(records, **case):
        times.setdefault(record["prompt"], []).append(record[timed])
    return {prompt: statistics.median(values) for prompt, values in times.items()}


def paired(above: Mapping[int, float], below: Mapping[int, float]) -> dict[str, Any] | None:
    """The prompts' own ratios, summed up; None where no prompt has both."""
    values = [above[prompt] / below[prompt] for prompt in above if prompt in below]
    return spread(values) if values else None


def ratios(records: Records, pair: str) -> list[dict[str, Any]]:
    """One row a comparison: specgen against transformers, and on either side speculative against plain."""
    rows: list[dict[str, Any]] = []
    for decoding in DECODINGS:
        times = {
            (side, kind): seconds_by_prompt(records, pair=pair, decoding=decoding, kind=kind, side=side)
            for side in SIDES
            for kind in (PLAIN, SPECULATIVE)
        }
        later = {
            side: seconds_by_prompt(records, "after_first_s", pair=pair, decoding=decoding, kind=PLAIN, side=side)
            for side in SIDES
        }
        ours, theirs = "specgen", "transformers"
        comparisons = [
            (PLAIN, "plain: transformers / specgen", times[theirs, PLAIN], times[ours, PLAIN]),
            ("later", "  behind the first token", later[theirs], later[ours]),
            (
                SPECULATIVE,
                "speculative: transformers / specgen",
                times[theirs, SPECULATIVE],
                times[ours, SPECULATIVE],
            ),
            *(
                (f"{side} speedup", f"{side}: plain / speculative", times[side, PLAIN], times[side, SPECULATIVE])
                for side in SIDES
            ),
        ]
        for key, what, above, below in comparisons:
            if found := paired(above, below):
                rows.append({"pair": pair, "decoding": decoding, "key": key, "what": what, **found})
    return rows


def inside(records: Records, pair: str) -> list[dict[str, Any]]:
    """What specgen's own rounds say: acceptance, τ, and the share of a round that is neither draft nor target."""
    rows = []
    for decoding in DECODINGS:
        for kind in (PLAIN, SPECULATIVE):
            ours = of(records, pair=pair, decoding=decoding, kind=kind, side="specgen")
            for r in ours:
                r["seconds_per_token"] = r["decode_s"] / len(r["tokens"])
            row: dict[str, Any] = {"pair": pair, "decoding": decoding, "kind": kind}
            row["engine_note"] = next((r["engine_note"] for r in ours if r["engine_note"]), None)
            for name in ("other", "alpha", "tau", "seconds_per_token"):
                values = [r[name] for r in ours if r[name] is not None]
                row[name] = spread(values) if values else None
            rows.append(row)
    return rows


def same_greedy_texts(records: Records, pair: str) -> dict[str, str]:
    """In how many prompts both sides wrote the same tokens, greedily: a check that they did the same work."""
    found = {}
    for kind in (PLAIN, SPECULATIVE):
        texts: dict[int, set[tuple[int, ...]]] = {}
        for r in of(records, pair=pair, decoding="greedy", kind=kind):
            texts.setdefault(r["prompt"], set()).add(tuple(r["tokens"]))
        found[kind] = f"{sum(len(t) == 1 for t in texts.values())} of {len(texts)}"
    return found


def memory(records: Records, pair: str) -> list[dict[str, Any]]:
    """The most memory a generation had in use, by side and kind. On a CPU it is the process's, which never falls."""
    cases = [(side, kind) for side in SIDES for kind in (PLAIN, SPECULATIVE)]
    peaks = {c: [r["peak_bytes"] for r in of(records, pair=pair, side=c[0], kind=c[1])] for c in cases}
    return [{"pair": pair, "side": s, "kind": k, "bytes": max(v)} for (s, k), v in peaks.items() if v]


def predictions(
    contest: Contest, options: argparse.Namespace, order: random.Random, records: Records
) -> list[dict[str, Any]]:
    """Measured and predicted speedup: from the plain texts, scored, and from what this run's own rounds cost.

    A call's width that hardly any round had, and a draft step where none was drafted, come from a probe.
    """
    rows = []
    for decoding in DECODINGS:
        case = {"pair": contest.name, "decoding": decoding, "side": "specgen"}
        plain, speculative = (of(records, kind=kind, **case) for kind in (PLAIN, SPECULATIVE))
        if not plain or not speculative:
            continue
        pair, k = contest.pairs[decoding], options.k
        assert pair.drafter is not None
        expected = []
        for text in {(r["prompt"], tuple(r["tokens"])) for r in plain}:
            prompt = contest.prompts[text[0]]
            scores = score_text(
                pair.target,
                pair.drafter,
                pair.processors,
                pair.sampling,
                [*prompt, *text[1]],
                len(prompt),
                temperatures=(),
            )
            expected.append(scores.rounds(k, options.tokens))
        rounds = {kind: _rounds(of(records, kind=kind, **case)) for kind in (PLAIN, SPECULATIVE)}
        first = statistics.median(r["verify_s"] for r in rounds[PLAIN])
        probe = _probe(contest, decoding, k, order)
        curve = CallCosts({w: s for w, s in probe.items() if w}).with_first()
        calls = []
        for width in range(1, k + 2):
            own = [r["verify_s"] for r in rounds[SPECULATIVE] if r["drafted"] == width - 1]
            enough = width > 1 and len(own) >= LEAST_STEPS
            calls.append(statistics.median(own) / first if enough else curve.call(width))
        calls[0] = 1.0
        steps = [r["draft_s"] / r["drafted"] for r in rounds[SPECULATIVE] if r["drafted"]]
        step = statistics.median(steps) if steps else probe[0]
        other = {kind: statistics.median(r["other_s"] for r in found) for kind, found in rounds.items()}
        rest = {kind: seconds / first for kind, seconds in other.items()}
        costs = CallCosts(dict(enumerate(calls, 1)), step / first, rest[SPECULATIVE], rest[PLAIN])
        predicted = predicted_speedup(pooled(expected), costs)
        times = {kind: seconds_by_prompt(records, "decode_s", kind=kind, **case) for kind in (PLAIN, SPECULATIVE)}
        measured = paired(times[PLAIN], times[SPECULATIVE])
        if measured is None:
            continue
        rows.append(
            {
                "pair": contest.name,
                "decoding": decoding,
                "measured": measured,
                "predicted": predicted,
                "ratio": measured["median"] / predicted,
                "tau": pooled(expected).tau,
                "c": step / first,
                "verify_cost": calls,
                "other_s": other,
            }
        )
    return rows


def _rounds(records: Records) -> Records:
    """The rounds of all these generations, one record each."""
    found = []
    for r in records:
        steps = r["steps"]
        for values in zip(*steps.values(), strict=True):
            row = dict(zip(steps, values, strict=True))
            found.append({**row, "other_s": row["total_s"] - row["draft_s"] - row["verify_s"]})
    return found


def _probe(contest: Contest, decoding: str, k: int, order: random.Random) -> dict[int, float]:
    """Seconds of a target call by its width, those of a draft step at 0."""
    pair = contest.pairs[decoding]
    text = call_text(contest)
    drafter = pair.drafter
    assert drafter is not None
    steps: dict[int, Callable[[], object]] = dict(call_steps(pair, text, sorted({1, 2, k + 1})))
    uniforms = KeyedUniforms(0, prompt_digest(text))
    drafter.start(text)

    def draft_step() -> None:
        drafter.propose(text, 1, 0, uniforms)
        drafter.rollback(max(0, drafter.cached - (len(text) - 1)))

    steps[0] = draft_step
    times = interleaved(steps, wall_clock(contest.target.device), order, CALL_REPEATS)
    return {width: statistics.median(values) for width, values in times.items()}


def interleaved(
    steps: Mapping[Any, Callable[[], object]], clock: Callable[[], float], order: random.Random, repeats: int
) -> dict[Any, list[float]]:
    """Seconds of each step, after one untimed call each: in every repeat all of them, in a random order."""
    for step in steps.values():
        step()
    times: dict[Any, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        names = list(steps)
        order.shuffle(names)
        for name in names:
            began = clock()
            steps[name]()
            times[name].append(clock() - began)
    return times


def call_text(contest: Contest) -> list[int]:
    """CALL_CONTEXT tokens: the first prompt, over and over."""
    prompt = contest.prompts[0]
    return [prompt[i % len(prompt)] for i in range(CALL_CONTEXT)]


def call_steps(pair: Pair, text: list[int], widths: Sequence[int]) -> dict[int, Callable[[], object]]:
    """A call of the target behind the text for each width, as the pair's engine makes it."""
    if getattr(pair.target, "engine", None) == "graph" and (steps := captured_calls(pair, text, widths)):
        return steps
    return eager_calls(pair.target, text, widths)


def captured_calls(pair: Pair, text: list[int], widths: Sequence[int]) -> dict[int, Callable[[], object]] | None:
    """None where the loop cannot be captured: then it calls the target eagerly as well."""
    from specgen.decoding.captured.fits import loop_for
    from specgen.errors import CaptureError

    wide = replace(pair, sampling=replace(pair.sampling, k=max(widths) - 1))
    try:
        steps = loop_for(wide).probes(text, widths)
    except CaptureError as reason:
        print(f"calls are eager: {reason}", file=sys.stderr)
        return None
    return {width: steps[str(width)] for width in widths}


def eager_calls(target: Any, text: list[int], widths: Sequence[int]) -> dict[int, Callable[[], object]]:
    target.reset()
    prefill(target, text[:-1])

    def call(width: int) -> Callable[[], object]:
        tokens = torch.tensor([[text[-1], *text[: width - 1]]])

        def step() -> None:
            target.forward(tokens, width)
            target.rollback([width])

        return step

    return {width: call(width) for width in widths}


def copy_step(device: str) -> tuple[Callable[[], object], int]:
    """A copy of a large tensor, and the bytes that it reads and writes."""
    size = COPY_BYTES.get(torch.device(device).type, 256 << 20)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source), 2 * size


def calls(contest: Contest, options: argparse.Namespace, order: random.Random) -> dict[str, Any]:
    """T(w) of the target's calls under specgen's engine and eagerly, side by side, and bytes against bandwidth."""
    pair, text = contest.pairs["greedy"], call_text(contest)
    assert isinstance(pair.target, CausalLM)
    steps: dict[tuple[str, int], Callable[[], object]] = {}
    models = {pair.target.engine: pair.target.model}
    for width, step in call_steps(pair, text, WIDTHS).items():
        steps[pair.target.engine, width] = step
    if pair.target.engine != "eager":
        models["eager"] = contest.target
        beside = CausalLM(contest.target, "target", pair.target.vocabulary)
        steps |= {("eager", width): step for width, step in eager_calls(beside, text, WIDTHS).items()}
    steps["copy", 0], moved = copy_step(options.device)
    times = interleaved(steps, wall_clock(options.device), order, CALL_REPEATS)
    bandwidth = moved / min(times["copy", 0])
    rows = []
    for engine, model in models.items():
        own = {width: times[engine, width] for width in WIDTHS}
        read = call_bytes(model) + cache_bytes(model) * len(text)
        rows.append(
            {
                "engine": engine,
                "seconds": {width: spread(values) for width, values in own.items()},
                "relative": {w: spread([s / one for s, one in zip(v, own[1], strict=True)]) for w, v in own.items()},
                "bytes": read,
                "bandwidth": read / statistics.median(own[1]),
                "bandwidth_share": read / statistics.median(own[1]) / bandwidth,
            }
        )
    return {"pair": contest.name, "context": len(text), "copy_bandwidth": bandwidth, "engines": rows}


@contextlib.contextmanager
def attention_clock() -> Iterator[list[float]]:
    """Adds the seconds of every call of transformers' attention function to the list that it gives.

    Meant for a CPU: on a device it would time the host.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original, seconds = ALL_ATTENTION_FUNCTIONS["sdpa"], [0.0]

    def timed(*arguments: Any, **more: Any) -> Any:
        began = time.perf_counter()
        result = original(*arguments, **more)
        seconds[0] += time.perf_counter() - began
        return result

    ALL_ATTENTION_FUNCTIONS["sdpa"] = timed
    try:
        yield seconds
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = original


def context(options: argparse.Namespace, order: random.Random, progress: Progress) -> dict[str, Any]:
    """Rounds of a tiny random model behind texts of several lengths, in turns.

    beyond: a round less attention itself on a CPU, where that can be told apart; elsewhere less both models' calls.
    """
    lengths, on_cpu = options.context, options.device == "cpu"
    size = replace(SMALL, layers=2)
    positions = max(lengths) + 2 * options.rounds
    model = random_llama(size, 2, torch.float32, "cpu", options.seed, positions)
    both = tuple(m.to(options.device) for m in (model, noisy_copy(model, 0.02)))
    engines = [prepare(m, options.engine) for m in both]
    drawn = random.Random(options.seed)
    rounds: dict[int, Records] = {n: [] for n in lengths}
    peaks, generations = {}, {}
    for n in lengths:
        progress(f"context: prefill of {n} tokens")
        target, drafting = (
            CausalLM(m, role, engine=engine)
            for m, role, engine in zip(both, ("target", "draft"), engines, strict=True)
        )
        sampling = Sampling(k=options.k, max_new_tokens=2 * options.rounds, temperature=TEMPERATURE)
        processors = Processors.of(sampling, target.device)
        drafter = ModelDrafter(drafting, processors)
        pair = Pair(target, drafter, processors, sampling, None, torch.float32, clock_for(target.device))
        prompt = [drawn.randrange(1, size.vocabulary) for _ in range(n)]
        generations[n] = iter(Generation(pair, prompt))
        reset_peak(options.device)
        next(generations[n])  # prefill, and captures
        peaks[n] = {"bytes": peak_bytes(options.device), "process_bytes": process_peak()}
    alive = list(lengths)
    with attention_clock() as attention:
        while alive:
            order.shuffle(alive)
            for n in tuple(alive):
                progress(f"context: round {len(rounds[n])} behind {n} tokens")
                attention[0], began = 0.0, time.perf_counter()
                r = next(generations[n], None)
                if r is None:
                    alive.remove(n)
                    continue
                seconds = time.perf_counter() - began
                rounds[n].append(
                    {
                        "seconds": seconds,
                        "total_s": r.total_s,
                        "draft_s": r.draft_s,
                        "verify_s": r.verify_s,
                        "rest_s": r.total_s - r.draft_s - r.verify_s,
                        "drafted": r.drafted,
                        "beyond_s": r.total_s - attention[0] if on_cpu else r.total_s - r.draft_s - r.verify_s,
                    }
                )
    rows = []
    for n in lengths:
        kept = [r for r in rounds[n][SKIPPED_ROUNDS:] if r["drafted"] == options.k] or rounds[n]
        row: dict[str, Any] = {"tokens": n, "rounds": len(kept), **peaks[n], "cache_bytes": cache_bytes(model) * n}
        for name in ("seconds", "total_s", "draft_s", "verify_s", "rest_s", "beyond_s"):
            row[name] = spread([r[name] for r in kept])
        rows.append(row)
    first, last = rows[0], rows[-1]
    growth = {
        name: last[name]["median"] / first[name]["median"]
        for name in ("seconds", "total_s", "draft_s", "verify_s", "rest_s", "beyond_s")
        if first[name]["median"] > 0
    }
    beyond = "the round less attention" if on_cpu else "the round less both models' calls"
    return {
        "lengths": lengths,
        "k": options.k,
        "engine": engines[0],
        "beyond": beyond,
        "rows": rows,
        "growth": growth,
    }


def equality(options: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """How many texts of a small float32 pair are the same under the engine and eagerly, by mode; and where the first
    that is not parts."""
    model = tiny_llama(layers=2, hidden=256, vocab=512)
    models = [m.to(options.device) for m in (model, noisy_copy(model, 0.05))]
    pairs: dict[str, Any] = {"engine": [], "eager": []}
    for m, role in zip(models, ("target", "draft"), strict=True):
        ours, theirs = both_sides(m, role, options)
        pairs["engine"].append(ours)
        pairs["eager"].append(CausalLM(theirs, role))
    drawn = random.Random(options.seed)
    prompts = [[drawn.randrange(1, 512) for _ in range(16 + 8 * i)] for i in range(options.prompts)]
    rows = []
    for mode in (Mode.EXACT, Mode.GREEDY, Mode.COUPLED):
        temperature = None if mode is Mode.GREEDY else TEMPERATURE
        sampling = Sampling(mode=mode, k=options.k, max_new_tokens=options.tokens, temperature=temperature)
        processors = Processors.of(sampling, options.device)
        for kind in (PLAIN, SPECULATIVE):
            progress(f"equality: {mode.value}, {kind}")
            texts: dict[str, list[tuple[int, ...]]] = {}
            notes = []
            for side, (target, draft) in pairs.items():
                drafter = ModelDrafter(draft, processors)
                pair = Pair(target, drafter, processors, sampling, None, torch.float32, clock_for(target.device))
                done = [Generation(pair, prompt, plain=kind == PLAIN).run() for prompt in prompts]
                texts[side] = [generation.tokens for generation in done]
                notes += [generation.engine_note for generation in done if generation.engine_note]
            parted = [_first_difference(a, b) for a, b in zip(texts["engine"], texts["eager"], strict=True)]
            rows.append(
                {
                    "engine": pairs["engine"][0].engine,
                    "mode": mode.value,
                    "kind": kind,
                    "same": parted.count(None),
                    "of": len(parted),
                    "first_difference": min((p for p in parted if p is not None), default=None),
                    "engine_note": notes[0] if notes else None,  # then the eager loop was compared with itself
                }
            )
    return rows


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return None if a == b else next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def start_up(runs: int = 5) -> list[dict[str, Any]]:
    """Seconds of `specgen --help` and of a completion, as a shell asks for it; nothing where it is not installed."""
    command = Path(sys.executable).parent / "specgen"
    if not command.exists():
        return []
    completion = {"_SPECGEN_COMPLETE": "complete_bash", "COMP_WORDS": "specgen ru", "COMP_CWORD": "1"}
    rows = []
    for name, arguments, extra in (("specgen --help", ["--help"], {}), ("completion", [], completion)):
        times = []
        for _ in range(runs + 1):
            began = time.perf_counter()
            subprocess.run([command, *arguments], env={**os.environ, **extra}, capture_output=True, check=False)
            times.append(time.perf_counter() - began)
        rows.append({"what": name, **spread(times[1:])})
    return rows


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The issue's goals beside what this run found. A goal for several decodings or pairs is met by the worst."""
    settings, speed = result["settings"], result["speed"]
    on_cpu, full = settings["device"] == "cpu", settings["scale"] == "full"
    facts = {fact["pair"]: fact for fact in result["contests"]}

    def pairs(kind: str, dtype: str | None = None, *, cpu: bool) -> list[str]:
        if cpu != on_cpu or (kind in ("1b", "8b") and not full):
            return []
        return [n for n, f in facts.items() if f["kind"] == kind and dtype in (None, f["dtype"])]

    def ratio_of(key: str, names: list[str]) -> list[float]:
        return [r["median"] for r in speed["ratios"] if r["pair"] in names and r["key"] == key]

    def others(names: list[str]) -> list[float]:
        rows = [r for r in speed["inside"] if r["pair"] in names and r["kind"] == SPECULATIVE and r["other"]]
        return [r["other"]["median"] for r in rows]

    def fifth(names: list[str]) -> list[float]:
        rows = [c for c in result["calls"] if c["pair"] in names]
        return [c["engines"][0]["relative"][5]["median"] for c in rows]

    def shares(names: list[str]) -> list[float]:
        known = {facts[c["pair"]]["kind"]: c for c in result["calls"]}
        rows = [r for r in speed["inside"] if r["pair"] in names and r["kind"] == PLAIN and r["seconds_per_token"]]
        return [
            call["engines"][0]["bytes"] / r["seconds_per_token"]["median"] / call["copy_bandwidth"]
            for r in rows
            if (call := known.get(facts[r["pair"]]["kind"]))
        ]

    growth = result["context"]["growth"].get("beyond_s") if result["context"] else None
    long = bool(growth) and max(settings["context"]) >= 32_000
    real = [n for n, f in facts.items() if full or f["kind"] not in ("1b", "8b")]
    predicted = [p["ratio"] for p in speed["predicted"] if p["pair"] in real]
    smollm2 = pairs("smollm2", "float32", cpu=True)
    table: list[tuple[str, str, float, list[float]]] = [
        ("CPU, SmolLM2 float32: plain decoding / generate", ">=", 1.4, ratio_of(PLAIN, smollm2)),
        (
            "CPU, SmolLM2 bfloat16: plain decoding / generate",
            ">=",
            1.3,
            ratio_of(PLAIN, pairs("smollm2", "bfloat16", cpu=True)),
        ),
        (
            "CPU float32, stretched: speculative / assisted generation",
            ">=",
            1.8,
            ratio_of(SPECULATIVE, pairs("stretched", "float32", cpu=True)),
        ),
        ("CPU float32, SmolLM2: T(5)/T(1) of the target call", "<=", 1.1, fifth(smollm2)),
        (
            "CPU, tiny pair: speculative / assisted generation",
            ">=",
            1.5,
            ratio_of(SPECULATIVE, pairs("tiny", cpu=True)),
        ),
        ("CPU, SmolLM2: `other` share of a round", "<=", 0.03, others(pairs("smollm2", cpu=True))),
        ("GPU, 8B/1B: `other` share of a round", "<=", 0.05, others(pairs("8b", cpu=False))),
        ("measured / predicted speedup", ">=", 0.95, predicted),
        ("GPU, 1B/0.1B: speculative / assisted generation", ">=", 3.0, ratio_of(SPECULATIVE, pairs("1b", cpu=False))),
        ("GPU, 8B plain decoding: share of copy bandwidth", ">=", 0.8, shares(pairs("8b", cpu=False))),
        ("a round behind 32k tokens / behind 1k, beyond attention", "<=", NO_GROWTH, [growth] if long else []),
    ]
    return [_goal(*row) for row in table]


def _goal(goal: str, relation: str, bound: float, found: list[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"goal": goal, "wanted": f"{relation} {bound:g}", "found": None, "all": found}
    if not found:
        return {**row, "status": "not measured here"}
    row["found"] = min(found) if relation == ">=" else max(found)
    met = row["found"] >= bound if relation == ">=" else row["found"] <= bound
    return {**row, "status": "met" if met else "MISSED"}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Prints it; the first `left` columns are aligned to the left. Nothing where there are no rows."""
    if not rows:
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    print(f"\n{title}")
    for row in (columns, ["-" * width for width in widths], *rows):
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def shown(value: dict[str, Any] | None, form: str = "{:.2f}", scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value["median"] * scale)


def bounds(value: dict[str, Any], form: str = "{:.2f}", scale: float = 1.0) -> str:
    return f"{form.format(value['min'] * scale)}–{form.format(value['max'] * scale)}"


def show(result: dict[str, Any]) -> None:
    speed = result["speed"]
    table(
        "Ratios of whole generations (above 1: the one named last is faster)",
        ["pair", "decoding", "time of", "median", "min–max"],
        [[r["pair"], r["decoding"], r["what"], shown(r), bounds(r)] for r in speed["ratios"]],
        left=3,
    )
    table(
        "Inside specgen",
        ["pair", "decoding", "kind", "other", "α", "τ", "ms/token"],
        [
            [
                r["pair"],
                r["decoding"],
                r["kind"],
                shown(r["other"], "{:.1%}"),
                shown(r["alpha"]),
                shown(r["tau"]),
                shown(r["seconds_per_token"], scale=1e3),
            ]
            for r in speed["inside"]
        ],
        left=3,
    )
    table(
        "Speedup of decoding, prefill apart",
        ["pair", "decoding", "measured", "min–max", "predicted", "measured / predicted"],
        [
            [
                r["pair"],
                r["decoding"],
                shown(r["measured"]),
                bounds(r["measured"]),
                f"{r['predicted']:.2f}",
                f"{r['ratio']:.2f}",
            ]
            for r in speed["predicted"]
        ],
        left=2,
    )
    table(
        "Most memory in use, MB",
        ["pair", "side", "kind", "MB"],
        [[r["pair"], r["side"], r["kind"], f"{r['bytes'] / 1e6:.0f}"] for r in speed["memory"]],
        left=3,
    )
    for pair, same in speed["same_greedy_texts"].items():
        both = ", ".join(f"{kind} {count}" for kind, count in same.items())
        print(f"{pair}: prompts with the same greedy text on both sides: {both}")
    table(
        "Target calls by their number of tokens, relative to one token",
        ["pair", "engine", *(f"T({w})" for w in WIDTHS[1:]), "T(1) ms", "min–max", "MB", "GB/s", "of copying"],
        [
            [
                c["pair"],
                e["engine"],
                *(shown(e["relative"][w]) for w in WIDTHS[1:]),
                shown(e["seconds"][1], scale=1e3),
                bounds(e["seconds"][1], scale=1e3),
                f"{e['bytes'] / 1e6:.0f}",
                f"{e['bandwidth'] / 1e9:.2f}",
                f"{e['bandwidth_share']:.0%}",
            ]
            for c in result["calls"]
            for e in c["engines"]
        ],
        left=2,
    )
    if found := result["context"]:
        names = ("total_s", "verify_s", "draft_s", "rest_s", "beyond_s")
        titles = ["tokens", "round ms", "target call", "draft", "neither", "beyond", "cache MB", "peak MB"]
        rows = [
            [
                str(r["tokens"]),
                *(shown(r[name], "{:.3f}", 1e3) for name in names),
                f"{r['cache_bytes'] / 1e6:.1f}",
                f"{r['bytes'] / 1e6:.0f}",
            ]
            for r in found["rows"]
        ]
        rows.append(["growth", *(f"{found['growth'].get(name, 0):.2f}" for name in names), "", ""])
        table(f"A round by the length of its context (beyond: {found['beyond']})", titles, rows)
    table(
        "Texts under the engine and eagerly",
        ["engine", "mode", "kind", "same", "first difference"],
        [
            [r["engine"], r["mode"], r["kind"], f"{r['same']} of {r['of']}", str(r["first_difference"] or "-")]
            for r in result["equality"]
        ],
        left=3,
    )
    for row in result["startup"]:
        print(f"{row['what']}: {row['median']:.2f} s ({bounds(row)}, {row['n']} runs)")
    notes = dict.fromkeys(r["engine_note"] for r in (*speed["inside"], *result["equality"]) if r["engine_note"])
    for line in (*notes, *result["skipped"], *result["failed"]):
        print(line)
    table(
        "Goals",
        ["goal", "wanted", "found", "status"],
        [
            [g["goal"], g["wanted"], "-" if g["found"] is None else f"{g['found']:.3g}", g["status"]]
            for g in result["goals"]
        ],
        left=2,
    )


def listed(text: str, known: Sequence[str], name: str, parser: argparse.ArgumentParser) -> list[str]:
    values = text.split(",")
    if unknown := sorted(set(values) - set(known)):
        parser.error(f"{name}: no such thing: {', '.join(unknown)}; choose of {', '.join(known)}")
    return values


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)} (default: all)")
    add("--pairs", help=f"of {','.join(BUILDERS)} (default: smollm2,stretched,tiny; on CUDA tiny,1b,8b)")
    add("--engine", default="auto", choices=ENGINES, help="specgen's (default: auto); transformers' is its own")
    add("--device", default="auto", help="cpu, cuda or auto (default)")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32; of 1b and 8b bfloat16")
    add("--scale", default="full", choices=("full", "tiny"), help="tiny: 1b and 8b become small, to try this script")
    add("--agreement", default=".8,.6,.95", help="overlaps wanted of 1b and 8b (default: .8,.6,.95)")
    add("--k", type=int, default=4, help="tokens drafted in a round (default: 4)")
    add("--tokens", type=int, default=32, help="tokens to generate (default: 32)")
    add("--prompts", type=int, default=3, help=f"how many, at most {len(PROMPTS)} (default: 3)")
    add("--runs", type=int, default=1, help="repetitions of everything (default: 1)")
    add("--context", default="900,32000", help="lengths of the context section (default: 900,32000)")
    add("--rounds", type=int, default=40, help="about how many rounds at each of them (default: 40)")
    add("--threads", type=int, help="of torch (default: its own choice, all cores)")
    add("--seed", type=int, default=0, help="of the order, the weights and the sampling (default: 0)")
    add("--budget", type=float, metavar="SECONDS", help="nothing new is begun after so long")
    add("--json", type=Path, metavar="FILE", help="write every raw time here, as soon as it is known")
    options = parser.parse_args(arguments)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    usual = "tiny,1b,8b" if options.device != "cpu" else "smollm2,stretched,tiny"
    options.pairs = listed(options.pairs or usual, list(BUILDERS), "--pairs", parser)
    options.only = listed(options.only, SECTIONS, "--only", parser)
    for name in ("k", "tokens", "prompts", "runs", "rounds"):
        least = 2 if name == "tokens" else 1
        if getattr(options, name) < least:
            parser.error(f"--{name}: at least {least}")
    try:
        options.agreement = [float(x) for x in options.agreement.split(",")]
        options.context = sorted(int(x) for x in options.context.split(","))
    except ValueError as error:
        parser.error(f"--agreement and --context take numbers with commas between them: {error}")
    options.prompts = min(options.prompts, len(PROMPTS))
    options.began = time.monotonic()
    return options


def teller() -> Progress:
    """Progress on stderr, on one line of a terminal that is written over; nothing where there is none."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    own = {name: value for name, value in vars(options).items() if name not in ("json", "began")}
    return {**own, "temperature": TEMPERATURE}


class Run:
    """One run of the script: its result, which is written after every part of it."""

    def __init__(self, options: argparse.Namespace, before: dict[str, Any]) -> None:
        self.options, self.order, self.tell = options, random.Random(options.seed), teller()
        self.result: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": settings(options),
            "environment": before,
            "contests": [],
            "speed": {"ratios": [], "inside": [], "predicted": [], "memory": [], "same_greedy_texts": {}},
            "calls": [],
            "context": None,
            "equality": [],
            "startup": [],
            "goals": [],
            "skipped": [],
            "failed": [],
            "records": [],
        }

    def guarded(self, name: str, part: Callable[[], None]) -> None:
        """Does one part; what goes wrong in it is kept, and the others are done all the same."""
        try:
            in_time(self.options)
            part()
        except OutOfTimeError:
            self.result["skipped"].append(f"{name}: cut short or left out, the budget was used up")
        except Exception as error:
            traceback.print_exc()
            self.result["failed"].append(f"{name}: {type(error).__name__}: {error}")
        self.save()

    def save(self) -> None:
        self.result["load_average_after"] = environment.describe()["load_average"]
        self.result["goals"] = goals(self.result)
        if self.options.json is not None:
            self.options.json.write_text(json.dumps(self.result) + "\n", encoding="utf-8")

    def all(self) -> None:
        options, result = self.options, self.result
        parts: dict[str, Callable[[], Any]] = {
            "context": lambda: context(options, self.order, self.tell),
            "equality": lambda: equality(options, self.tell),
            "startup": start_up,
        }
        for name in SECTIONS:
            if name in options.only and name in parts:
                self.guarded(name, lambda name=name: result.update({name: parts[name]()}))  # type: ignore[misc]
        if {"speed", "calls"} & set(options.only):
            for name in options.pairs:
                self.guarded(name, lambda name=name: self.pair(name))  # type: ignore[misc]

    def pair(self, name: str) -> None:
        self.tell(f"{name}: loading")
        for contest in BUILDERS[name](self.options):
            in_time(self.options)
            self.result["contests"].append(contest.facts)
            if "calls" in self.options.only and contest.calls:
                self.tell(f"{contest.name}: calls")
                self.guarded(
                    f"{contest.name} calls",
                    lambda c=contest: self.result["calls"].append(calls(c, self.options, self.order)),  # type: ignore[misc]
                )
            if "speed" in self.options.only:
                self.guarded(contest.name, lambda c=contest: self.speed(c))  # type: ignore[misc]
            del contest
            gc.collect()

    def speed(self, contest: Contest) -> None:
        records, speed = self.result["records"], self.result["speed"]
        try:
            measure(contest, self.options, self.order, records, self.tell)
        finally:
            own = of(records, pair=contest.name)
            speed["ratios"] += ratios(own, contest.name)
            speed["inside"] += inside(own, contest.name)
            speed["memory"] += memory(own, contest.name)
            speed["same_greedy_texts"][contest.name] = same_greedy_texts(own, contest.name)
        self.tell(f"{contest.name}: scoring")
        speed["predicted"] += predictions(contest, self.options, self.order, own)
        if wrong := [r for r in own if len(r["tokens"]) != self.options.tokens]:
            n = f"{len(wrong)} of {len(own)} generations"
            self.result["failed"].append(f"{contest.name}: {n} are not {self.options.tokens} tokens long")


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    before = environment.describe()
    load, cores = (before["load_average"] or [0.0])[0], before["cpu_count"] or 1
    if load > BUSY * cores:
        busy = f"load average {load:.2f} on {cores} cores"
        print(f"warning: the machine is busy ({busy}): do not trust the times", file=sys.stderr)
    run = Run(options, before)
    run.all()
    run.tell("")
    show(run.result)
    return 1 if run.result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
