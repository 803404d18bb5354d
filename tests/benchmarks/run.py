"""specgen beside transformers: the same pairs, k, prompts and lengths, on the same weights, interleaved.

    python tests/benchmarks/run.py --pairs smollm2,stretched,tiny --k 4 --json speed.json

Every arm generates exactly --tokens tokens after the prompt: end tokens end nothing, and both sides ban them. A time
is that of the whole generation, prefill included; for plain decoding also that behind the first token. In each
repetition all arms of all prompts come in a random order drawn from --seed. A ratio is transformers' time over
specgen's: above 1, specgen is faster. Of the repetitions of one prompt the median counts; of the prompts' ratios the
median is printed, with the smallest and the largest.

Nothing here is asserted: run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch is imported, which reads it once
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from stretched import FOR_BENCHMARKS, SMOLLM2, stretched
from tiny import noisy_copy, tiny_llama

from specgen import environment
from specgen.drafting import ModelDrafter
from specgen.generation import Generation, Pair
from specgen.loading import load_session
from specgen.models import CausalLM
from specgen.profiles import Profile
from specgen.rounds import Mode, Sampling
from specgen.sampling import Processors

SCHEMA_VERSION = 1
BUSY = 0.5  # load average per core above which a table is no evidence
TEMPERATURE = 0.8
PAIRS = ("smollm2", "stretched", "tiny")
DECODINGS = ("greedy", "sampled")
PLAIN, SPECULATIVE = "plain", "speculative"
PROMPTS = (
    "Repeat after me, twice: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Why is the sky blue?",
    "List the planets of the solar system from the sun outward, with one fact about each of them.",
    "Write a short story about a lighthouse keeper who collects storms in bottles.",
    "Translate into French: the train to Lyon leaves at seven in the morning.",
)


@dataclass(frozen=True)
class Contest:
    """One pair, as both sides see it: specgen's `Pair` by decoding, and transformers' own models, the same objects.

    assistant: None where the draft is prompt lookup.
    """

    name: str
    pairs: dict[str, Pair]
    target: Any
    assistant: Any
    prompts: list[list[int]]
    banned: tuple[int, ...]


# ----------------------------------------------------------------------------------------------------------- pairs


def from_profile(profile: dict[str, Any], options: argparse.Namespace) -> Contest:
    """A contest from a profile's data. Its end tokens are banned and end nothing."""
    common = {"k": options.k, "max_new_tokens": options.tokens, "seed": options.seed}
    session = load_session(Profile.model_validate({**profile, "decoding": {**common, "temperature": TEMPERATURE}}))
    sampled = replace(session.sampling, ban=session.sampling.end_tokens, end_tokens=(), stop=())
    prompts = [session.encode(text) for text in PROMPTS[: options.prompts]]
    drafter = session.pair.drafter
    assistant = drafter.model.model if isinstance(drafter, ModelDrafter) else None
    return contest(profile["name"], session.pair, sampled, prompts, assistant)


def contest(name: str, pair: Pair, sampled: Sampling, prompts: list[list[int]], assistant: Any) -> Contest:
    pairs = {}
    for decoding in DECODINGS:
        greedy = {"mode": Mode.GREEDY, "temperature": None} if decoding == "greedy" else {}
        sampling = replace(sampled, **greedy)
        processors = Processors.of(sampling)
        drafter = pair.drafter
        if isinstance(drafter, ModelDrafter):
            drafter = ModelDrafter(drafter.model, processors)
        pairs[decoding] = replace(pair, drafter=drafter, sampling=sampling, processors=processors)
    return Contest(name, pairs, pair.target.model, assistant, prompts, sampled.ban)


def smollm2(options: argparse.Namespace) -> Contest:
    target = {"checkpoint": SMOLLM2, "dtype": "float32", "device": "cpu"}
    return from_profile({"name": "smollm2", "target": target, "draft": {"kind": "ngram"}}, options)


