"""Options that commands share: the same words everywhere, and what they set in a profile."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.testing import CliRunner

from specgen.cli import app
from specgen.cli import audit as audit_module
from specgen.cli import overlap as overlap_module
from specgen.cli import run as run_module
from specgen.cli.options import sampling_flags
from specgen.errors import UsageError
from specgen.profiles import read as read_module
from specgen.profiles import schema
from specgen.settings import Mode


def test_names_become_dotted_keys() -> None:
    assert sampling_flags(
        mode=Mode.EXACT,
        k=2,
        ban=["7", "a", "²"],
        stop=["x"],
        chat=False,
        system="s",
        device="cpu",
        dtype=None,
        engine="eager",
        draft="d",
    ) == {
        "decoding.mode": Mode.EXACT,
        "decoding.k": 2,
        "decoding.ban": ["7", "a", "²"],
        "decoding.stop": ["x"],
        "prompt.template": "raw",
        "prompt.system": "s",
        "device": "cpu",
        "dtype": None,
        "engine": "eager",
        "draft.checkpoint": "d",
    }
    assert sampling_flags(chat=True, ban=None) == {"prompt.template": "chat", "decoding.ban": []}
    assert sampling_flags(chat=None) == {"prompt.template": None}


VALUES: dict[str, tuple[str, Any]] = {
    "mode": ("lenient", Mode.LENIENT),
    "k": ("3", 3),
    "max_new_tokens": ("9", 9),
    "temperature": (".7", 0.7),
    "top_k": ("5", 5),
    "top_p": (".9", 0.9),
    "min_p": (".1", 0.1),
    "lenience": (".4", 0.4),
    "typical_epsilon": (".2", 0.2),
    "typical_delta": (".1", 0.1),
    "repetition_penalty": ("1.2", 1.2),
    "seed": ("11", 11),
    "device": ("cpu", "cpu"),
    "dtype": ("float64", "float64"),
    "engine": ("eager", "eager"),
    "system": ("s", "s"),
    "draft": ("d", "d"),
}
LISTS = {"ban": (["--ban", "7", "--ban", "x"], ["7", "x"]), "stop": (["--stop", "y"], ["y"])}
KEYS = {
    "device": "device",
    "dtype": "dtype",
    "engine": "engine",
    "system": "prompt.system",
    "draft": "draft.checkpoint",
    "chat": "prompt.template",
}


@pytest.mark.parametrize(
    ("command", "function"),
    [("run", run_module.run), ("audit", audit_module.audit), ("overlap", overlap_module.overlap)],
)
def test_every_option_reaches_the_profile(
    command: str, function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option with a value of its own: one that is forgotten, or set under another's key, shows."""
    settings = {*KEYS, *schema.DecodingSettings.model_fields}
    names = [n for n in inspect.signature(function).parameters if n in settings]
    assert len(names) > 5
    (tmp_path / "p.txt").write_text("a")
    arguments, wanted = [], {}
    for name in names:
        key = KEYS.get(name, f"decoding.{name}")
        if name == "chat":
            arguments, wanted[key] = [*arguments, "--raw"], "raw"
        elif name in LISTS:
            arguments, wanted[key] = [*arguments, *LISTS[name][0]], LISTS[name][1]
        else:
            arguments += ["--" + name.replace("_", "-"), VALUES[name][0]]
            wanted[key] = VALUES[name][1]
    if command == "overlap":
        arguments += ["--own", "9"]
        wanted["decoding.max_new_tokens"] = 9
    seen: dict[str, Any] = {}

    def load_profile(name: str, flags: dict[str, Any]) -> Any:
        seen.update(flags)
        raise UsageError("seen")

    monkeypatch.setattr(read_module, "load_profile", load_profile)
    files = {"run": ["p.txt"], "overlap": ["p.txt"], "audit": []}[command]
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app.app, [command, *files, *arguments]).exit_code == 2
    assert seen == wanted


def test_shared_options_read_the_same_everywhere() -> None:
    def help_of(function: Any, name: str) -> Any:
        return get_type_hints(function, include_extras=True)[name].__metadata__[0].help

    for name in ("device", "dtype", "engine", "profile", "debug"):
        assert len({help_of(f, name) for f in (run_module.run, audit_module.audit, overlap_module.overlap)}) == 1
    assert help_of(run_module.run, "engine").startswith("How model calls are executed")
