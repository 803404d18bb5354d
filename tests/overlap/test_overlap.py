"""Acceptance from text alone: against direct computation, and against what generation then shows."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from specgen.cli import overlap as overlap_module
from specgen.decoding.eager import autoregressive, speculative, start
from specgen.decoding.generation import Generation
from specgen.decoding.pair import Pair
from specgen.decoding.probe import few_widths, probe
from specgen.decoding.text import pieces
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.ngram import NgramDrafter
from specgen.models import causal
from specgen.overlap.failures import deciles, groups, histogram, kind_of, worst
from specgen.overlap.predict import UnitCosts, predictions
from specgen.overlap.score import TEMPERATURES, TextScores, at_temperature, score_text, scores_from_positions, spans
from specgen.results.document import json_text
from specgen.results.overlap import Overlap
from specgen.rounds.costs import CallCosts, predicted_speedup
from specgen.rounds.expected import constant_alpha_tau, expected_rounds, pooled
from specgen.rounds.record import ends_at
from specgen.sampling.processors import Processors
from specgen.sampling.randomness import KeyedUniforms
from specgen.settings import Mode, Sampling
from support.command import write_pair
from support.doubles import TableModel, enumerate_law, random_table

EXACT = Sampling()


def score(target: Any, draft: Any, tokens: list[int], first: int = 1, sampling: Sampling = EXACT, **options) -> Any:
    processors = Processors.of(sampling)
    return score_text(target, ModelDrafter(draft, processors), processors, sampling, tokens, first, **options)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_draft_that_is_silent_at_times_has_the_expected_rounds_of_the_loop(k: int) -> None:
    prompt, length = [0, 1, 0], 4
    target, processors = TableModel(random_table(3, 5)), Processors([])

    def run(uniforms) -> tuple:
        drafter = NgramDrafter(3, max_ngram=2, min_ngram=2, dtype=torch.float64)
        start(target, drafter, prompt)
        rounds = list(
            speculative(
                target, drafter, processors, prompt, k=k, max_new_tokens=length, uniforms=uniforms, ended=ends_at([])
            )
        )
        tested = tuple(sum(r.tested > j for r in rounds) for j in range(k))
        accepted = tuple(sum(r.accepted > j for r in rounds) for j in range(k))
        text = tuple(t for r in rounds for t in r.tokens)
        return (text, len(rounds), tested, accepted, sum(r.drafted for r in rounds))

    law = enumerate_law(run)
    silent = 0
    for text in {outcome[0] for outcome in law}:
        outcomes = {o: w for o, w in law.items() if o[0] == text}
        weight = sum(outcomes.values())
        drafter = NgramDrafter(3, max_ngram=2, min_ngram=2, dtype=torch.float64)
        scores = score_text(target, drafter, processors, EXACT, [*prompt, *text], len(prompt))
        silent += scores.proposes.count(False)
        expected = scores.rounds(k)
        assert expected.rounds == pytest.approx(sum(w * o[1] for o, w in outcomes.items()) / weight, abs=1e-12)
        for j in range(k):
            for part, found in ((2, expected.tested), (3, expected.accepted)):
                mean = sum(w * o[part][j] for o, w in outcomes.items()) / weight
                assert found[j] == pytest.approx(mean, abs=1e-12)
        assert expected.drafted >= sum(w * o[4] for o, w in outcomes.items()) / weight - 1e-12
        assert sum(expected.lengths) == pytest.approx(expected.rounds, abs=1e-12)
    assert silent > 0


def test_silence_ends_the_draft_and_is_not_a_rejection() -> None:
    """Tokens 1 and 2 would be accepted, 0 and 3 have no proposal: rounds [0], [1, 2, 3]."""
    e = expected_rounds([0, 1, 1, 0], 3, limit=100, proposes=[False, True, True, False])
    assert (e.rounds, e.tested, e.accepted, e.lengths) == (2, (1, 1, 0), (1, 1, 0), (1, 0, 1, 0))
    as_rejection = expected_rounds([0, 1, 1, 0], 3, limit=100)
    assert as_rejection.tested == (2, 1, 1)
    cost = predicted_speedup(e, CallCosts({1: 1, 2: 2, 3: 3, 4: 4}, 0.5))
    assert cost == 4 / (1 + 3 + 2 * 0.5)
    both = pooled([e, e])
    assert (both.tokens, both.rounds, both.lengths) == (8, 4, (2, 0, 2, 0))
    with pytest.raises(ValueError, match="one a token"):
        expected_rounds([1.0], 1, proposes=[])
    with pytest.raises(ValueError, match="one k"):
        pooled([e, expected_rounds([1.0], 1)])


def sticky_pair() -> tuple[TableModel, TableModel]:
    """Two regimes, tokens 0–2 and 3–5, that the target leaves one time in 25. The draft is close in the first and
    far off in the second. Row t + 1 of a table with memory 1 is what follows token t."""
    target, draft = torch.empty(7, 6, dtype=torch.float64), torch.empty(7, 6, dtype=torch.float64)
    own, near, far = torch.tensor([[0.5, 0.4, 0.1], [0.65, 0.25, 0.1], [0.01, 0.01, 0.98]]).double()
    for row in range(7):
        inside = slice(0, 3) if row <= 3 else slice(3, 6)
        target[row], draft[row] = 0.04 / 3, 0.04 / 3
        target[row, inside] = 0.96 * own
        draft[row, inside] = 0.96 * (near if row <= 3 else far)
    return TableModel(target.log(), memory=1), TableModel(draft.log(), "draft", memory=1)


SEEDS, LENGTH = 40, 120


@pytest.fixture(scope="module")
def generated() -> dict[int, list[tuple[tuple[int, ...], list]]]:
    """By k: the text and the rounds of each seed's run."""
    target, draft = sticky_pair()
    processors = Processors([])
    runs: dict[int, list] = {}
    for k, seed in itertools.product((1, 2, 4, 8), range(SEEDS)):
        drafter = ModelDrafter(draft, processors)
        start(target, drafter, [0])
        rounds = list(
            speculative(
                target,
                drafter,
                processors,
                [0],
                k=k,
                max_new_tokens=LENGTH,
                uniforms=KeyedUniforms(seed, k),
                ended=ends_at([]),
            )
        )
        runs.setdefault(k, []).append((tuple(t for r in rounds for t in r.tokens), rounds))
    return runs


