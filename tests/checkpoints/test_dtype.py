"""`dtype: auto` on a CPU: decided once, by an injected measurement, and kept. No duration is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.checkpoints import dtype, locate
from specgen.checkpoints import store as store_module
from specgen.checkpoints.dtype import Decision, settle, store
from specgen.checkpoints.located import Located
from specgen.errors import SpecgenError
from specgen.machine import environment, memory
from specgen.profiles.read import load_profile
from specgen.profiles.schema import CheckpointSettings
from specgen.session import load_session
from support.command import write_tokenizer
from support.tiny import tiny_llama

CPU = torch.device("cpu")
FASTER = {"float32": 0.0183, "bfloat16": 0.0121}
HARDLY = {"float32": 0.0100, "bfloat16": 0.0091}


class Measure:
    """An injected measurement, which counts how often it is asked."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times, self.calls = times, 0

    def __call__(self, located: Located, settings: CheckpointSettings) -> dict[str, float]:
        self.calls += 1
        return self.times


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A float32 checkpoint, taken for large enough, on a CPU that has bfloat16; and a cache of its own."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dtype, "SMALL", 0)
    monkeypatch.setattr(dtype, "has_bfloat16", lambda: True)
    return saved(tmp_path / "model", torch.float32)


def saved(folder: Path, dtype: torch.dtype) -> Path:
    tiny_llama(seed=3, vocab=25).to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def settled(folder: Path, measure: Measure, **settings: Any) -> Decision:
    located = locate.locate(str(folder))
    return settle(located, CheckpointSettings(checkpoint=str(folder), **settings), CPU, measure)


@pytest.mark.parametrize(("times", "dtype"), [(FASTER, "bfloat16"), (HARDLY, "float32")], ids=["faster", "hardly"])
def test_decision_is_kept_and_the_second_load_does_not_measure(
    folder: Path, times: dict[str, float], dtype: str
) -> None:
    first = settled(folder, measure := Measure(times))
    assert (first.dtype, measure.calls) == (dtype, 1)
    assert f"{dtype} (" in str(first.note)
    again = Measure({"float32": 1.0, "bfloat16": 2.0} if dtype == "bfloat16" else FASTER)
    assert (settled(folder, again).dtype, again.calls) == (dtype, 0)
    (entry,) = json.loads(store().read_text())["measured"]
    assert entry["seconds"] == times
    assert entry["when"]
    assert entry["processor"] == environment.processor()


def test_note_says_times_place_remedy_and_that_the_weights_are_rounded(folder: Path) -> None:
    note = str(settled(folder, Measure(FASTER)).note)
    for words in ("bfloat16 (12.1 ms a call against 18.3 in float32", str(store()), "--dtype chooses", "rounded"):
        assert words in note
    assert settled(folder, Measure(FASTER)).note == note  # a later run rounds as well
    assert "rounded" not in str(settled(saved(folder.parent / "own", torch.bfloat16), Measure(FASTER)).note)
    assert settled(folder.parent / "own", Measure(FASTER)).note is None  # nothing is new, and nothing differs


def test_something_else_is_measured_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Measure(FASTER)
    settled(folder, measure)
    settled(folder, measure, engine="eager")
    assert measure.calls == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 61)
    settled(folder, measure)
    assert measure.calls == 3
    monkeypatch.setattr(dtype, "processor", lambda: "another")
    settled(folder, measure)
    assert measure.calls == 4
    saved(folder.parent / "other", torch.float32)
    settled(folder.parent / "other", measure)
    assert measure.calls == 5


