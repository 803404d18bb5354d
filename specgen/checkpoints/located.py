"""Where a checkpoint was found, and what its folder holds."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTALL_GGUF = "pip install 'specgen[gguf]'"


@dataclass(frozen=True, slots=True)
class Located:
    """Where a checkpoint is.

    path: a folder, or a hub id, as `from_pretrained` takes it. checkpoint: what the user wrote.
    revision: the hub's commit; "sha256:…" of a GGUF file; None for a folder, whose state nobody recorded.
    """

    path: str
    checkpoint: str
    kind: Literal["folder", "hub", "gguf"]
    revision: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder with the files; None where they are still to be downloaded."""
        return Path(self.path) if os.path.isdir(self.path) else None

    @property
    def pinned(self) -> dict[str, str]:
        """The keyword arguments that make `from_pretrained` load this very revision."""
        return {"revision": self.revision} if self.revision and self.folder is None else {}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files a folder should have, by its index where it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


# The user's cache
def cache_folder() -> Path:
    """Where converted checkpoints live: in $SPECGEN_CACHE, else in the user's cache folder."""
    return _cache_root() / "converted"


def packages_folder() -> Path:
    """Where checkpoints fetched from Python packages live, beside the converted ones."""
    return _cache_root() / "packages"


def _cache_root() -> Path:
    import platformdirs

    root = os.environ.get("SPECGEN_CACHE") or platformdirs.user_cache_dir("specgen", appauthor=False)
    return Path(root).expanduser().absolute()


def pickle_only(checkpoint: str, where: str) -> str:
    return (
        f"{checkpoint}: only pickled weights {where}; reading them can run code. If you trust them:\n"
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"[X.from_pretrained('{checkpoint}').save_pretrained('converted') for X in (M, T)]\""
    )
