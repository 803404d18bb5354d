"""The Python API beneath the command line: what the one does, the other does."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import specgen
from specgen.rounds.record import Finish, Origin
from specgen.settings import Mode
from support.command import PROMPT, WORDS, N, environment, process, write_pair


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("api")
    (folder / "p.txt").write_text(PROMPT)
    return str(write_pair(folder))


@pytest.fixture(scope="module")
def session(profile: str) -> specgen.Session:
    return specgen.load(profile, k=2, temperature=0.8, max_new_tokens=N, device="cpu")


def test_every_exported_name_is_there_and_documented() -> None:
    assert set(specgen.__all__) <= set(dir(specgen)) | set(specgen._HOMES)
    for name in specgen.__all__:
        assert inspect.getdoc(getattr(specgen, name)), name
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        specgen.lode  # noqa: B018


def test_settings_and_their_sources(session: specgen.Session) -> None:
    sampling = session.sampling
    assert (sampling.k, sampling.temperature, sampling.max_new_tokens) == (2, 0.8, N)
    assert (sampling.sources["k"], sampling.sources["temperature"]) == ("flag", "flag")
    assert (sampling.mode, sampling.sources["mode"]) == (Mode.EXACT, "default")
    assert session.profile.name == "pair"


def test_rounds_come_one_by_one_with_their_text(session: specgen.Session) -> None:
    generation = session.generate(PROMPT)
    assert list(generation.prompt) == session.encode(PROMPT)
    pieces = []
    for i, finished in enumerate(generation):
        assert isinstance(finished, specgen.Round)
        assert finished.index == i
        assert finished is generation.rounds[-1]
        assert finished.drafted <= 2
        pieces.append(generation.take())
    pieces.append(generation.take(final=True))
    assert all(pieces[:-1])  # a character is a token here: nothing is held back
    assert "".join(pieces) == generation.text
    assert generation.take(final=True) == ""
    assert generation.finish is Finish.LENGTH
    assert generation.tokens == tuple(t for r in generation.rounds for t in r.tokens)
    assert len(generation.tokens) == N
    assert generation.promise == "the target's distribution, in exact arithmetic"


def test_statistics_and_check(session: specgen.Session) -> None:
    generation = session.generate(PROMPT).run()
    statistics = generation.statistics
    assert statistics == specgen.summarise(generation.rounds)
    origins = [c.origin for r in generation.rounds for c in r.committed]
    assert statistics.accepted == origins.count(Origin.ACCEPTED) > 0
    assert statistics.tested - statistics.accepted == origins.count(Origin.CORRECTION) > 0
    assert statistics.committed == N == len(origins)
    check = generation.check()
    assert check.passed
    assert check.positions == N
    cost = generation.probe_cost(2)
    assert cost is not None
    assert set(cost) == {"c", "draft_s", "target_s"}


def test_text_is_that_of_the_command_line(profile: str, session: specgen.Session) -> None:
    arguments = ("--k", "2", "--temperature", ".8", "--max-new-tokens", str(N), "--quiet")
    result = process(Path(profile).parent, "run", "p.txt", "--profile", profile, *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.removesuffix("\n") == session.generate(PROMPT).run().text.removesuffix("\n")


def test_same_seed_same_text_whatever_was_generated_before(session: specgen.Session) -> None:
    first = session.generate(PROMPT).run().text
    other = session.generate("mild").run().text
    assert session.generate(PROMPT).run().text == first != other
    tokens = session.encode(PROMPT)
    assert session.generate(tokens).run().text == first


def test_another_seed_another_text(profile: str, session: specgen.Session) -> None:
    other = specgen.load(profile, k=2, temperature=0.8, max_new_tokens=N, device="cpu", seed=1)
    assert other.generate(PROMPT).run().text != session.generate(PROMPT).run().text


def test_left_early_it_keeps_what_it_has(session: specgen.Session) -> None:
    whole = session.generate(PROMPT).run().text
    generation = session.generate(PROMPT)
    for finished in generation:
        if finished.index == 3:
            break
    assert len(generation.rounds) == 4
    assert generation.finish is None
    assert generation.text
    assert whole.startswith(generation.text)
    assert generation.check().passed
    with pytest.raises(RuntimeError, match="has been run"):
        next(iter(generation))
    assert session.generate(PROMPT).run().text == whole


def test_plain_decoding(profile: str, session: specgen.Session) -> None:
    generation = session.generate(PROMPT, plain=True).run()
    assert generation.plain
    assert {c.origin for r in generation.rounds for c in r.committed} == {Origin.PLAIN}
    assert len(generation.rounds) == N
    assert generation.probe_cost() is None
    without_draft = specgen.load(profile, plain=True, device="cpu")
    assert without_draft.pair.drafter is None
    with pytest.raises(specgen.UsageError, match="has no draft"):
        without_draft.generate(PROMPT)


def test_settings_of_other_sections_by_dotted_names(profile: str) -> None:
    session = specgen.load(profile, target__dtype="float64", draft__dtype="float32", device="cpu", mode="greedy")
    assert str(session.pair.dtype) == "torch.float64"
    assert session.sampling.mode is Mode.GREEDY


def test_refusals_are_errors_to_catch(profile: str, session: specgen.Session) -> None:
    with pytest.raises(specgen.UsageError, match="--k 0"):
        specgen.load(profile, k=0)
    with pytest.raises(specgen.UsageError, match=r"no built-in profile 'smolm2'.* did you mean smollm2"):
        specgen.load("smolm2")
    with pytest.raises(specgen.UsageError, match=r"unknown key 'decoding\.nonsense'"):
        specgen.load(profile, nonsense=1)
    with pytest.raises(specgen.UsageError, match="the prompt is empty"):
        session.generate(" \n")
    with pytest.raises(TypeError, match="not with a loaded profile"):
        specgen.load(specgen.load_profile(profile), k=2)
    assert issubclass(specgen.UsageError, specgen.SpecgenError)


def test_prompt_without_a_known_token(session: specgen.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a prompt of characters that a tokenizer drops."""
    tokenizer = session.pair.tokenizer
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *_: type("Encoded", (), {"input_ids": []})())
    with pytest.raises(specgen.UsageError, match="holds no token"):
        session.generate("x")


