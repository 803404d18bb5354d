"""A real model on real text: SmolLM2 alone, and as the draft of its stretched self. All in float32 on the CPU."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from rich.table import Table

from specgen.decoding.generation import Generation
from specgen.decoding.result import result_of
from specgen.decoding.self_check import CheckResult, SelfCheck, drift_bound
from specgen.profiles.read import load_profile
from specgen.report import run as run_module
from specgen.results.document import plain_data
from specgen.rounds.record import Origin
from specgen.session import Session, load, load_session
from specgen.settings import Mode
from support.smollm2 import Sessions
from support.stretched import SMOLLM2, stretched

smollm2 = [
    pytest.mark.smollm2,
    pytest.mark.slow,
]
NEAR_TIE = 1e-3  # of two logits, in nats: what two kinds of float32 call may differ by

SETTINGS = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}

CHAT = "Why is the sky blue? Answer in two sentences."
STORY = "Write a short story about a lighthouse keeper who collects storms in bottles."
CODE = '''def fibonacci(n):
    """The n-th Fibonacci number."""
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)


def factorial(n):
    """The product of 1 to n."""
    if n < 2:
'''
LONG = " ".join(
    f"On day {day} the ship sailed {7 * day % 23 + 3} miles to the {('north', 'east', 'south', 'west')[day % 4]}, "
    f"and the cook served {('beans', 'rice', 'fish')[day % 3]}."
    for day in range(1, 19)
)
PROMPTS = {
    "code": ("raw", CODE),
    "chat": ("chat", CHAT),
    "long": ("raw", LONG),
    "one token": ("raw", "The"),
    "non-English": ("raw", "Der Himmel über Köln ist blau, und 東京の空も青い。Pourquoi le ciel est-il bleu?"),
}


def loaded(profile: Path, **flags: object) -> Session:
    return load(str(profile), device="cpu", dtype="float32", **flags)


@pytest.fixture(scope="module")
def greedy_sessions(small: Sessions) -> dict[str, Session]:
    """SmolLM2 with prompt lookup, greedy; one session for raw prompts, one for chats."""
    settings = {"mode": "greedy", "max_new_tokens": 32}
    return {template: small(prompt__template=template, **settings) for template in ("raw", "chat")}


@pytest.fixture(scope="module")
def stretched_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's profile: the stretched target by its folder, SmolLM2 as it comes in its package as the draft."""
    profile = {
        "description": "SmolLM2 and 8 more layers, with SmolLM2 as the draft",
        "target": {"checkpoint": str(stretched()), "dtype": "float32"},
        "draft": {"kind": "checkpoint", "checkpoint": SMOLLM2, "dtype": "float32"},
        "decoding": {"k": 4, "max_new_tokens": 40},
    }
    path = tmp_path_factory.mktemp("profiles") / "stretched.yaml"
    path.write_text(yaml.safe_dump(profile), encoding="utf-8")
    return path


def with_sampling(session: Session, **changes: object) -> Session:
    """The session under other settings, without loading its weights again."""
    sampling = dataclasses.replace(session.sampling, **changes)
    return dataclasses.replace(session, pair=dataclasses.replace(session.pair, sampling=sampling))


def pooled(session: Session, runs: Sequence[Generation]) -> SelfCheck:
    """The check of itself over several runs; all of them speculative, or all plain."""
    pair = session.pair
    check = SelfCheck(drift_bound(pair.dtype, pair.sampling.temperature))
    for generation in runs:
        check.add(pair.target, generation.drafter, pair.processors, generation.prompt, generation.rounds)
    return check


def judged(check: SelfCheck) -> set[str]:
    """The rows that passed on numbers, not for want of any."""
    return {row.name for row in check.result().rows if row.passed}


def cells(table: Table) -> dict[str, list[str]]:
    return {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}


def summary_rows(generation: Generation, check: CheckResult, cost: dict[str, float] | None) -> dict[str, str]:
    result = result_of(generation, check, cost, prompt="x", name="x")
    shown = run_module.summary(result, plain_data(generation.pair.sampling))
    names, values = (column.cells for column in shown.columns)
    return {str(name): str(value) for name, value in zip(names, values, strict=True)}