def standard_errors(differences: list[float]) -> float:
    """The mean, in units of its own standard error; 0 where all are 0."""
    mean, spread = np.mean(differences), np.std(differences, ddof=1) / math.sqrt(len(differences))
    return float(mean / spread) if spread > 0 else float(mean) * math.inf if abs(mean) > 1e-9 else 0.0


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_recursion_agrees_with_generation_and_a_constant_alpha_does_not(k: int, generated: dict) -> None:
    """Within 4 standard errors over seeds: target calls, and tested and accepted at each position of a round."""
    target, draft = sticky_pair()
    runs = generated[k]
    expected = [score(target, draft, [0, *text]).rounds(k, LENGTH) for text, _ in runs]
    calls = [len(rounds) for _, rounds in runs]
    assert abs(standard_errors([n - e.rounds for n, e in zip(calls, expected, strict=True)])) <= 4
    for j in range(k):
        tested = [sum(r.tested > j for r in rounds) for _, rounds in runs]
        accepted = [sum(r.accepted > j for r in rounds) for _, rounds in runs]
        assert abs(standard_errors([n - e.tested[j] for n, e in zip(tested, expected, strict=True)])) <= 4
        assert abs(standard_errors([n - e.accepted[j] for n, e in zip(accepted, expected, strict=True)])) <= 4
    if k > 1:  # with k = 1, τ is 1 + α for whatever α is
        constants = [LENGTH / constant_alpha_tau(e.alpha or 0.0, k) for e in expected]
        assert standard_errors([n - c for n, c in zip(calls, constants, strict=True)]) > 4


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_text_that_the_target_wrote_plainly_predicts_generation_of_other_text(k: int, generated: dict) -> None:
    target, draft = sticky_pair()
    processors, predicted = Processors([]), []
    for seed in range(SEEDS):
        start(target, None, [0])
        rounds = autoregressive(
            target, processors, [0], max_new_tokens=LENGTH, uniforms=KeyedUniforms(seed, 99), ended=ends_at([])
        )
        text = [t for r in rounds for t in r.tokens]
        predicted.append(score(target, draft, [0, *text]).rounds(k, LENGTH).rounds)
    calls = [len(rounds) for _, rounds in generated[k]]
    spread = math.sqrt((np.var(calls, ddof=1) + np.var(predicted, ddof=1)) / SEEDS)
    assert abs(np.mean(calls) - np.mean(predicted)) <= 4 * spread
    assert spread < 0.1 * np.mean(calls)  # else agreement would say nothing


