"""The law of the whole loop, leaf by leaf, against the target's joint law; and faults that this must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.decoding.eager import autoregressive, speculative, start
from specgen.drafting import checkpoint
from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.drafter import Drafter
from specgen.drafting.ngram import NgramDrafter
from specgen.rounds.record import Round, ends_at
from specgen.sampling import randomness
from specgen.sampling.processors import Processors
from specgen.settings import Mode, Sampling
from specgen.verification import judge
from specgen.verification import rules as rules_module
from specgen.verification.rules import RULES, Rule, accept_exact
from support.doubles import (
    AdaptiveK,
    BonusFromDraft,
    DropsUnlikely,
    Enumerating,
    KeyWithoutRound,
    OneKeyForTwo,
    PenaltyFromRoundStart,
    StopsEarly,
    TableModel,
    UnprocessedProbs,
    difference,
    enumerate_law,
    joint_law,
    membership,
    mutant,
    random_table,
    raw_resample,
)

PROMPT = [2, 2]  # not every token: a penalty must tell those that have come from those that have not
ZERO = torch.finfo(torch.float64).min  # the logit of a token that must not come
VISIBLE = 1e-3


def law_of(
    target: TableModel,
    drafter: Drafter | None,
    s: Sampling,
    *,
    prompt: list[int] = PROMPT,
    processors: Processors | None = None,
    rule: Rule = RULES[Mode.EXACT],
    uniforms: Enumerating | None = None,
    seen: Callable[[Round], None] = lambda r: None,
) -> dict[tuple[int, ...], float]:
    """The exact law of the texts that the loop writes."""
    processors = processors or Processors.of(s)
    ended, n = ends_at(s.end_tokens), s.max_new_tokens

    def run(u: Enumerating) -> tuple[int, ...]:
        start(target, drafter, prompt)
        if drafter is None:
            rounds = autoregressive(target, processors, prompt, max_new_tokens=n, uniforms=u, ended=ended)
        else:
            rounds = speculative(
                target, drafter, processors, prompt, k=s.k, max_new_tokens=n, uniforms=u, ended=ended, rule=rule
            )
        text: tuple[int, ...] = ()
        for finished in rounds:
            text += finished.tokens
            seen(finished)
            assert target.lengths == (len(prompt) + len(text) - 1,)
            assert drafter is None or drafter.cached <= len(prompt) + len(text) - 1
        return text

    law = enumerate_law(run, uniforms)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    return law


def with_zeros(table: Tensor, seed: int) -> Tensor:
    """The table with one token a row at probability 0."""
    column = torch.randint(table.shape[-1], (len(table),), generator=torch.Generator().manual_seed(seed))
    return table.clone().scatter_(-1, column[:, None], ZERO)


def tables(kind: str, vocabulary: int = 3) -> tuple[Tensor, Tensor]:
    target, draft = random_table(vocabulary, 1), random_table(vocabulary, 2)
    if kind == "zeros in the target":
        target = with_zeros(target, 3)
    elif kind == "zeros in the draft":
        draft = with_zeros(draft, 4)
    elif kind == "zeros in both":
        target, draft = with_zeros(target, 3), with_zeros(draft, 4)
    elif kind == "identical":
        draft = target
    elif kind == "disjoint":
        target[:, 0], draft[:, 1:] = ZERO, ZERO
    elif kind == "one-hot draft":
        draft = draft * 1e6
    elif kind != "random":
        raise ValueError(kind)
    return target, draft


KINDS = [
    "random",
    "zeros in the target",
    "zeros in the draft",
    "zeros in both",
    "identical",
    "disjoint",
    "one-hot draft",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "end": {"end_tokens": (1,)},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "ban": {"ban": (2,)},
    "penalty": {"repetition_penalty": 1.7},
    "several": {"temperature": 1.4, "top_p": 0.95, "repetition_penalty": 1.3, "end_tokens": (0,)},
}


def check(target: Tensor, draft: Tensor, s: Sampling, drafter_class: type[ModelDrafter] = ModelDrafter) -> None:
    processors = Processors.of(s)
    model = TableModel(target)
    drafter = drafter_class(TableModel(draft, "draft"), processors)
    law = law_of(model, drafter, s)
    assert difference(law, joint_law(model.logits, PROMPT, s.max_new_tokens, s)) < 1e-12


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_distributions(kind: str, k: int) -> None:
    check(*tables(kind), Sampling(k=k, max_new_tokens=3))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, k: int) -> None:
    check(*tables("random"), Sampling(k=k, max_new_tokens=3, **SETTINGS[name]))


@pytest.mark.parametrize("name", ["plain", "end", "penalty"])
def test_four_tokens(name: str) -> None:
    check(*tables("zeros in the draft"), Sampling(k=2, max_new_tokens=4, **SETTINGS[name]))


def test_vocabulary_of_four() -> None:
    check(*tables("zeros in both", 4), Sampling(k=3, max_new_tokens=4, end_tokens=(3,)))


@pytest.mark.parametrize("drafter_class", [StopsEarly, AdaptiveK])
def test_a_drafter_may_stop_early_as_long_as_what_it_drew_stays(drafter_class: type[ModelDrafter]) -> None:
    check(*tables("random"), Sampling(k=2, max_new_tokens=4), drafter_class)


@pytest.mark.parametrize("name", ["plain", "end", "temperature", "penalty", "ban"])
def test_prompt_lookup(name: str) -> None:
    s = Sampling(k=3, max_new_tokens=4, **SETTINGS[name])
    target = TableModel(tables("random")[0])
    prompt = [0, 1, 2, 0, 1, 2, 0]
    counts: list[int] = []
    drafter = NgramDrafter(3, dtype=torch.float64)
    law = law_of(target, drafter, s, prompt=prompt, seen=lambda r: counts.append(r.drafted))
    assert difference(law, joint_law(target.logits, prompt, 4, s)) < 1e-12
    assert max(counts) == 3


@pytest.mark.parametrize("name", SETTINGS)
def test_plain_decoding_has_the_same_law(name: str) -> None:
    s = Sampling(max_new_tokens=4, **SETTINGS[name])
    target = TableModel(tables("zeros in the target")[0])
    assert difference(law_of(target, None, s), joint_law(target.logits, PROMPT, 4, s)) < 1e-12


def test_the_matrix_reaches_every_kind_of_end_of_a_round() -> None:
    """Else agreement would say little: rejections at each position, full blocks, ends inside accepted blocks."""
    target, draft = tables("random")
    s = Sampling(k=2, max_new_tokens=4, end_tokens=(1,))
    drafter = ModelDrafter(TableModel(draft, "draft"), Processors.of(s))
    kinds: set[tuple] = set()
    law_of(TableModel(target), drafter, s, seen=lambda r: kinds.add((r.drafted, r.tested, r.accepted, r.finish)))
    assert {(2, 1, 0, None), (2, 2, 1, None), (2, 2, 2, None)} <= kinds
    assert (2, 1, 1, "end") in kinds  # the second drafted token lay behind the end
    assert all(accepted <= tested <= drafted for drafted, tested, accepted, _ in kinds)


def distance(
    s: Sampling, kind: str = "random", drafter_class: type[ModelDrafter] = ModelDrafter, **options: Any
) -> float:
    """How far the law is from the target's, with something replaced."""
    target, draft = (TableModel(t, role) for t, role in zip(tables(kind), ("target", "draft"), strict=True))
    drafter = drafter_class(draft, options.get("processors") or Processors.of(s))
    expected = joint_law(target.logits, PROMPT, s.max_new_tokens, s)
    return difference(law_of(target, drafter, s, **options), expected)