def assert_numbers(values: Sequence[str], what: str) -> None:
    assert values, f"{what}: no row"
    for value in values:
        try:
            assert math.isfinite(float(value.rstrip("%"))), f"{what}: {value}"
        except ValueError:
            pytest.fail(f"{what}: {value!r} is not a number, in {values}")


def assert_tables_filled(generation: Generation) -> None:
    statistics = generation.statistics

    rounds = cells(run_module.rounds_table(generation.rounds))
    shown = [i for i, cell in enumerate(rounds["round"]) if cell != "…"]
    assert len(shown) == min(len(generation.rounds), 2 * run_module.SHOWN_ROUNDS)
    for name, column in rounds.items():
        numbers = [column[i] for i in shown if name != "overlap" or int(rounds["tested"][i]) > 0]
        assert_numbers(numbers, f"rounds: {name}")

    positions = cells(run_module.positions_table(statistics))
    assert positions["position"] == [str(j) for j in range(1, generation.pair.sampling.k + 1)]
    for name, column in positions.items():
        assert_numbers(column, f"positions: {name}")

    latency = cells(run_module.latency_table(statistics, generation.prefill_s))
    *decoding, prefill = range(len(latency["what"]))
    assert latency["what"][prefill] == "prefill"
    for name in ("n", "median ms", "p90 ms", "share of decoding"):
        assert_numbers([latency[name][i] for i in decoding], f"latency: {name}")
    assert_numbers([latency["median ms"][prefill]], "latency: prefill")
    shares = [float(latency["share of decoding"][i].rstrip("%")) for i in decoding[:3]]
    assert sum(shares) == pytest.approx(100, abs=0.2), "draft, verification and other make up the time"

    cost = generation.probe_cost(1)
    summary = summary_rows(generation, generation.check(), cost)
    assert f"{statistics.alpha:.3f} = {statistics.accepted} accepted" in summary["acceptance α"]
    assert f"predicts {statistics.predicted_alpha:.3f}" in summary["acceptance α"]
    assert f"{statistics.tau:.3f} = " in summary["block efficiency τ"]
    for name in ("acceptance α", "block efficiency τ", "cost c", "tokens/s", "settings"):
        assert summary[name].strip(" -"), name
        assert not summary[name].startswith("-"), f"{name}: {summary[name]}"


class TestStretched:
    pytestmark = smollm2

    @pytest.fixture(scope="class")
    @staticmethod
    def sessions(stretched_profile: Path) -> dict[str, Session]:
        """Greedy and exact, by the profile and a flag each."""
        flags = {"decoding.seed": 3, "device": "cpu", "dtype": "float32", "engine": "eager"}
        found: dict[str, Session] = {}
        for mode in ("greedy", "exact"):
            profile = load_profile(str(stretched_profile), {**flags, "decoding.mode": mode})
            found[mode] = load_session(profile, share=found.get("greedy"))
        return found

    def test_checkpoint_is_smollm2_with_more_layers(self, sessions: dict[str, Session]) -> None:
        pair = sessions["exact"].pair
        target, draft = pair.target.model, pair.drafter.model.model
        assert (target.config.num_hidden_layers, draft.config.num_hidden_layers) == (38, 30)
        assert len(target.model.layers) == 38
        assert target.lm_head.weight is target.model.embed_tokens.weight
        theirs = draft.state_dict()
        same = [torch.equal(weight, theirs[name]) for name, weight in target.state_dict().items() if name in theirs]
        assert len(same) == len(theirs)
        assert all(same)
        added = target.model.layers[30].mlp
        assert torch.equal(added.up_proj.weight, draft.model.layers[0].mlp.up_proj.weight)
        assert 0 < added.down_proj.weight.std() < 0.2

    @pytest.mark.parametrize("mode", ["exact", "greedy"])
    def test_real_pair_on_real_text(self, sessions: dict[str, Session], mode: str) -> None:
        session = sessions[mode]
        runs = []
        for prompt in (CHAT, STORY):
            runs.append(session.generate(prompt).run())
            assert runs[-1].text.strip()
            assert_tables_filled(runs[-1])  # before the next run: the cost is probed on the caches as they stand
        accepted = sum(g.statistics.accepted for g in runs)
        tested = sum(g.statistics.tested for g in runs)
        alpha = accepted / tested
        assert 0.3 < alpha < 0.95
        overlaps = [overlap for g in runs for r in g.rounds for overlap in r.overlaps]
        assert len(overlaps) == tested
        error = math.sqrt(sum(b * (1 - b) for b in overlaps)) / tested
        assert abs(alpha - sum(overlaps) / tested) <= 4 * error + 1e-5
        origins = {c.origin for g in runs for r in g.rounds for c in r.committed}
        assert origins == {Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS}
        for generation in runs:
            check = generation.check()
            assert check.passed, check.verdict
            if mode == "exact":
                assert check.positions == len(generation.tokens)
            else:
                assert "not applicable" in check.verdict
        if mode == "greedy":
            assert {round(b, 5) for b in overlaps} <= {0.0, 1.0}
        else:
            assert any(0.01 < b < 0.99 for b in overlaps)

    def test_processors_act_on_both_sides(self, stretched_profile: Path) -> None:
        """With a processor that reads the text and one that cuts off, acceptance still is what the overlap says."""
        session = loaded(stretched_profile, max_new_tokens=32, **SETTINGS)
        runs = [with_sampling(session, seed=seed).generate(STORY).run() for seed in range(2)]
        check = pooled(session, runs)
        result = check.result()
        assert result.passed, result.verdict
        assert {"drift", "drift of overlap", "surprisal z, all", "acceptance z", "draft z, tested"} <= judged(check)
        alpha = sum(g.statistics.accepted for g in runs) / sum(g.statistics.tested for g in runs)
        assert 0.3 < alpha < 0.95

    def test_greedy_equals_generate(self, sessions: dict[str, Session]) -> None:
        assert_greedy_equal(with_sampling(sessions["greedy"], max_new_tokens=32), CHAT, ks=(4,))