TEXT = [0, 2, 1, 1, 3, 0, 2, 2, 1, 3, 0, 1]


def test_numbers_are_those_of_direct_computation() -> None:
    target, draft = TableModel(random_table(4, 1)), TableModel(random_table(4, 2), "draft")
    sampling = Sampling(temperature=0.8, top_k=3)
    scores = score(target, draft, TEXT, first=2, sampling=sampling)
    assert list(scores.overlaps) == [0.0, 0.5, 0.7, 0.8, 1.0]
    assert scores.tokens == tuple(TEXT[2:])
    impossible = 0
    for i, token in enumerate(TEXT[2:], 2):
        rows = [m.logits(TEXT[:i]) for m in (target, draft)]
        for t in scores.overlaps:
            if t == 0:
                beta = float(rows[0].argmax() == rows[1].argmax())
            else:
                p, q = (torch.where(r >= r.topk(3).values[-1], r / t, -torch.inf).softmax(-1).tolist() for r in rows)
                beta = sum(min(a, b) for a, b in zip(p, q, strict=True))
            assert scores.overlaps[t][i - 2] == pytest.approx(beta, abs=1e-12)
            if t == 0.8:
                ratio = min(1.0, q[token] / p[token]) if p[token] else beta
                impossible += p[token] == 0
                assert scores.ratios[i - 2] == pytest.approx(ratio, abs=1e-12)
                log_prob = math.log(p[token]) if p[token] else -math.inf
                assert scores.target_log_probs[i - 2] == pytest.approx(log_prob, abs=1e-12)
    assert scores.impossible == impossible > 0


def test_greedy_overlap_is_agreement_and_so_is_the_ratio_of_greedy_text() -> None:
    target, draft = TableModel(random_table(4, 3)), TableModel(random_table(4, 4), "draft")
    text = [0]
    for _ in range(30):
        text.append(int(target.logits(text).argmax()))
    agree = [float(int(draft.logits(text[:i]).argmax()) == text[i]) for i in range(1, len(text))]
    scores = score(target, draft, text, sampling=Sampling(mode=Mode.GREEDY, temperature=None))
    assert scores.temperature == 0
    assert list(scores.overlaps) == list(TEMPERATURES)
    assert list(scores.ratios) == list(scores.overlap) == agree
    assert 0 < sum(agree) < len(agree)


class InChunks(TableModel):
    """Scores in chunks of `size` rows, as a model does with a long text."""

    size = 3

    def score(self, tokens, start):
        for first in range(start, len(tokens), self.size):
            end = min(first + self.size, len(tokens))
            yield first, torch.stack([self.logits(tokens[:i]) for i in range(first, end)])


@pytest.mark.parametrize("penalty", [None, 1.3])
def test_chunks_and_blocks_leave_every_number_as_it_is(
    penalty: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=penalty)
    text = (TEXT * 9)[:100]
    whole = score(TableModel(random_table(4, 1)), TableModel(random_table(4, 2), "draft"), text, sampling=sampling)
    target, draft = InChunks(random_table(4, 1)), InChunks(random_table(4, 2), "draft")
    draft.size = 5
    monkeypatch.setattr("specgen.overlap.score.BLOCK", 7)
    told: list[int] = []
    assert score(target, draft, text, sampling=sampling, progress=told.append) == whole
    assert told == [*range(7, 99, 7), 99]


