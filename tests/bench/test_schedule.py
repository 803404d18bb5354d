"""The schedule, with callables and a clock that the test moves: no model, no torch."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from specgen.bench.schedule import Job, Outcome, grouped, promising, schedule, spread
from specgen.prompts.bench import CATEGORIES, PROMPTS

ARMS = {"plain": 1, "k=2": 1, "k=4": 1}
SIX = ["chat", "chat", "code", "code", "story", "story"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Runs a schedule whose jobs take the seconds given, by arm, and a tenth of that while warming up."""

    def __init__(self, seconds: dict[str, float], *, before: Callable[[Job], object] = lambda job: None) -> None:
        self.clock, self.seconds, self.before = Clock(), seconds, before
        self.jobs: list[Job] = []
        self.told: list[tuple[float, float]] = []

    def measure(self, job: Job) -> None:
        self.before(job)
        self.jobs.append(job)
        self.clock.now += self.seconds[job.arm] * (0.1 if job.run < 0 else 1.0)

    def run(self, arms: dict[str, int] = ARMS, categories: list[str] = SIX, *, seed: int = 0, **options) -> Outcome:
        settings = {"runs": 3, "warmup": 1, "scale": 10.0, **options}
        return schedule(
            arms,
            categories,
            self.measure,
            order=random.Random(seed),
            clock=self.clock,
            progress=lambda done, left: self.told.append((done, left)),
            **settings,
        )

    def timed(self) -> list[Job]:
        return [job for job in self.jobs if job.run >= 0]


SECONDS = {"plain": 4.0, "k=2": 2.0, "k=4": 2.0}


def test_every_arm_meets_every_group_once_a_run() -> None:
    bench = Bench(SECONDS)
    outcome = bench.run()
    assert outcome == Outcome(tuple(range(6)), 3, None, False)
    counts = Counter((job.run, job.arm, job.group) for job in bench.timed())
    assert counts == Counter(itertools.product(range(3), ARMS, range(6)))
    assert [job.run for job in bench.timed()] == sorted(job.run for job in bench.timed())
    assert [job.order for job in bench.jobs] == list(range(len(bench.jobs)))
    assert all(job.members == ((job.group, 0),) for job in bench.jobs)


def test_warm_ups_come_first_one_an_arm() -> None:
    bench = Bench(SECONDS)
    bench.run(warmup=2)
    first = bench.jobs[:6]
    assert Counter((job.run, job.arm) for job in first) == {(-1, arm): 2 for arm in ARMS}
    assert all(job.run >= 0 for job in bench.jobs[6:])
    assert {job.group for job in first[:3]} == {0}
    assert {job.group for job in first[3:]} == {1}


def test_no_warm_up_where_none_is_wanted() -> None:
    bench = Bench(SECONDS)
    bench.run(warmup=0)
    assert all(job.run >= 0 for job in bench.jobs)


