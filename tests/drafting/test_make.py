"""A new drafter is a file and a line: this file is one, and `listed` adds the line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from torch import Tensor
from typer.testing import CliRunner

import specgen
from specgen.cli.app import app
from specgen.decoding.batch import BatchGeneration
from specgen.drafting import make
from specgen.drafting.drafter import Drafter, Ingredients, Proposal
from specgen.errors import UsageError
from specgen.profiles import schema
from specgen.profiles.schema import DraftSettings
from specgen.sampling.randomness import Uniforms
from support.command import PROMPT, write_pair


class EchoSettings(DraftSettings):
    kind: Literal["echo"]
    back: int = 1


class Echo(Drafter):
    """Proposes that the text goes on as it went `back` tokens ago."""

    kind = "echo"
    cached = 0

    def __init__(self, vocabulary: int, back: int) -> None:
        self.vocabulary, self.back = vocabulary, back

    @classmethod
    def made(cls, ingredients: Ingredients) -> Echo:
        assert isinstance(ingredients.settings, EchoSettings)
        return cls(ingredients.target.vocabulary, ingredients.settings.back)

    def start(self, prompt: Sequence[int]) -> None:
        self.cached = len(prompt) - 1

    def propose(self, prefix: Sequence[int], k: int, round_index: int, uniforms: Uniforms) -> Proposal:
        self.cached = len(prefix)
        text = list(prefix)
        for _ in range(k):
            text.append(text[-self.back])
        drafted = text[len(prefix) :]
        return Proposal(tuple(drafted), torch.eye(self.vocabulary)[drafted])

    def rollback(self, count: int) -> None:
        self.cached -= count

    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, list[Tensor | None]]]:
        for i in range(start, len(tokens)):
            yield i, [torch.eye(self.vocabulary)[tokens[i - self.back]]]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(make, "DRAFTERS", [*make.DRAFTERS, (EchoSettings, Echo)])  # the line
    schema.register_draft("echo", EchoSettings)
    yield
    del schema.DRAFTS["echo"]
    schema.Profile.model_rebuild(force=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("echo")
    profile: dict[str, Any] = yaml.safe_load(write_pair(folder).read_text())
    for name, draft in (("echo", {"kind": "echo", "back": 2}), ("wrong", {"kind": "echo", "front": 1})):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**profile, "draft": draft}))
    return folder


@pytest.mark.usefixtures("listed")
def test_a_profile_names_it_and_everything_that_a_draft_serves_is_served(folder: Path) -> None:
    session = specgen.load(str(folder / "echo.yaml"), device="cpu", max_new_tokens=40, temperature=0.5)
    generation = session.generate(PROMPT).run()
    assert session.pair.drafter is not None
    assert (session.pair.drafter.kind, session.pair.drafter.back) == ("echo", 2)  # type: ignore[attr-defined]
    assert generation.statistics.drafted > generation.statistics.accepted > 0
    assert generation.check().passed
    batch = BatchGeneration(session.pair, [generation.prompt] * 2, seeds=[0, 1]).run()
    assert batch.tokens[0] == generation.tokens
    session.pair.target.engine = "graph"
    captured = session.generate(PROMPT).run()
    assert captured.engine_note is None
    assert captured.tokens == generation.tokens
    greedy = replace(session.pair, sampling=replace(session.sampling, mode=specgen.Mode.EXACT, seed=3))
    assert replace(session, pair=greedy).generate(PROMPT).run().check().passed


@pytest.mark.usefixtures("listed")
def test_the_command_line_knows_it(folder: Path) -> None:
    arguments = ["run", "--prompt", PROMPT, "--profile", str(folder / "echo.yaml"), "--max-new-tokens", "8", "-q"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    with pytest.raises(UsageError, match=r"unknown key 'draft.front'"):
        specgen.load_profile(str(folder / "wrong.yaml"))


def test_without_the_line_the_kinds_there_are_are_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"draft.kind: 'echo' is not allowed; expected checkpoint or ngram"):
        specgen.load_profile(str(folder / "echo.yaml"))