THREE = Sampling(k=2, max_new_tokens=3)


@pytest.mark.parametrize("rule", [raw_resample(), membership(1), membership(2)], ids=lambda r: r.name)
def test_fault_wrong_rule(rule: Rule) -> None:
    assert distance(THREE, rule=rule) > VISIBLE


def test_fault_bonus_from_the_draft() -> None:
    target, draft = tables("random")
    honest = Processors.of(THREE)
    wrong = BonusFromDraft(honest, TableModel(draft))
    model = TableModel(target)
    law = law_of(model, ModelDrafter(TableModel(draft, "draft"), honest), THREE, processors=wrong)
    assert difference(law, joint_law(model.logits, PROMPT, 3, THREE)) > VISIBLE


def test_fault_penalty_from_the_start_of_the_round() -> None:
    s = Sampling(k=2, max_new_tokens=3, repetition_penalty=1.7)
    assert distance(s, processors=PenaltyFromRoundStart(Processors.of(s).chain)) > VISIBLE
    assert distance(s) < 1e-12


def test_fault_acceptance_not_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """At u = 0 a token of probability 0 comes through."""
    wrong = mutant(judge.HostDraws.kept, "if not u < probability:", "if not u <= probability:")
    monkeypatch.setattr(judge.HostDraws, "kept", wrong)
    assert distance(THREE, "zeros in the target") > VISIBLE