def test_a_penalty_is_of_the_whole_text_before_each_token() -> None:
    """A token that occurred only once, long before, is still penalised: chunking must not hide it."""
    table = torch.zeros(1, 4, dtype=torch.float64)
    table[0, 3] = 2.0
    text = [3, *[0, 1] * 30]
    sampling = Sampling(repetition_penalty=2.0)
    scores = score(TableModel(table), TableModel(table.clone(), "draft"), text, sampling=sampling)
    other = math.log(1 / (3 + math.e))  # the penalised 3 counts e^(2/2); logits of 0 stay 0
    assert scores.target_log_probs == pytest.approx([other] * 60)


def test_other_temperatures_keep_the_other_processors() -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, ban=(1,), repetition_penalty=1.2)
    kept = at_temperature(Processors.of(sampling), sampling, 0.5)
    same = Processors.of(Sampling(temperature=0.5, top_p=0.9, ban=(1,), repetition_penalty=1.2))
    logits = random_table(6, 8, rows=3)
    assert torch.equal(kept(logits, [0, 2]), same(logits, [0, 2]))
    greedy = at_temperature(Processors.of(sampling), sampling, 0)
    assert [type(p).__name__ for p in greedy.chain] == [
        "RepetitionPenaltyLogitsProcessor",
        "Ban",
    ]
    assert greedy.greedy
    logits[:, 1] = 100
    assert int(greedy(logits, [0])[0].argmax()) != 1


def test_windows_score_each_token_once_with_half_a_context_before_it() -> None:
    assert spans(10, 1, None) == [(0, 10, 1)]
    assert spans(10, 3, 10) == [(0, 10, 3)]
    assert spans(21, 1, 8) == [(0, 8, 1), (4, 12, 8), (8, 16, 12), (12, 20, 16), (16, 21, 20)]
    for length, context in itertools.product(range(2, 60), range(2, 20)):
        found = spans(length, 1, context)
        scored = [i for _, end, first in found for i in range(first, end)]
        assert scored == list(range(1, length))
        assert all(end - begin <= context and first > begin for begin, end, first in found)


def test_windows_with_a_model_that_sees_no_further_change_nothing() -> None:
    target, draft = TableModel(random_table(4, 1)), TableModel(random_table(4, 2), "draft")  # memory of 2 tokens
    text = TEXT * 4
    windowed = score(target, draft, text, context=8)
    assert windowed.windows == 11
    assert windowed.ratios == score(target, draft, text).ratios


def test_a_drafter_that_looks_up() -> None:
    """0 1 2 0 1 | 2 0 3 0: after (0, 1) it proposes 2, after (1, 2) it proposes 0, after (2, 0) 1; then nothing."""
    target = TableModel(random_table(4, 7))
    drafter = NgramDrafter(4, max_ngram=2, min_ngram=2, dtype=torch.float64)
    text = [0, 1, 2, 0, 1, 2, 0, 3, 0]
    scores = score_text(target, drafter, Processors([]), EXACT, text, 5)
    probs = [target.logits(text[:i]).softmax(-1) for i in range(5, 9)]
    assert scores.proposes == (True, True, True, False)
    assert scores.ratios == (1.0, 1.0, 0.0, 0.0)
    assert scores.at(1.0) == pytest.approx([float(probs[0][2]), float(probs[1][0]), float(probs[2][1])])
    assert scores.overlap[3] == 0.0
    columns = scores.positions()
    assert columns["ratio"] == [1.0, 1.0, 0.0, None]
    assert columns["overlap"][3] is None


def test_nothing_to_score_is_refused() -> None:
    target, draft = TableModel(random_table(4, 1)), TableModel(random_table(4, 2), "draft")
    for text, first in (([0], 1), ([0, 1], 0), ([0, 1], 2)):
        with pytest.raises(ValueError, match="cannot score"):
            score(target, draft, text, first=first)


def test_distribution_and_groups() -> None:
    assert histogram([0.0, 0.05, 0.1, 0.95, 1.0, 1.0 + 1e-12]) == [2, 1, 0, 0, 0, 0, 0, 0, 0, 3]
    assert histogram([]) == [0] * 10
    assert deciles(list(np.linspace(0, 1, 11))) == pytest.approx([0.1 * i for i in range(1, 10)])
    assert deciles([]) == []
    found = groups(["a", "b", "a", "c"], [0.5, 1.0, 0.0, 0.5])
    assert [(g.name, g.count, g.overlap, g.lost) for g in found] == [
        ("a", 2, 0.25, 0.75),
        ("c", 1, 0.5, 0.25),
        ("b", 1, 1.0, 0.0),
    ]
    assert [g.name for g in worst(found, min_count=1)] == ["a", "c"]
    assert [g.name for g in worst(found, min_count=2)] == ["a"]
    assert [g.name for g in worst(found, min_count=1, most=1)] == ["a"]
    assert groups(["a"], [1.0])[0].lost == 0.0


