"""Profiles: what is accepted, what is refused and in which words, and which layer wins."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from specgen.errors import UsageError
from specgen.profiles import read as read_module
from specgen.profiles.effective import merged_settings, resolve_sampling
from specgen.profiles.generation_config import (
    GENERATION_CONFIG_IGNORED,
    GENERATION_CONFIG_REFUSED,
    GENERATION_CONFIG_USED,
)
from specgen.profiles.read import builtin_profiles, load_profile
from specgen.profiles.schema import CheckpointDraft, NgramDraft, Profile
from specgen.profiles.template import new_profile_text
from specgen.settings import Mode, Sampling

TARGET = "target:\n  checkpoint: some/target\n"
PAIR = TARGET + "draft: {kind: checkpoint, checkpoint: some/draft}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(text: str | bytes, flags: dict[str, Any] | None = None) -> Profile:
    Path("mine.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return load_profile("mine.yaml", flags)


def refusal(text: str | bytes, flags: dict[str, Any] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        loaded(text, flags)
    message = str(caught.value)
    assert len(message.splitlines()) <= 2
    assert "pydantic" not in message
    return message


def decoding(text: str) -> str:
    return f"{TARGET}decoding: {{{text}}}\n"


def sampled(file: str = "", flags: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> Sampling:
    given = {f"decoding.{key}": value for key, value in (flags or {}).items()}
    return resolve_sampling(loaded(decoding(file), given), config or {})


# What is accepted


def test_a_minimal_profile_takes_the_defaults(folder: Path) -> None:
    profile = loaded(TARGET)
    assert (profile.name, profile.draft, profile.tested, profile.flags) == ("mine", None, False, frozenset())
    assert (profile.target.dtype, profile.target.device, profile.target.trust_remote_code) == (
        "auto",
        "auto",
        False,
    )
    assert (profile.prompt.template, profile.prompt.system) == ("auto", None)
    assert (profile.decoding.mode, profile.decoding.ban, profile.decoding.generation_config) == (
        None,
        (),
        True,
    )


def test_every_setting_can_be_set(folder: Path) -> None:
    text = """
name: all
description: everything
tested: true
target: {checkpoint: a/b, revision: "1e5", dtype: bfloat16, device: "cuda:1", device_map: {"": 0},
         attention: sdpa, trust_remote_code: true, tokenizer: c/d}
draft: {kind: ngram, max_ngram: 5, min_ngram: 2}
decoding: {mode: exact, k: 64, max_new_tokens: 1, temperature: 1e-3, top_k: 0, top_p: 1, min_p: 0.1,
           repetition_penalty: 1.1, no_repeat_ngram_size: 3, ban: [0, "no"], stop: ["\\n"],
           seed: 9223372036854775807, end_tokens: [], generation_config: false}