def stretched_smollm2(options: argparse.Namespace) -> Contest:
    target = {"checkpoint": str(stretched(FOR_BENCHMARKS)), "dtype": "float32", "device": "cpu"}
    draft = {"kind": "checkpoint", "checkpoint": SMOLLM2, "dtype": "float32", "device": "cpu"}
    return from_profile({"name": "stretched", "target": target, "draft": draft}, options)


def tiny(options: argparse.Namespace) -> Contest:
    """Random weights and hardly any arithmetic: what is left is the two loops themselves."""
    model = tiny_llama(layers=4, hidden=64, vocab=512)
    target, draft = CausalLM(model, "target"), CausalLM(noisy_copy(model, 0.02), "draft")
    end = 0
    for side in (target, draft):  # what transformers calls an end is banned on both sides
        side.model.generation_config.eos_token_id = side.model.generation_config.pad_token_id = end
    sampled = Sampling(
        k=options.k, max_new_tokens=options.tokens, seed=options.seed, temperature=TEMPERATURE, ban=(end,)
    )
    processors = Processors.of(sampled)
    pair = Pair(target, ModelDrafter(draft, processors), processors, sampled, None, torch.float32, time.perf_counter)
    drawn = random.Random(options.seed)
    prompts = [[drawn.randrange(1, 512) for _ in range(32)] for _ in range(options.prompts)]
    return contest("tiny", pair, sampled, prompts, draft.model)


BUILDERS = {"smollm2": smollm2, "stretched": stretched_smollm2, "tiny": tiny}


# ------------------------------------------------------------------------------------------------------------ arms


def specgen_arm(contest: Contest, decoding: str, kind: str, prompt: list[int], run: int) -> dict[str, Any]:
    """One generation of specgen: its seconds, and what became of them."""
    pair = contest.pairs[decoding]
    pair = replace(pair, sampling=replace(pair.sampling, seed=pair.sampling.seed + run))
    began = time.perf_counter()
    generation = Generation(pair, prompt, plain=kind == PLAIN)
    first = None
    for _ in generation:
        first = first or time.perf_counter()
    end = time.perf_counter()
    s = generation.statistics
    found = {
        "seconds": end - began,
        "after_first_s": end - (first or end),
        "tokens": list(generation.tokens),
        "decode_s": s.decode_s,
        "other": s.other.share,
    }
    return {**found, "prefill_s": generation.prefill_s, "alpha": s.alpha, "tau": s.tau}


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
    clock = FirstToken()
    if kind == PLAIN:
        options["streamer"] = clock
    inputs = torch.tensor([prompt])
    torch.manual_seed(sampling.seed + run)
    began = time.perf_counter()
    with torch.inference_mode():
        out = contest.target.generate(
            inputs, attention_mask=torch.ones_like(inputs), min_new_tokens=tokens, max_new_tokens=tokens, **options
        )
    end = time.perf_counter()
    after_first = end - clock.puts[1] if kind == PLAIN else None
    return {"seconds": end - began, "after_first_s": after_first, "tokens": out[0, len(prompt) :].tolist()}


ARMS: dict[str, Callable[..., dict[str, Any]]] = {"specgen": specgen_arm, "transformers": transformers_arm}


def measure(contest: Contest, runs: int, order: random.Random, progress: Callable[[str], None]) -> list[dict]:
    """Every raw time. All arms of all prompts, in a fresh random order each run, after one untimed call an arm."""
    cases = [(d, kind, side) for d in DECODINGS for kind in (PLAIN, SPECULATIVE) for side in ARMS]
    short = replace(
        contest,
        pairs={
            decoding: replace(pair, sampling=replace(pair.sampling, max_new_tokens=4))
            for decoding, pair in contest.pairs.items()
        },
    )
    for decoding, kind, side in cases:
        ARMS[side](short, decoding, kind, contest.prompts[0][:8], 0)
    found = []
    for run in range(runs):
        jobs = [(*case, i) for case in cases for i in range(len(contest.prompts))]
        order.shuffle(jobs)
        for done, (decoding, kind, side, i) in enumerate(jobs):
            progress(f"{contest.name}: run {run + 1} of {runs}, {done} of {len(jobs)}")
            result = ARMS[side](contest, decoding, kind, contest.prompts[i], run)
            case = {"pair": contest.name, "decoding": decoding, "kind": kind, "side": side, "prompt": i, "run": run}
            found.append({**case, **result})
    return found