def reference(session: Session, prompt: list[int]) -> list[int]:
    """What transformers' generate makes of the prompt, greedily."""
    sampling = session.sampling
    with torch.inference_mode():
        out = session.pair.target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.end_tokens),
            pad_token_id=sampling.end_tokens[0],
        )
    return out[0, len(prompt) :].tolist()


def margins(session: Session, text: list[int], a: int, b: int, width: int) -> tuple[float, float]:
    """How far apart the logits of two tokens are after the text, in a 1-token call and in a (k+1)-token call."""
    found = []
    for rows in (1, width):
        rows = min(rows, len(text))
        model = session.pair.target
        model.reset()
        if text[:-rows]:
            model.forward(torch.tensor([text[:-rows]]), 1)
        logits = model.forward(torch.tensor([text[-rows:]]), 1)[0, 0]
        found.append(abs(float(logits[a] - logits[b])))
    return found[0], found[1]


def assert_greedy_equal(session: Session, prompt: str, ks: Sequence[int]) -> None:
    """Token for token what transformers yields; a difference is let pass only at a near tie of both kinds of call."""
    assert session.sampling.mode is Mode.GREEDY
    tokens = session.encode(prompt)
    theirs = reference(session, tokens)
    for k in ks:
        generation = with_sampling(session, k=k).generate(tokens).run()
        ours = list(generation.tokens)
        if ours == theirs:
            continue
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        assert at is not None, f"k={k}: one text is the beginning of the other: {ours} {theirs}"
        gaps = margins(session, [*tokens, *theirs[:at]], ours[at], theirs[at], k + 1)
        assert max(gaps) < NEAR_TIE, f"k={k}: token {at} is {ours[at]}, not {theirs[at]}; logits differ by {gaps}"