prompt: {template: raw, system: ""}
"""
    profile = loaded(text)
    assert profile.target.revision == "1e5"
    assert profile.target.device_map == {"": 0}
    assert profile.draft == NgramDraft(kind="ngram", max_ngram=5, min_ngram=2)
    assert profile.decoding.temperature == 0.001
    assert profile.decoding.ban == (0, "no")
    assert profile.decoding.end_tokens == ()
    assert profile.decoding.mode is Mode.EXACT
    with pytest.raises(ValidationError, match="frozen"):
        profile.decoding.k = 3  # type: ignore[misc]


@pytest.mark.parametrize("empty", ["decoding:", "prompt:", "draft:", "decoding: {k: null, ban: null, stop: null}"])
def test_null_is_not_set(folder: Path, empty: str) -> None:
    assert loaded(TARGET + empty) == loaded(TARGET)


def test_bom_and_merge_keys_are_read(folder: Path) -> None:
    assert loaded(b"\xef\xbb\xbf" + TARGET.encode()).target.checkpoint == "some/target"
    profile = loaded("target: &t {checkpoint: a, dtype: float32}\ndraft: {<<: *t, kind: checkpoint, checkpoint: b}\n")
    assert isinstance(profile.draft, CheckpointDraft)
    assert (profile.draft.checkpoint, profile.draft.dtype) == ("b", "float32")


def test_relative_paths_are_the_profiles_own(folder: Path) -> None:
    there = folder / "sub"
    (there / "weights").mkdir(parents=True)
    (there / "tiny.gguf").touch()
    (there / "plain.txt").touch()
    (there / "p.yaml").write_text(
        "target: {checkpoint: weights, tokenizer: plain.txt}\ndraft: {kind: checkpoint, checkpoint: tiny.gguf}\n"
    )
    profile = load_profile("sub/p.yaml")
    assert isinstance(profile.draft, CheckpointDraft)
    assert profile.target.checkpoint == str((there / "weights").resolve())
    assert profile.draft.checkpoint == str((there / "tiny.gguf").resolve())
    assert profile.target.tokenizer == "plain.txt"  # neither folder nor .gguf: a hub id, as far as we know
    assert load_profile("sub/p.yaml", {"target.checkpoint": "weights"}).target.checkpoint == "weights"
    assert loaded("target: {checkpoint: weights}").target.checkpoint == "weights"


# Which file


def test_builtins_are_complete_and_valid() -> None:
    found = builtin_profiles()
    assert list(found) == sorted(found)
    assert {read_module.DEFAULT_PROFILE, "qwen3-8b", "llama-3-8b", "gpt2-xl"} <= set(found)
    for name, path in found.items():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.description
        assert profile.draft is not None
        assert profile.tested == (name == read_module.DEFAULT_PROFILE)
        text = path.read_text(encoding="utf-8")
        assert ("No test has run" in text) == (not profile.tested)
        assert re.search("^# Licence", text, re.M)
        assert "okenizer" in text


def test_builtins_are_found_in_a_wheel_and_not_in_a_strangers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "specgen"
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "stranger.yaml").touch()
    package.mkdir()
    monkeypatch.setattr(read_module, "__file__", str(package / "profiles" / "read.py"))
    assert builtin_profiles() == {}
    (package / "profiles_builtin").mkdir()
    (package / "profiles_builtin" / "own.yaml").write_text(TARGET)
    assert list(builtin_profiles()) == ["own"]
    assert load_profile("own").name == "own"


def test_a_file_without_suffix_is_read_but_a_builtin_comes_first(folder: Path) -> None:
    Path("other").write_text(TARGET)
    Path("smollm2").write_text(TARGET)
    assert load_profile("other").name == "other"
    assert load_profile("smollm2").tested
    assert not load_profile("./smollm2").tested


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2", ["no built-in profile 'smolm2'", "did you mean smollm2"]),
        ("zzz", ["built in:", "gpt2-xl", "./my.yaml"]),
        ("", ["no built-in profile"]),
        ("a\0b", ["no built-in profile"]),
        ("x" * 5000, ["no built-in profile"]),
        ("./smolm2.yaml", ["./smolm2.yaml: no such file", "did you mean smollm2"]),
        ("a.YML", ["no such file"]),
        ("sub/", ["a folder"]),
        ("a\0/b", ["cannot be read"]),
    ],
)
def test_missing_files(folder: Path, name: str, words: list[str]) -> None:
    (folder / "sub").mkdir()
    with pytest.raises(UsageError) as caught:
        load_profile(name)
    assert all(word in str(caught.value) for word in words)
    assert len(str(caught.value)) < 400
    assert caught.value.exit_code == 2


# What is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n", "a list at the top"),
        ("abc", "a string at the top"),
        ("3", "a single value at the top"),
        ("target: [", "bad YAML in line 1, column 10"),
        ("a: 1\n---\nb: 2\n", "bad YAML in line 2"),
        (b"a: 1\nb: \xff\n", "not UTF-8: byte 0xff in line 2"),
        ("a: \x01", "bad YAML"),
        ("[" * 5000, "nested too deeply"),
        ("{{ x }}: 1", "bad YAML in line 1"),
        (TARGET + "  revision: 2024-99-01\n", "bad YAML: month"),
        (TARGET + "draft: !!python/object:os.system {}\n", "bad YAML in line 3"),
        (TARGET + TARGET, "line 3, column 1: key 'target' is given twice"),
        (decoding("k: 3, k: 4"), "key 'k' is given twice"),
    ],
)
def test_bad_files(folder: Path, text: str | bytes, words: str) -> None:
    message = refusal(text)
    assert message.startswith("profile mine.yaml: ")
    assert words in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (decoding("temprature: 1"), "unknown key 'decoding.temprature'; did you mean 'temperature'?"),
        (TARGET + "k: 4\n", "unknown key 'k'; did you mean 'decoding.k'?"),
        (TARGET + "zzz: 4\n", "unknown key 'zzz'; known here: name"),
        (TARGET + "1: 4\n", "unknown key '1'"),
        (TARGET + "a: &a [*a]\n", "unknown key 'a'"),
        (
            TARGET + "draft: {kind: ngram, max_ngrm: 1}\n",
            "unknown key 'draft.max_ngrm'; did you mean 'max_ngram'?",
        ),
        ("draft:\n", "target is missing"),
        ("target: {dtype: float32}\n", "target.checkpoint is missing"),
        ("target: some/model\n", "target: 'some/model' is not allowed; expected a mapping"),
        (TARGET + "draft: {checkpoint: x}\n", "draft.kind is missing; expected checkpoint or ngram"),
        (TARGET + "draft: {kind: foo}\n", "draft.kind: 'foo' is not allowed; expected checkpoint or ngram"),
        (
            TARGET + "draft: {kind: ngram, max_ngram: 2, min_ngram: 3}\n",
            "min_ngram 3 is greater than max_ngram 2",
        ),
        (TARGET + "draft: {kind: ngram, min_ngram: 0}\n", "draft.min_ngram: 0 is not allowed"),
        (
            TARGET + "draft: {kind: checkpoint, checkpoint: x, dtype: int8}\n",
            "draft.dtype: 'int8' is not allowed",
        ),
        ("target: {checkpoint: 'package:foo'}\n", "target.checkpoint: 'package:foo' is not allowed"),
        ("target: {checkpoint: ''}\n", "target.checkpoint: '' is not allowed"),
        (TARGET + "  revision: 1234567\n", "target.revision: 1234567 is not allowed"),
        (TARGET + "  revision: 1234567\n", "YAML reads it as int: put it in quotes"),
        (TARGET + "  revision: 2024-01-31\n", "target.revision: 2024-01-31 is not allowed"),
        (TARGET + "  device: cuda:x\n", "target.device: 'cuda:x' is not allowed; expected auto, cpu, mps"),
        (TARGET + "  device_map: {a: [1]}\n", "target.device_map: {'a': [1]} is not allowed"),
        (
            TARGET + "  trust_remote_code: 1\n",
            "target.trust_remote_code: 1 is not allowed; expected true or false",
        ),
        (
            TARGET + "prompt: {template: jinja}\n",
            "prompt.template: 'jinja' is not allowed; expected auto, chat",
        ),
        (TARGET + "name: 3\n", "name: 3 is not allowed"),
        (TARGET + "tested: 'yes'\n", "tested: 'yes' is not allowed"),
    ],
)
def test_bad_sections(folder: Path, text: str, words: str) -> None:
    message = refusal(text)
    assert message.startswith("profile mine.yaml: ")
    assert words in message


@pytest.mark.parametrize(
    ("key", "values", "allowed"),
    [
        ("mode", ["fast", 3], "exact or greedy or coupled or lenient or typical"),
        ("k", ["four", True, 0, 65, 4.0, [4]], "an integer from 1 to 64"),
        ("max_new_tokens", [0, "1"], "an integer of at least 1"),
        (
            "temperature",
            [[1], -0.1, 1e-40, 0.0009, float("inf"), float("nan"), "1e999", "hot", True],
            "0 (greedy), or a finite number of at least 0.001",
        ),
        ("top_k", [-1, 1.5], "an integer, 0 (off) or more"),
        ("top_p", [0, 1.01, "x"], "a number greater than 0 and at most 1"),
        ("min_p", [-0.1, 1.01], "a number from 0 to 1"),
        ("repetition_penalty", [0, -1], "a finite number greater than 0"),
        ("no_repeat_ngram_size", [-1], "an integer, 0 (off) or more"),
        ("ban", ["x", [-1], [""], [False], [1.5]], "a list of token ids and tokens"),
        ("stop", ["x", [""], [3]], "a list of strings, none of them empty"),
        ("seed", [-1, 2**63, "0"], "an integer from 0 to 2**63 - 1"),
        ("end_tokens", [5, [-1]], "a list of token ids and tokens"),
        ("generation_config", ["no", 0], "true or false"),
    ],
)
def test_bad_decoding_values_name_key_value_and_what_is_allowed(
    folder: Path, key: str, values: list[Any], allowed: str
) -> None:
    for value in values:
        message = refusal(yaml.safe_dump({"target": {"checkpoint": "x"}, "decoding": {key: value}}))
        one = value[0] if isinstance(value, list) and key in ("ban", "stop", "end_tokens") else value
        assert re.fullmatch(
            r"profile mine\.yaml: decoding\." + key + r"(\[0\])?: .* is not allowed; expected .*", message
        )
        assert allowed in message
        assert value == "1e999" or str(one).lower() in message.lower()


def test_quotes_are_advised_only_where_nothing_but_a_string_is_allowed(folder: Path) -> None:
    assert "quotes" not in refusal(TARGET + "  device_map: 3\n")


def test_of_many_faults_two_are_told_and_the_rest_counted(folder: Path) -> None:
    message = refusal(decoding("temperature: -1, k: 0, top_p: 2, seed: -1"))
    assert message.splitlines()[0].startswith("profile mine.yaml: decoding.k")
    assert message.splitlines()[1].startswith("profile mine.yaml: decoding.temperature")
    assert message.endswith("(and 2 more)")


def test_messages_stay_on_their_lines_and_short(folder: Path) -> None:
    message = refusal(
        yaml.safe_dump({"target": {"checkpoint": "x", "a\nb\x1b[31m": 1}, "prompt": {"template": "x\n" * 999}})
    )
    assert len(message.splitlines()) == 2
    assert "\x1b" not in message
    assert len(message) < 500


# Flags


def test_flags_win_and_are_recorded(folder: Path) -> None:
    flags = {
        "decoding.k": 8,
        "decoding.stop": ("a",),
        "prompt.system": "s",
        "decoding.top_k": None,
        "decoding.ban": [],
    }
    profile = loaded(decoding("k: 2, top_k: 5, ban: [1]"), flags)
    assert (profile.decoding.k, profile.decoding.stop, profile.decoding.top_k) == (8, ("a",), 5)
    assert profile.decoding.ban == (1,)
    assert profile.prompt.system == "s"
    assert profile.flags == {"decoding.k", "decoding.stop", "prompt.system"}


def test_device_and_dtype_reach_both_checkpoints_unless_named_apart(folder: Path) -> None:
    profile = loaded(PAIR, {"device": "cpu", "dtype": "float32", "draft.dtype": "float64"})
    assert isinstance(profile.draft, CheckpointDraft)
    assert (profile.target.device, profile.target.dtype) == ("cpu", "float32")
    assert (profile.draft.device, profile.draft.dtype) == ("cpu", "float64")
    assert loaded(TARGET + "draft: {kind: ngram}", {"dtype": "float32"}).draft == NgramDraft(kind="ngram")
    assert loaded(TARGET, {"device": "cpu"}).draft is None


def test_engine_is_set_as_device_and_dtype_are(folder: Path) -> None:
    profile = loaded(PAIR, {"engine": "eager", "draft.engine": "packed"})
    assert isinstance(profile.draft, CheckpointDraft)
    assert (profile.target.engine, profile.draft.engine) == ("eager", "packed")
    both = loaded(PAIR, {"engine": "graph"})
    assert isinstance(both.draft, CheckpointDraft)
    assert (both.target.engine, both.draft.engine) == ("graph", "graph")
    assert loaded(PAIR).target.engine == "auto"
    assert merged_settings(both)["target"]["engine"] == "graph"
    assert loaded(TARGET + "draft: {kind: ngram}", {"engine": "eager"}).draft == NgramDraft(kind="ngram")


def test_another_checkpoint_leaves_behind_what_belonged_to_the_files(folder: Path) -> None:
    text = "target: {checkpoint: a, revision: r, tokenizer: t, trust_remote_code: true, dtype: float32}\n"
    other = loaded(text, {"target.checkpoint": "b"}).target
    assert (other.checkpoint, other.dtype) == ("b", "float32")
    assert (other.revision, other.tokenizer, other.trust_remote_code) == (None, None, False)
    assert loaded(text, {"target.checkpoint": "b", "target.revision": "q"}).target.revision == "q"
    assert loaded(text, {"target.checkpoint": "a"}).target.revision == "r"


@pytest.mark.parametrize(
    ("text", "flags", "draft"),
    [
        (PAIR, {"draft.kind": "ngram", "draft.max_ngram": 4}, NgramDraft(kind="ngram", max_ngram=4)),
        (TARGET, {"draft.max_ngram": 2}, NgramDraft(kind="ngram", max_ngram=2)),
        (
            TARGET + "draft: {kind: ngram}",
            {"draft.checkpoint": "d", "dtype": "float32"},
            CheckpointDraft(kind="checkpoint", checkpoint="d", dtype="float32"),
        ),
        (TARGET, {"draft.checkpoint": "d"}, CheckpointDraft(kind="checkpoint", checkpoint="d")),
    ],
)
def test_flags_can_change_the_kind_of_draft(folder: Path, text: str, flags: dict[str, Any], draft: object) -> None:
    assert loaded(text, flags).draft == draft


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"decoding.top_p": 1.5}, "--top-p 1.5: expected a number greater than 0 and at most 1"),
        ({"engine": "fast"}, "--engine fast: expected auto, eager, packed or graph"),
        ({"dtype": "int8"}, "--dtype int8: expected auto, float64, float32, bfloat16 or float16"),
        ({"draft.dtype": "int8"}, "--draft-dtype int8: expected auto, float64, float32, bfloat16 or float16"),
        ({"decoding.stop": ["a", ""]}, "--stop '': expected a list of strings, none of them empty"),
        ({"draft.kind": "ngram", "draft.max_ngram": 0}, "--max-ngram 0: expected an integer of at least 1"),
        ({"foo": 1}, "--foo: no such setting; a flag sets SECTION.KEY, such as decoding.k"),
    ],
)
def test_a_bad_flag_is_named(folder: Path, flags: dict[str, Any], message: str) -> None:
    assert refusal(PAIR, flags) == message


def test_a_bad_file_is_blamed_on_the_file_and_unknown_flags_on_flags(folder: Path) -> None:
    assert refusal(decoding("k: 0"), {"decoding.top_p": 0.5}).startswith("profile mine.yaml: decoding.k")
    assert refusal(PAIR, {"decoding.temprature": 1}).startswith("--temprature 1: unknown key")
    assert "greater than max_ngram 3" in refusal(PAIR, {"draft.kind": "ngram", "draft.min_ngram": 4})
    assert refusal(PAIR, {"target.checkpoint": "package:x"}).startswith("--target package:x: expected a hub id")


# The effective sampling


def test_layers_and_their_sources(folder: Path) -> None:
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_new_tokens": 7,
        "do_sample": False,
        "top_h": None,
    }
    s = sampled("top_k: 30, top_p: 0.8, k: 2, stop: [x]", {"top_p": 0.7, "seed": 3}, config)
    assert (s.temperature, s.top_k, s.top_p, s.k, s.seed, s.stop) == (0.6, 30, 0.7, 2, 3, ("x",))
    assert s.max_new_tokens == Sampling().max_new_tokens
    expected = {
        "temperature": "generation_config",
        "top_k": "profile",
        "top_p": "flag",
        "k": "profile",
        "seed": "flag",
    }
    assert s.sources.items() >= {**expected, "min_p": "default", "mode": "default", "stop": "profile"}.items()
    assert set(s.sources) | {"sources"} == set(Sampling.__dataclass_fields__)
    assert sampled() == Sampling(sources=dict.fromkeys(s.sources, "default"))


def test_neutral_values_become_none_and_still_override(folder: Path) -> None:
    config = {"top_k": 50, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2}
    off = "top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, no_repeat_ngram_size: 0"
    s = sampled(off, config=config)
    assert {getattr(s, name) for name in config} == {None}
    assert {s.sources[name] for name in config} == {"profile"}
    assert sampled(config={"top_k": 0, "top_p": 1.0}).top_k is None


def test_generation_config_false_ignores_it_all(folder: Path) -> None:
    s = sampled("generation_config: false", config={"temperature": 0.6, "typical_p": 0.5, "suppress_tokens": [1]})
    assert (s.temperature, s.ban, s.sources["temperature"]) == (1.0, (), "default")


def test_a_number_is_an_id_in_a_flag_and_in_a_file_quoted_or_not() -> None:
    """A command line has text only: --ban 7 means what `ban: [7]` does, and so `ban: ["7"]` may mean nothing else."""
    by_flag = loaded(TARGET, {"decoding.ban": ["7", "a", "\u00b2", "007"]})
    in_file = loaded(decoding('ban: ["7", a, "\u00b2", "007"], end_tokens: ["0", 1, b]'))
    assert by_flag.decoding.ban == in_file.decoding.ban == loaded(decoding("ban: [7, a, \u00b2, 7]")).decoding.ban
    assert in_file.decoding.ban == (7, "a", "\u00b2", 7)
    assert in_file.decoding.end_tokens == (0, 1, "b")
    assert "a number is an id, quoted or not" in new_profile_text()


def test_bans_end_tokens_and_stops(folder: Path) -> None:
    config = {
        "suppress_tokens": [9, 5],
        "bad_words_ids": [[1, 2], [7], [3]],
        "stop_strings": "END",
        "eos_token_id": 7,
    }
    s = resolve_sampling(loaded(TARGET), config, ban_ids=(), end_tokens=(7,))
    assert (s.ban, s.end_tokens, s.stop) == ((5, 9), (7,), ("END",))
    assert s.bad_words_ids == ((1, 2), (3,))  # the end token itself stays possible, as in transformers
    names = ("ban", "end_tokens", "stop", "bad_words_ids")
    assert {s.sources[name] for name in names} == {"generation_config"}
    s = resolve_sampling(
        loaded(decoding("end_tokens: [8]"), {"decoding.ban": [5, 2]}), config, ban_ids=(5, 2), end_tokens=(8,)
    )
    assert (s.ban, s.end_tokens, s.sources["ban"], s.sources["end_tokens"]) == (
        (2, 5, 9),
        (8,),
        "flag",
        "profile",
    )


NOT_NEUTRAL = dict.fromkeys(GENERATION_CONFIG_REFUSED, 0.5) | {
    "forced_eos_token_id": 0,
    "begin_suppress_tokens": [0],
    "sequence_bias": {"(1,)": 1.0},
    "num_beams": 2,
    "min_length": 1,
    "min_new_tokens": 1,
    "guidance_scale": 1.5,
    "remove_invalid_values": True,
}


@pytest.mark.parametrize("name", sorted(NOT_NEUTRAL))
def test_what_is_not_built_is_refused_unless_neutral(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} .*not supported(?s:.*)decoding.generation_config: false"):
        sampled(config={name: NOT_NEUTRAL[name]})
    for neutral in (GENERATION_CONFIG_REFUSED[name], [], None):
        assert sampled(config={name: neutral}) == sampled()


def test_every_setting_of_transformers_is_taken_refused_or_ignored() -> None:
    """Read off the source, since importing it imports torch. A new setting must be classed."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    source = (Path(spec.origin).parent / "generation" / "configuration_utils.py").read_text(encoding="utf-8")
    body = source.partition("class GenerationConfig")[2].partition("    def validate")[0]
    known = set(re.findall(r'self\.(\w+) = kwargs\.pop\("\1"', body))
    assert len(known) > 50
    classes = [GENERATION_CONFIG_USED, GENERATION_CONFIG_IGNORED, frozenset(GENERATION_CONFIG_REFUSED)]
    assert known - frozenset().union(*classes) == set()
    assert sum(map(len, classes)) == len(frozenset().union(*classes))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"temperature": -1}, "temperature -1 is not allowed; expected 0 (greedy), or a finite number"),
        ({"top_p": "x"}, "top_p 'x' is not allowed"),
        ({"stop_strings": 3}, "stop_strings 3 is not allowed"),
        ({"suppress_tokens": [-1]}, "suppress_tokens [-1] is not allowed"),
        ({"bad_words_ids": 3}, "bad_words_ids 3 is not allowed"),
        ({"bad_words_ids": [3]}, "bad_words_ids 3 is not allowed"),
    ],
)
def test_a_malformed_generation_config_is_named(folder: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        sampled(config=config)
    assert words in str(caught.value)
    assert "generation_config" in str(caught.value)


CONFIG = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("file", "flags", "source"),
    [
        ("mode: greedy", {}, "profile"),
        ("temperature: 0", {}, "profile"),
        ("temperature: 0, mode: exact", {}, "profile"),
        ("temperature: 0, mode: greedy, top_p: 1.0", {}, "profile"),
        ("top_p: 0.9, temperature: 0.7, min_p: 0.1", {"mode": "greedy"}, "flag"),
        ("top_p: 0.9, mode: exact", {"temperature": 0.0}, "flag"),
        ("", {"mode": "exact", "temperature": 0}, "flag"),
    ],
)
def test_greedy_drops_what_lower_layers_say_of_sampling(
    folder: Path, file: str, flags: dict[str, Any], source: str
) -> None:
    s = sampled(file, flags, CONFIG)
    assert (s.mode, s.temperature, s.top_k, s.top_p, s.min_p) == (Mode.GREEDY, None, None, None, None)
    assert s.repetition_penalty == 1.1
    assert s.sources["mode"] == s.sources["temperature"] == s.sources["top_k"] == source


