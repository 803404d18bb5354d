"""What the tests of the commands share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specgen.cli import app


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`specgen ARGUMENTS` in a folder, in this process: for what is refused before anything is loaded, and for what
    needs something replaced. Standard input is at its end."""

    def command(folder: Path, *arguments: str) -> Any:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("SPECGEN_CACHE", str(folder / "cache"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(sys, "argv", ["specgen", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            app.main()
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, int(exit_.value.code or 0), out, err)

    return command