@pytest.mark.parametrize(
    ("piece", "before", "kind"),
    [
        (" the", "of", "word start"),
        ("The", "", "word start"),
        ("the", "(", "word start"),
        ("x", "\n", "word start"),
        ("ing", "go", "word continuation"),
        ("é", "caf", "word continuation"),
        ("'s", "it", "word start"),
        ("12", "", "digits"),
        (" 7", "a", "digits"),
        (", ", "a", "punctuation"),
        ("€", "", "punctuation"),
        (" ", "a", "whitespace"),
        ("\n\n", "a", "whitespace"),
        ("", "a", "other"),
        ("\ufffd", "a", "other"),
    ],
)
def test_kinds(piece: str, before: str, kind: str) -> None:
    assert kind_of(piece, before) == kind


def test_pieces_keep_the_space_that_a_lone_token_loses() -> None:
    class Tokenizer:
        words = ("▁a", "b", "▁c")

        def decode(self, ids, **_):
            return "".join(self.words[i] for i in ids).replace("▁", " ").lstrip()

    assert pieces(Tokenizer(), [0, 1, 2], 0) == ["a", "b", " c"]
    assert pieces(Tokenizer(), [0, 1, 2], 2) == [" c"]
    assert pieces(None, [7, 8], 0) == [" 7", " 8"]


def test_predictions_of_texts_together() -> None:
    def text(ratios: list[float]) -> TextScores:
        n = len(ratios)
        return TextScores((0,) * n, (0.0,) * n, tuple(ratios), (True,) * n, {1.0: tuple(ratios)}, 1.0)

    texts = [text([1.0] * 4), text([0.0] * 4)]
    (one, two) = predictions(texts, [1, 2], CallCosts({1: 1, 2: 1.5, 3: 2}, 0.5))
    assert (one.tau, one.alpha, one.rounds, one.drafted) == (8 / 6, 2 / 5, 6, 5)
    assert one.speedup == 8 / (1 + 5 * 1.5 + 5 * 0.5)
    assert two.tested == (1 + 3, 1 + 0)
    assert two.k == 2


def test_positions_survive_json() -> None:
    target = TableModel(random_table(4, 7))
    drafter = NgramDrafter(4, dtype=torch.float64)
    sampling = Sampling(top_k=2)
    scores = score_text(target, drafter, Processors.of(sampling), sampling, TEXT, 1)
    assert -math.inf in scores.target_log_probs
    assert {True, False} == set(scores.proposes)
    again = scores_from_positions(json.loads(json.dumps(scores.positions(), allow_nan=False)), 1.0)
    for name in ("tokens", "target_log_probs", "ratios", "proposes", "overlap", "temperature"):
        assert getattr(again, name) == getattr(scores, name)
    assert again.rounds(3) == scores.rounds(3)