@pytest.mark.parametrize(
    ("file", "flags", "setting", "cure"),
    [
        ("mode: greedy", {"temperature": 0.7}, "--temperature 0.7", "use --mode exact"),
        ("", {"mode": "greedy", "temperature": 0.7}, "--temperature 0.7", "use --mode exact"),
        ("temperature: 0", {"top_p": 0.9}, "--top-p 0.9", "use --mode exact"),
        ("", {"temperature": 0, "min_p": 0.1}, "--min-p 0.1", "set a temperature above 0"),
        ("mode: greedy, top_k: 5", {}, "profile mine.yaml: decoding.top_k 5", "set decoding.mode: exact"),
    ],
)
def test_greedy_refuses_sampling_settings_of_its_own_layer_or_above(
    folder: Path, file: str, flags: dict[str, Any], setting: str, cure: str
) -> None:
    message = refusal(decoding(file), {f"decoding.{key}": value for key, value in flags.items()})
    assert message == f"{setting} means nothing in greedy mode: leave it out, or {cure}"


@pytest.mark.parametrize(
    ("file", "flags", "config", "temperature", "source"),
    [
        ("temperature: 0", {"mode": "exact"}, {}, 1.0, "default"),
        ("temperature: 0", {"mode": "exact"}, CONFIG, 0.6, "generation_config"),
        ("temperature: 0, mode: greedy", {"mode": "exact", "top_p": 0.9}, {}, 1.0, "default"),
        ("mode: greedy", {"mode": "exact", "temperature": 0.7}, {}, 0.7, "flag"),
        ("temperature: 0", {"temperature": 0.7}, {}, 0.7, "flag"),
        ("", {}, {"temperature": 0.0, "do_sample": False}, 1.0, "default"),
    ],
)
def test_exact_asked_for_on_top_of_temperature_zero(
    folder: Path, file: str, flags: dict[str, Any], config: dict[str, Any], temperature: float, source: str
) -> None:
    s = sampled(file, flags, config)
    assert (s.mode, s.temperature, s.sources["temperature"]) == (Mode.EXACT, temperature, source)