def test_example_of_the_package_runs(profile: str) -> None:
    """The example in the package's docstring, on the tiny pair."""
    lines = [line for line in (specgen.__doc__ or "").splitlines() if line.startswith((">>> ", "... "))]
    code = [line[4:].partition("# doctest")[0].rstrip() for line in lines]
    assert len(code) == 6
    *body, last = code
    program = "\n".join([*body, "", f"shown = {last}", "print('verdict:', shown[2])"]).replace(
        '"smollm2"', repr(profile)
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment(Path(profile).parent), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    text, _, verdict = result.stdout.rpartition("verdict: ")
    assert len(text) > N
    assert verdict.startswith("no fault seen in 128 positions")


@pytest.mark.parametrize("prompt", [[True], [1.5], ["a"], [-1], []])
def test_what_is_no_prompt_of_token_ids(session: specgen.Session, prompt: list) -> None:
    with pytest.raises(specgen.UsageError, match="a prompt needs token ids from 0 to"):
        session.generate(prompt)


@pytest.mark.parametrize("token", [len(WORDS), 10**9, 2**80])
def test_token_ids_that_have_no_row(session: specgen.Session, token: int) -> None:
    wanted = f"the token with the id {token}, for which the target has no row: its ids go from 0 to {len(WORDS) - 1}"
    with pytest.raises(specgen.UsageError, match=wanted):
        session.generate([1, token, 2])


def test_token_ids_have_to_fit_the_context_as_texts_do(session: specgen.Session) -> None:
    assert session.context is not None
    with pytest.raises(specgen.UsageError, match="more than the context of"):
        session.generate([1] * (session.context - N + 1))
    session.generate([1] * (session.context - N))


def test_an_untimed_generation_reads_no_clock(session: specgen.Session) -> None:
    def clock() -> float:
        raise AssertionError("the clock was read")

    session = replace(session, pair=replace(session.pair, clock=clock))
    generation = session.generate(PROMPT, timed=False).run()
    assert generation.tokens
    assert {r.total_s for r in generation.rounds} == {0.0}
    with pytest.raises(AssertionError, match="the clock was read"):
        session.generate(PROMPT).run()


def test_two_threads_cannot_generate_at_once(session: specgen.Session) -> None:
    first = session.generate(PROMPT)
    rounds = iter(first)
    next(rounds)
    with first.pair.hold.alone():  # as another thread is while its models work
        for other in (session.generate(PROMPT), first):
            with pytest.raises(RuntimeError, match="generates in another thread"):
                next(iter(other) if other is not first else rounds)
    assert session.generate(PROMPT).run().tokens  # the session is as good as before