def test_costs_are_in_units_of_a_single_token_call() -> None:
    """A clock that counts tokens fed: a call on w tokens costs w, a draft step 1."""
    fed = 0

    class Counting(TableModel):
        def forward(self, tokens, rows):
            nonlocal fed
            fed += tokens.shape[-1]
            return super().forward(tokens, rows)

    target, draft = Counting(random_table(4, 1)), Counting(random_table(4, 2), "draft")
    processors = Processors([])
    pair = Pair(target, ModelDrafter(draft, processors), processors, EXACT, None, torch.float64, lambda: float(fed))
    seconds = probe(pair, TEXT, few_widths(6))
    costs = UnitCosts.measured(seconds, 6)
    assert costs.c == costs.draft_s == 1
    assert costs.verify == (1, 2, 3, 4, 5, 6, 7)
    assert costs.target_s == {1: 1, 2: 2, 3: 3, 5: 5, 7: 7}
    assert probe(pair, TEXT, few_widths(6), context=8) == seconds
    # A run's probe is the same, at the end of its own text, to which it rolls both caches back.
    generation = Generation(pair, TEXT[:2]).run()
    assert generation.probe_cost() == {"target_s": 1, "draft_s": 1, "c": 1}
    assert (target.lengths, pair.drafter.cached) == (
        (2 + len(generation.tokens) - 1,),
        2 + len(generation.tokens) - 1,
    )
    with pytest.raises(ValueError, match="no room for k = 7"):
        probe(pair, TEXT, few_widths(7), context=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlap")
    write_pair(folder)
    (folder / "p.txt").write_text("a [bold]loaf[/bold] of bacon. " * 14)
    (folder / "[red]q.txt").write_text("dim mode, b", encoding="utf-8")
    (folder / "one.txt").write_text("a")
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "ngram.yaml").write_text("target: {checkpoint: ./target}\ndraft: {kind: ngram, min_ngram: 2}\n")
    (folder / "alone.yaml").write_text("target: {checkpoint: ./target}\n")
    return folder


def invoke(folder: Path, *arguments: str, profile: str = "pair.yaml") -> Any:
    app = typer.Typer()
    app.command("other")(lambda: None)
    overlap_module.register(app)
    names = [str(folder / a) if (folder / a).is_file() else a for a in arguments]
    environment = {"COLUMNS": "140", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, ["overlap", "--profile", str(folder / profile), *names], env=environment)


def result_of(folder: Path, *arguments: str, profile: str = "pair.yaml") -> Any:
    result = invoke(folder, *arguments, "--json", profile=profile)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_json_holds_every_position_and_agrees_with_itself(folder: Path) -> None:
    data = result_of(folder, "p.txt", "[red]q.txt", "--c", "0.1", "--max-k", "3")
    assert (data["schema_version"], data["kind"], data["own"]) == (2, "overlap", None)
    assert data["costs"]["verify"] == [1.0] * 4
    assert data["costs"]["from"] == "given"
    assert json.loads(json_text(Overlap.model_validate(data))) == data
    assert "only indicative" in data["notes"][0]
    assert {"packages", "git", "threads"} <= data["environment"].keys()
    texts = []
    for entry in data["results"]:
        scores = scores_from_positions(entry["positions"], data["temperature"])
        texts.append(scores)
        assert entry["tokens"] == len(scores.tokens)
        shown = next(t for t in entry["temperatures"] if t["temperature"] == 1.0)
        assert shown["overlap"] == pytest.approx(np.mean(scores.overlap), abs=1e-12)
        assert sum(shown["histogram"]) == len(scores.tokens)
        assert [p["tau"] for p in entry["predictions"]] == [scores.rounds(k).tau for k in (1, 2, 3)]
    again = predictions(texts, [1, 2, 3], CallCosts({1: 1.0}, 0.1))
    assert [p["speedup"] for p in data["overall"]["predictions"]] == [p.speedup for p in again]
    kinds = {g["name"]: g["count"] for g in data["overall"]["kinds"]}
    assert sum(kinds.values()) == sum(len(t.tokens) for t in texts)
    assert {"word start", "word continuation", "punctuation", "whitespace"} <= kinds.keys()
    assert all(g["count"] >= 3 for g in data["overall"]["worst_tokens"])


def test_chunks_of_a_real_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [result_of(folder, "p.txt", "--c", "0", "--max-k", "1")["results"][0]["positions"]]
    monkeypatch.setattr(causal, "SCORE_CHUNK", 40)
    columns.append(result_of(folder, "p.txt", "--c", "0", "--max-k", "1")["results"][0]["positions"])
    assert len(columns[0]["token"]) > 200
    for name in ("target_log_prob", "ratio", "overlap"):
        assert columns[1][name] == pytest.approx(columns[0][name], abs=1e-4)