def test_arms_are_interleaved_in_another_order_each_run() -> None:
    bench = Bench(SECONDS)
    bench.run()
    orders = [[(j.arm, j.group) for j in bench.timed() if j.run == run] for run in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    for order in orders:
        changes = sum(a[0] != b[0] for a, b in itertools.pairwise(order))
        assert changes > 2 * len(ARMS), "an arm's jobs stand together"
        assert [group for _, group in order] != sorted(group for _, group in order)


def test_the_order_is_a_function_of_its_seed() -> None:
    def order(seed: int) -> list[Job]:
        bench = Bench(SECONDS)
        bench.run(seed=seed)
        return bench.jobs

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_groups_of_a_batch_are_filled_up_from_the_beginning() -> None:
    assert grouped([0, 1, 2, 3, 4], 2) == [((0, 0), (1, 0)), ((2, 0), (3, 0)), ((4, 0), (0, 1))]
    assert grouped([7], 3) == [((7, 0), (7, 1), (7, 2))]
    assert grouped([3, 5], 1) == [((3, 0),), ((5, 0),)]


def test_batches_have_groups_of_their_own() -> None:
    bench = Bench({"plain": 1.0, "plain B=4": 1.0})
    bench.run({"plain": 1, "plain B=4": 4}, runs=1)
    groups = {arm: sorted(job.group for job in bench.timed() if job.arm == arm) for arm in bench.seconds}
    assert groups == {"plain": [0, 1, 2, 3, 4, 5], "plain B=4": [0, 1]}
    assert {job.members for job in bench.timed() if job.arm == "plain B=4"} == {
        ((0, 0), (1, 0), (2, 0), (3, 0)),
        ((4, 0), (5, 0), (0, 1), (1, 1)),
    }


def test_a_budget_that_suffices_cuts_nothing() -> None:
    bench = Bench(SECONDS)
    assert bench.run(budget=0.8 + 3 * 48 + 0.1).cut is None  # warm-ups; 6 prompts × 8 s a run
    assert len(bench.timed()) == 3 * 6 * 3


def test_a_budget_cuts_runs_before_prompts() -> None:
    bench = Bench(SECONDS)
    outcome = bench.run(budget=0.8 + 2 * 48 + 1)
    assert outcome == Outcome(tuple(range(6)), 2, "the budget of 97.8 s left out 1 of 3 runs", False)
    assert Counter(job.run for job in bench.timed()) == {0: 18, 1: 18}


def test_a_budget_for_less_than_a_run_leaves_out_prompts_evenly_and_never_arms() -> None:
    bench = Bench(SECONDS)
    outcome = bench.run(budget=0.8 + 4 * 8 + 1)  # four prompts' worth
    assert outcome.prompts == (0, 1, 2, 4)  # one of each category, then the second of the first
    assert outcome.runs == 1
    assert outcome.cut == "the budget of 33.8 s left out 2 of 6 prompts and 2 of 3 runs"
    assert Counter(job.arm for job in bench.timed()) == dict.fromkeys(ARMS, 4)
    assert {job.members for job in bench.timed()} == {((p, 0),) for p in (0, 1, 2, 4)}
    assert {job.group for job in bench.timed()} == {0, 1, 2, 3}


def test_a_budget_for_nothing_still_measures_one_prompt_and_says_so() -> None:
    bench = Bench(SECONDS)
    outcome = bench.run(budget=1.0, warmup=0)
    assert [job.run for job in bench.jobs] == [-1] * 3 + [0] * 3  # a warm-up is made: without it nothing is known
    assert outcome.prompts == (0,)
    assert outcome.cut == (
        "the budget of 1 s left out 5 of 6 prompts and 2 of 3 runs; what remained still took 9 s, more than the "
        "budget of 1 s"
    )


def test_runs_are_cut_by_what_they_took_not_by_the_warm_ups() -> None:
    slow = Bench(SECONDS)
    slow.before = lambda job: setattr(slow.clock, "now", slow.clock.now + (10 if job.run >= 0 else 0))
    outcome = slow.run(budget=0.8 + 3 * 48 + 1)  # a run really takes 48 + 180 s
    assert outcome.runs == 1
    assert outcome.cut is not None
    assert outcome.cut.startswith("the budget of 145.8 s left out 2 of 3 runs")


@pytest.mark.parametrize("slow", [range(3), range(3, 6)])
def test_one_warm_up_of_two_may_be_slow(slow: range) -> None:
    """What only the first call pays, or a moment's load, does not cost prompts."""
    bench = Bench(SECONDS)
    bench.before = lambda job: setattr(bench.clock, "now", bench.clock.now + (5 if job.order in slow else 0))
    assert bench.run(budget=100, warmup=2).prompts == tuple(range(6))


def test_spread_takes_one_of_each_category_in_turn() -> None:
    assert spread(["a", "a", "a", "b", "c", "c"], 3) == [0, 3, 4]
    assert spread(["a", "a", "a", "b", "c", "c"], 5) == [0, 1, 3, 4, 5]
    assert spread([None, None, None], 2) == [0, 1]


def test_progress_knows_the_seconds_left() -> None:
    bench = Bench(SECONDS)
    bench.run(runs=2)
    assert bench.told[2] == pytest.approx((0.8 / 96.8, 96.0))  # after the warm-ups: two runs of 48 s
    assert bench.told[-1] == (1.0, 0.0)
    elapsed = [0.8 + sum(SECONDS[job.arm] for job in bench.timed()[: n + 1]) for n in range(36)]
    assert [left for _, left in bench.told[3:]] == pytest.approx([96.8 - e for e in elapsed])


def test_an_interrupt_keeps_whole_runs() -> None:
    def stop(job: Job) -> None:
        if job.order == 3 + 18 + 5:
            raise KeyboardInterrupt

    bench = Bench(SECONDS, before=stop)
    outcome = bench.run()
    assert (outcome.runs, outcome.interrupted) == (1, True)


def test_other_errors_pass() -> None:
    def fail(job: Job) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Bench(SECONDS, before=fail).run()


def test_promising_are_the_best_k_and_its_near_neighbours() -> None:
    assert promising({1: 1.00, 2: 1.20, 3: 1.25, 4: 1.24, 5: 1.23}) == [2, 3, 4]
    assert promising({1: 1.00, 2: 1.10, 3: 1.30, 4: 1.20}) == [3]
    assert promising({1: 1.3, 2: 1.3, 3: 1.0}) == [1, 2]
    assert promising({1: 0.5}) == [1]


def test_the_built_in_prompts() -> None:
    assert Counter(p.category for p in PROMPTS) == dict.fromkeys(CATEGORIES, 2)
    assert len({p.name for p in PROMPTS}) == len({p.text for p in PROMPTS}) == 14
    assert all(15 <= len(p.text.split()) <= 110 for p in PROMPTS)