# Showing and writing


def test_the_template_is_valid_and_so_are_its_examples(folder: Path) -> None:
    text = new_profile_text()
    profile = loaded(text)
    assert profile.decoding == loaded(TARGET).decoding
    assert isinstance(profile.draft, CheckpointDraft)
    examples = re.sub(r"^( *)#(?=\w+:)", r"\1", text, flags=re.M)
    every = loaded(examples)
    assert every.decoding.model_fields_set == set(type(every.decoding).model_fields)
    of_packages = {"sha256", "bytes", "otherwise"}  # refused beside a hub id
    assert every.target.model_fields_set == set(type(every.target).model_fields) - of_packages
    assert every.decoding.stop == ("\n\n",)
    defaults = resolve_sampling(loaded(re.sub("(stop|end_tokens): .*", r"\1:", examples)), {})
    assert replace(defaults, sources={}) == Sampling()


@pytest.mark.parametrize("text", [TARGET, PAIR, decoding("temperature: 0, ban: [1, a], stop: [x], k: 7")])
def test_merged_settings_are_plain_complete_and_load_again(folder: Path, text: str) -> None:
    profile = loaded(text, {"device": "cpu"})
    settings = merged_settings(profile)
    assert set(settings) == set(Profile.model_fields)
    assert set(settings["decoding"]) == set(type(profile.decoding).model_fields)
    assert settings["target"]["device"] == "cpu"
    assert settings["decoding"]["mode"] == ("greedy" if "temperature" in text else "exact")
    assert settings["decoding"]["k"] == (7 if "k: 7" in text else 4)
    again = loaded(yaml.safe_dump(settings))
    assert merged_settings(again) == settings
    assert again.draft == profile.draft