def test_own_text_is_written_by_the_target_and_repeats(folder: Path) -> None:
    data = result_of(folder, "[red]q.txt", "--own", "30", "--c", "0.1", "--seed", "5")
    assert data["own"] == 30
    assert "the target wrote" in data["notes"][0]
    (entry,) = data["results"]
    assert entry["tokens"] == 30
    assert len(entry["predictions"]) == 16
    from specgen import load

    session = load(str(folder / "pair.yaml"), plain=True, seed=5, max_new_tokens=30)
    written = session.generate("dim mode, b", plain=True).run().tokens
    assert entry["positions"]["token"] == list(written)
    fresh = session.generate("dim mode, b", plain=True).run().rounds
    assert entry["positions"]["target_log_prob"] == pytest.approx([r.committed[0].log_prob for r in fresh], abs=1e-4)
    other = result_of(folder, "[red]q.txt", "--own", "30", "--c", "0.1", "--seed", "6")
    assert other["results"][0]["positions"]["token"] != list(written)


def test_the_table_goes_to_stdout_and_measures_c(folder: Path) -> None:
    result = invoke(folder, "p.txt", "[red]q.txt", "--max-k", "5")
    assert result.exit_code == 0, result.stderr
    for words in (
        "greedy agreement",
        "T 0.7",
        "all texts",
        "[red]q.txt",
        "word start",
        "measured here",
        "indicative",
    ):
        assert words in result.stdout
    assert "'[bold]' (21)" in result.stdout
    assert "\x1b" not in result.stdout
    given = invoke(folder, "p.txt", "--max-k", "2", "--verify-cost", "1,1.25,1.5", "--c", "0.25")
    assert "c = 0.2500, given" in given.stdout
    assert "1.250" in given.stdout


def test_ngram_drafts_are_silent_at_times(folder: Path) -> None:
    data = result_of(folder, "[red]q.txt", "p.txt", "--c", "0", "--max-k", "4", profile="ngram.yaml")
    first, second = data["results"]
    assert first["proposed"] < first["tokens"]
    assert first["positions"]["ratio"].count(None) == first["tokens"] - first["proposed"]
    assert second["predictions"][3]["tau"] > 2  # a text that repeats itself
    assert any("proposes nothing at" in note for note in data["notes"])
    table = invoke(folder, "[red]q.txt", "--max-k", "2", profile="ngram.yaml")
    assert table.exit_code == 0, table.stderr


def test_a_text_longer_than_the_context(folder: Path, tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        for file in (folder / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    for name in ("pair.yaml", "p.txt"):
        (tmp_path / name).write_text((folder / name).read_text())
    data = result_of(tmp_path, "p.txt", "--max-k", "2")
    (entry,) = data["results"]
    whole = result_of(folder, "p.txt", "--c", "0")["results"][0]["positions"]
    assert entry["windows"] > 5
    assert entry["positions"]["token"] == whole["token"]
    assert entry["positions"]["ratio"][:63] == pytest.approx(whole["ratio"][:63], abs=1e-4)
    assert entry["positions"]["ratio"] != pytest.approx(whole["ratio"], abs=1e-4)
    assert any("half overlap" in note for note in data["notes"])
    refused = invoke(tmp_path, "p.txt", "--max-k", "64")
    assert refused.exit_code == 2
    assert "--max-k" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "profile", "words"),
    [
        (("one.txt",), "pair.yaml", "at least 2"),
        (("empty.txt",), "pair.yaml", "empty"),
        (("latin.txt",), "pair.yaml", "not UTF-8"),
        (("gone.txt",), "pair.yaml", "no such file"),
        (("p.txt", "--verify-cost", "1,2"), "pair.yaml", "--max-k 1"),
        (("p.txt", "--verify-cost", "2,3", "--max-k", "1"), "pair.yaml", "first of them 1"),
        (("p.txt", "--verify-cost", "1,x"), "pair.yaml", "needs numbers"),
        (("p.txt", "--c", "-1"), "pair.yaml", "0 or more"),
        (("p.txt", "--chat"), "pair.yaml", "--own"),
        (("p.txt",), "alone.yaml", "no draft"),
        (("p.txt", "--own", "40000"), "pair.yaml", "with --own 40000"),
    ],
)
def test_bad_usage_is_one_line(folder: Path, arguments: tuple[str, ...], profile: str, words: str) -> None:
    result = invoke(folder, *arguments, profile=profile)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("specgen: ")
    assert words in result.stderr
    assert 1 <= len(result.stderr.splitlines()) <= 2