class TestGreedy:
    pytestmark = smollm2

    @pytest.mark.parametrize("shape", PROMPTS)
    def test_equals_generate(self, greedy_sessions: dict[str, Session], shape: str) -> None:
        template, prompt = PROMPTS[shape]
        session = greedy_sessions[template]
        if shape == "one token":
            assert len(session.encode(prompt)) == 1
        if shape == "long":
            assert len(session.encode(prompt)) > 350
        assert_greedy_equal(session, prompt, ks=(1, 8))  # what lies between, tiny models show in every call's width

    def test_prompt_lookup_has_something_to_say(self, greedy_sessions: dict[str, Session]) -> None:
        """The equality above would hold for a draft that never proposes: on repeating text it is accepted."""
        statistics = with_sampling(greedy_sessions["raw"], k=4).generate(LONG).run().statistics
        assert statistics.accepted > 0
        assert statistics.rounds < statistics.committed

    def test_near_ties_alone_are_let_pass(self, greedy_sessions: dict[str, Session]) -> None:
        """A loop that commits the second-best token is told apart from a near tie."""
        session = greedy_sessions["raw"]
        text = session.encode(CODE)
        logits = session.pair.target.model(torch.tensor([text])).logits[0, -1]
        best, second = logits.topk(2).indices.tolist()
        gaps = margins(session, text, best, second, 5)
        assert gaps == pytest.approx([float(logits[best] - logits[second])] * 2, abs=5e-3)
        assert min(gaps) > NEAR_TIE


class TestExact:
    pytestmark = smollm2

    @pytest.fixture(scope="class")
    @staticmethod
    def session(small: Sessions) -> Session:
        return small(k=4, max_new_tokens=32, prompt__template="chat", **SETTINGS)

    def test_check_of_itself_over_seeds(self, session: Session) -> None:
        prompt = "Repeat this list three times: red, green, blue, yellow, red, green, blue, yellow."
        runs = [with_sampling(session, seed=seed).generate(prompt).run() for seed in range(3)]
        assert len({generation.tokens for generation in runs}) > 1, "seeds make different texts"
        assert sum(generation.statistics.accepted for generation in runs) > 0
        check = pooled(session, runs)
        result = check.result()
        assert result.passed, result.verdict
        assert result.positions == sum(len(generation.tokens) for generation in runs)
        assert {"drift", "drift of overlap", "impossible events", "surprisal z, all"} <= judged(check)
        shown = summary_rows(runs[0], result, None)["settings"]
        for name, value in SETTINGS.items():
            assert f"{name} {value} (flag)" in shown

    def test_check_of_itself_sees_another_temperature(self, session: Session, small: Sessions) -> None:
        """What it would say of the same text, had it been drawn at .8 where 1 was promised."""
        runs = [session.generate(CHAT).run()]
        promised = small(k=4, **{**SETTINGS, "temperature": 1.0})
        honest = pooled(session, runs).result()
        assert honest.passed, honest.verdict
        other = dataclasses.replace(
            session, pair=dataclasses.replace(session.pair, processors=promised.pair.processors)
        )
        result = pooled(other, runs).result()
        failed = {row.name for row in result.rows if row.passed is False}
        assert failed & {"drift", "support"}, result.verdict

    def test_same_seed_same_text(self, session: Session) -> None:
        first, again = (session.generate(STORY).run() for _ in range(2))
        assert first.tokens == again.tokens
        assert [r.accepted for r in first.rounds] == [r.accepted for r in again.rounds]
        other = with_sampling(session, seed=1).generate(STORY).run()
        assert other.tokens != first.tokens

    def test_plain_run_checks_itself(self, session: Session) -> None:
        runs = [with_sampling(session, seed=seed).generate(STORY, plain=True).run() for seed in range(2)]
        for generation in runs:
            assert {c.origin for r in generation.rounds for c in r.committed} == {Origin.PLAIN}
            check = generation.check()
            assert check.passed, check.verdict
            assert check.positions == len(generation.tokens)
        assert {"drift", "surprisal z, all"} <= judged(pooled(session, runs))


@pytest.mark.slow
def test_builtin_profiles_ship_in_the_wheel(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "pip", "wheel", str(root), "--no-deps", "--quiet", "-w", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    unavailable = ("No matching distribution found for hatchling", "Could not find a version that satisfies")
    if done.returncode and any(words in done.stderr for words in unavailable):
        pytest.skip("the build backend cannot be fetched")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("specgen-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        source = (root / "profiles" / "smollm2.yaml").read_bytes()
        assert archive.read("specgen/profiles_builtin/smollm2.yaml") == source
    expected = {f"specgen/profiles_builtin/{path.name}" for path in (root / "profiles").glob("*.yaml")}
    assert expected <= names
    assert "specgen/cli/run.py" in names
    assert not [name for name in names if name.startswith("tests/")]