# --------------------------------------------------------------------------------------------------------- ratios


def seconds_by_prompt(records: list[dict], timed: str = "seconds", **case: str) -> dict[int, float]:
    """Each prompt's median over the runs of one arm."""
    times: dict[int, list[float]] = {}
    for record in records:
        if all(record[key] == value for key, value in case.items()):
            times.setdefault(record["prompt"], []).append(record[timed])
    return {prompt: statistics.median(values) for prompt, values in times.items()}


def spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def paired(above: dict[int, float], below: dict[int, float]) -> dict[str, Any]:
    """The prompts' own ratios, summed up."""
    return spread([above[prompt] / below[prompt] for prompt in below])


def ratios(records: list[dict], pair: str) -> list[dict[str, Any]]:
    """One row a comparison: specgen against transformers, and on either side speculative against plain."""
    rows = []
    for decoding in DECODINGS:
        times = {
            (side, kind): seconds_by_prompt(records, pair=pair, decoding=decoding, kind=kind, side=side)
            for side in ARMS
            for kind in (PLAIN, SPECULATIVE)
        }
        later = {
            side: seconds_by_prompt(records, "after_first_s", pair=pair, decoding=decoding, kind=PLAIN, side=side)
            for side in ARMS
        }
        comparisons = [
            ("plain: transformers / specgen", times["transformers", PLAIN], times["specgen", PLAIN]),
            ("  behind the first token", later["transformers"], later["specgen"]),
            (
                "speculative: transformers / specgen",
                times["transformers", SPECULATIVE],
                times["specgen", SPECULATIVE],
            ),
        ] + [(f"{side}: plain / speculative", times[side, PLAIN], times[side, SPECULATIVE]) for side in ARMS]
        rows += [
            {"pair": pair, "decoding": decoding, "what": what, **paired(above, below)}
            for what, above, below in comparisons
        ]
    return rows


def inside(records: list[dict], pair: str) -> list[dict[str, Any]]:
    """What specgen's own rounds say: acceptance, τ, and the share of a round that is neither draft nor target."""
    rows = []
    for decoding in DECODINGS:
        for kind in (PLAIN, SPECULATIVE):
            case = {"pair": pair, "decoding": decoding, "kind": kind, "side": "specgen"}
            ours = [r for r in records if all(r[key] == value for key, value in case.items())]
            row: dict[str, Any] = {"pair": pair, "decoding": decoding, "kind": kind}
            for name in ("other", "alpha", "tau"):
                values = [r[name] for r in ours if r[name] is not None]
                row[name] = spread(values) if values else None
            rows.append(row)
    return rows


def same_greedy_texts(records: list[dict], pair: str) -> dict[str, str]:
    """In how many prompts both sides wrote the same tokens, greedily: a check that they did the same work."""
    found = {}
    for kind in (PLAIN, SPECULATIVE):
        texts: dict[int, set[tuple[int, ...]]] = {}
        for r in records:
            if (r["pair"], r["decoding"], r["kind"]) == (pair, "greedy", kind):
                texts.setdefault(r["prompt"], set()).add(tuple(r["tokens"]))
        found[kind] = f"{sum(len(t) == 1 for t in texts.values())} of {len(texts)}"
    return found


def start_up(runs: int) -> list[dict[str, Any]]:
    """Seconds of `specgen --help` and of a completion, as a shell asks for it."""
    command = str(Path(sys.executable).parent / "specgen")
    completion = {"_SPECGEN_COMPLETE": "complete_bash", "COMP_WORDS": "specgen ru", "COMP_CWORD": "1"}
    rows = []
    for name, arguments, extra in (("specgen --help", ["--help"], {}), ("completion", [], completion)):
        times = []
        for _ in range(runs + 1):
            began = time.perf_counter()
            subprocess.run([command, *arguments], env={**os.environ, **extra}, capture_output=True, check=False)
            times.append(time.perf_counter() - began)
        rows.append({"what": name, "seconds": times[1:], **spread(times[1:])})
    return rows