RELEASE = "target: {checkpoint: 'package:some-weights==1.2', EXTRA}"
PIN = "ab" * 32


def test_a_package_may_be_pinned_and_have_a_second_source(folder: Path) -> None:
    profile = loaded(RELEASE.replace("EXTRA", f"sha256: {PIN}, bytes: 7, otherwise: me/it, revision: v1"))
    target = profile.target
    assert (target.sha256, target.bytes, target.otherwise, target.revision) == (PIN, 7, "me/it", "v1")
    # The pins are of the file's own checkpoint: they do not follow a flag that names another.
    other = loaded(RELEASE.replace("EXTRA", f"sha256: {PIN}, bytes: 7"), {"target.checkpoint": "me/other"}).target
    assert (other.checkpoint, other.sha256, other.bytes) == ("me/other", None, None)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (RELEASE.replace("EXTRA", "sha256: abc"), ["target.sha256: 'abc' is not allowed", "64 digits"]),
        (RELEASE.replace("EXTRA", "bytes: 0"), ["target.bytes: 0 is not allowed"]),
        (RELEASE.replace("EXTRA", "revision: v1"), ["target: revision means something only with a hub id"]),
        (
            f"target: {{checkpoint: me/it, sha256: {PIN}}}",
            ["target: sha256 means something only with", "NAME==VERSION"],
        ),
        (
            "target: {checkpoint: 'package:m/x.gguf', otherwise: me/it}",
            ["target: otherwise means something only with"],
        ),
        ("target: {checkpoint: 'package:some-weights'}", ["target.checkpoint", "package:NAME==VERSION"]),
        ("target: {checkpoint: 'package:some-weights==1.*'}", ["target.checkpoint", "package:NAME==VERSION"]),
        ("target: {checkpoint: 'package:a b==1'}", ["target.checkpoint", "package:NAME==VERSION"]),
    ],
)
def test_packages_that_are_written_wrongly(folder: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        loaded(text)
    assert len(str(error.value).splitlines()) == 1
    for part in parts:
        assert part in str(error.value)


def test_profiles_imports_no_torch() -> None:
    code = "import sys, specgen.profiles; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0