def test_fault_unlikely_token_dropped_after_drawing() -> None:
    assert distance(THREE, drafter_class=DropsUnlikely) > VISIBLE


@pytest.mark.parametrize("name", ["temperature", "top_k", "penalty"])
def test_fault_draft_probabilities_before_the_processors(name: str) -> None:
    s = Sampling(k=2, max_new_tokens=3, **SETTINGS[name])
    assert distance(s, drafter_class=UnprocessedProbs) > VISIBLE


def test_fault_one_key_for_drafting_and_accepting() -> None:
    assert distance(THREE, uniforms=OneKeyForTwo()) > VISIBLE


def test_fault_round_missing_from_the_key() -> None:
    s = Sampling(k=2, max_new_tokens=4)
    assert distance(s, drafter_class=AdaptiveK, uniforms=KeyWithoutRound()) > VISIBLE
    assert distance(s, drafter_class=AdaptiveK) < 1e-12


def test_fault_wrong_edge_of_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(randomness.draw, "right=True", "right=False")
    monkeypatch.setattr(judge, "draw", wrong)
    assert distance(THREE) > VISIBLE
    monkeypatch.setattr(judge, "draw", randomness.draw)
    monkeypatch.setattr(checkpoint, "draw", wrong)
    assert distance(THREE) > VISIBLE


def test_fault_correction_leaks_where_the_residual_is_zero() -> None:
    wrong = mutant(rules_module.best_correction, "clamp(min=0)", "clamp(min=1e-3)")
    assert distance(THREE, rule=Rule("leaky", accept_exact, wrong)) > 1e-4


def test_fault_processors_miss_the_verified_positions() -> None:
    """The target's rows behind the first go unprocessed."""

    class FirstRowOnly(Processors):
        def scores(self, logits: Tensor, prefix: Any, drafted: Any = ()) -> Tensor:
            return torch.cat([super().scores(logits[:1], prefix), logits[1:]])

    s = Sampling(k=2, max_new_tokens=3, top_k=2)
    honest = Processors.of(s)
    target, draft = tables("random")
    model = TableModel(target)
    law = law_of(model, ModelDrafter(TableModel(draft, "draft"), honest), s, processors=FirstRowOnly(honest.chain))
    assert difference(law, joint_law(model.logits, PROMPT, 3, s)) > VISIBLE


def test_the_enumeration_stops_where_a_fault_makes_the_tree_endless() -> None:
    with pytest.raises(AssertionError, match="more than 10 leaves"):
        distance(THREE, uniforms=Enumerating(max_leaves=10))
