"""Machine, versions and git state, for every result file. Imports torch only where it is already loaded."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def version() -> str:
    try:
        return importlib.metadata.version("specgen")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the source tree specgen runs from, and whether it was changed; None for an installed wheel."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """The CPU's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    """What a reader needs to judge a number: versions, machine, threads and load, git state."""
    result: dict[str, Any] = {
        "specgen": version(),
        "python": platform.python_version(),
        "packages": {name: _installed(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
        "platform": platform.platform(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "git": _git_state(),
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        result["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            result["gpu"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return result