def test_other_weights_in_the_same_folder_are_measured_anew(folder: Path) -> None:
    settled(folder, Measure(FASTER))
    before = dtype._state(folder)
    tiny_llama(seed=4, vocab=26).save_pretrained(folder)
    assert dtype._state(folder) != before
    settled(folder, measure := Measure(HARDLY))
    assert measure.calls == 1
    assert len(json.loads(store().read_text())["measured"]) == 1  # of what is gone nothing is kept


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[" * 100000,
        "[]",
        '{"measured": 3}',
        '{"measured": [7, {"checkpoint": 1}]}',
        b"\xff\xfe",
        "no-seconds",
        "negative",
    ],
    ids=lambda damage: str(damage)[:20],
)
def test_damaged_store_is_ignored_and_rewritten(folder: Path, damage: str | bytes) -> None:
    settled(folder, Measure(FASTER))
    if damage in ("no-seconds", "negative"):
        data = json.loads(store().read_text())
        data["measured"][0]["seconds"] = None if damage == "no-seconds" else {"float32": -1.0, "bfloat16": 1.0}
        damage = json.dumps(data)
    store().write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    measure = Measure(HARDLY)
    assert settled(folder, measure).dtype == "float32"
    assert measure.calls == 1
    settled(folder, measure)
    assert measure.calls == 1


def test_what_cannot_be_kept_does_not_decide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a store two runs with one seed could differ."""
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("SPECGEN_CACHE", str(folder.parent / "file"))
    decision = settled(folder, measure := Measure(FASTER))
    assert (decision.dtype, measure.calls) == ("float32", 0)
    assert "cannot be written" in str(decision.note)
    monkeypatch.setenv("SPECGEN_CACHE", str(folder.parent / "cache"))
    store().mkdir(parents=True)  # found out before the work, not behind it
    assert (settled(folder, measure).dtype, measure.calls) == ("float32", 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_named_dtype_is_untouched(folder: Path, dtype: str) -> None:
    assert settled(folder, measure := Measure(FASTER), dtype=dtype) == Decision(dtype)
    assert measure.calls == 0


def test_where_nothing_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Measure(FASTER)
    assert settled(saved(folder.parent / "proof", torch.float64), measure) == Decision("auto")
    located = locate.locate(str(folder))
    settings = CheckpointSettings(checkpoint=str(folder))
    assert settle(located, settings, torch.device("cuda"), measure) == Decision("auto")
    monkeypatch.setattr(dtype, "has_bfloat16", lambda: False)
    assert settled(folder, measure) == Decision("float32")
    other = settled(saved(folder.parent / "half", torch.float16), measure)
    assert (other.dtype, other.note) == ("float32", "float32: this CPU computes no float16")
    monkeypatch.setattr(dtype, "SMALL", 10_000_000)
    assert settled(folder, measure) == Decision("auto")
    assert measure.calls == 0
    assert not store().exists()


def test_no_room_for_both_copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype, "free_memory", lambda: 1000)
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    monkeypatch.setattr(dtype, "measured", measure := Measure(FASTER))
    located = locate.locate(str(folder))
    decision = settle(located, CheckpointSettings(checkpoint=str(folder)), CPU)
    assert (decision.dtype, measure.calls) == ("float32", 0)
    assert "both copies" in str(decision.note)


def test_session_loads_what_was_decided_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype, "measured", measure := Measure(FASTER))
    path = folder.parent / "p.yaml"
    path.write_text("target: {checkpoint: ./model}\n")
    for _ in range(2):
        session = load_session(load_profile(str(path), {"device": "cpu"}))
        assert session.pair.dtype == torch.bfloat16
        assert any(n.startswith("the target's dtype auto: bfloat16 (12.1 ms") for n in session.notes)
    assert measure.calls == 1
    assert load_session(load_profile(str(path), {"device": "cpu", "dtype": "float32"})).notes == ()


def test_cache_clear_forgets(folder: Path) -> None:
    settled(folder, Measure(FASTER))
    size = store().stat().st_size
    assert store_module.clear_cache() >= size
    assert not store().exists()
    settled(folder, measure := Measure(FASTER))
    assert measure.calls == 1


def test_the_measurement_itself(folder: Path) -> None:
    for engine in ("auto", "eager"):
        times = dtype.measured(locate.locate(str(folder)), CheckpointSettings(checkpoint=str(folder), engine=engine))
        assert sorted(times) == ["bfloat16", "float32"]
        assert min(times.values()) > 0
    with pytest.raises(SpecgenError, match="graph"):
        dtype.measured(locate.locate(str(folder)), CheckpointSettings(checkpoint=str(folder), engine="graph"))