# ---------------------------------------------------------------------------------------------------------- output


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < 3 else "right", no_wrap=True)
    return made


def show(console: Console, result: dict[str, Any]) -> None:
    made = table("Ratios (above 1: the one named last is faster)", "pair", "decoding", "time of", "median", "min–max")
    for row in result["ratios"]:
        bounds = f"{row['min']:.2f}–{row['max']:.2f}"
        made.add_row(row["pair"], row["decoding"], row["what"], f"{row['median']:.2f}", bounds)
    console.print(made)
    made = table("Inside specgen", "pair", "decoding", "kind", "other", "α", "τ")
    for row in result["inside"]:
        shown = [
            "-" if row[name] is None else form.format(row[name]["median"])
            for name, form in (("other", "{:.1%}"), ("alpha", "{:.2f}"), ("tau", "{:.2f}"))
        ]
        made.add_row(row["pair"], row["decoding"], row["kind"], *shown)
    console.print(made)
    for pair, same in result["same_greedy_texts"].items():
        both = ", ".join(f"{kind} {count}" for kind, count in same.items())
        console.print(f"{pair}: prompts with the same greedy text on both sides: {both}")
    for row in result["start_up"]:
        console.print(f"{row['what']}: {row['median']:.2f} s ({row['min']:.2f}–{row['max']:.2f}, {row['n']} runs)")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default=",".join(PAIRS), help=f"of {','.join(PAIRS)} (default: all)")
    parser.add_argument("--k", type=int, default=4, help="tokens drafted in a round (default: 4)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate (default: 32)")
    parser.add_argument("--prompts", type=int, default=3, help=f"how many, at most {len(PROMPTS)} (default: 3)")
    parser.add_argument("--runs", type=int, default=1, help="repetitions of everything (default: 1)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of the sampling (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every raw time here")
    options = parser.parse_args(arguments)
    options.pairs = options.pairs.split(",")
    if unknown := set(options.pairs) - set(PAIRS):
        parser.error(f"--pairs: no such pair: {', '.join(sorted(unknown))}; choose of {', '.join(PAIRS)}")
    for name in ("k", "tokens", "prompts", "runs", "threads"):
        least = 2 if name == "tokens" else 1
        if getattr(options, name) < least:
            parser.error(f"--{name}: at least {least}")
    options.prompts = min(options.prompts, len(PROMPTS))
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    errors = Console(stderr=True)
    before = environment.describe()
    load, cores = (before["load_average"] or [0.0])[0], before["cpu_count"] or 1
    if load > BUSY * cores:
        errors.print(
            f"warning: the machine is busy (load average {load:.2f} on {cores} cores): do not trust the times"
        )
    order = random.Random(options.seed)
    records: list[dict] = []
    with errors.status("starting") as status:
        for name in options.pairs:
            status.update(f"{name}: loading")
            contest = BUILDERS[name](options)
            records += measure(contest, options.runs, order, status.update)
            del contest
        status.update("start-up times")
        started = start_up(5)
    wrong = [r for r in records if len(r["tokens"]) != options.tokens]
    if wrong:
        errors.print(f"warning: {len(wrong)} of {len(records)} generations are not {options.tokens} tokens long")
    result = {
        "schema_version": SCHEMA_VERSION,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {**vars(options), "json": None, "temperature": TEMPERATURE, "dtype": "float32"},
        "environment": before,
        "load_average_after": environment.describe()["load_average"],
        "ratios": [row for name in options.pairs for row in ratios(records, name)],
        "inside": [row for name in options.pairs for row in inside(records, name)],
        "same_greedy_texts": {name: same_greedy_texts(records, name) for name in options.pairs},
        "start_up": started,
        "records": records,
    }
    out = Console()
    show(out if out.is_terminal else Console(width=100), result)  # into a file: as wide as the tables are
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
