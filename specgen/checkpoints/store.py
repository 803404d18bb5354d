"""The user's cache of fetched and converted checkpoints: entries, sizes, clearing, locks, full disks."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specgen.checkpoints.explain import disk_full, size_text
from specgen.checkpoints.located import cache_folder, packages_folder
from specgen.errors import SpecgenError, UsageError

STAMP = "specgen.json"


MEASURED_DTYPES = "dtypes.json"  # beside the conversions: see dtypes.py


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A fetched or converted checkpoint: `bytes` on disk, what it was made from, and when (UTC, ISO 8601)."""

    name: str
    path: Path
    bytes: int
    source: str
    when: str


def _roots() -> list[Path]:
    return [root for root in (packages_folder(), cache_folder()) if root.is_dir()]


def cache_entries() -> list[CacheEntry]:
    """The fetched checkpoints by name, then the converted. Folders without our stamp are somebody else's and are
    left out."""
    entries = []
    for stamp in (stamp for root in _roots() for stamp in sorted(root.glob(f"*/{STAMP}"))):
        try:
            made = json.loads(stamp.read_text())
            source, when = str(made["source"]), str(made["when"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        folder = stamp.parent
        if not folder.is_symlink() and not folder.name.startswith("."):
            entries.append(CacheEntry(folder.name, folder, _bytes_in(folder), source, when))
    return entries


def clear_cache(name: str | None = None) -> int:
    """Remove one fetched or converted checkpoint, or all, what dead processes left and what `dtype: auto` has
    measured; returns the bytes freed.

    Raises UsageError where there is no such entry, SpecgenError while another process fetches or converts.
    """
    roots = _roots()
    if not roots:
        if name is not None:
            raise UsageError(f"{name}: no such entry; the cache {cache_folder().parent} is empty.")
        return 0
    with contextlib.ExitStack() as locks:
        for root in roots:
            locks.enter_context(cache_lock(root, wait=False))
        entries = [e for e in cache_entries() if name in (None, e.name)]
        if name is not None and not entries:
            raise UsageError(f"{name}: no such entry in {cache_folder().parent}.")
        freed = sum(entry.bytes for entry in entries)
        for entry in entries:
            try:
                shutil.rmtree(entry.path)
            except OSError as error:
                raise SpecgenError(f"{entry.path}: cannot be removed: {error.strerror or error}.") from error
        return freed + (sum(map(remove_leftovers, roots)) + _remove_measured() if name is None else 0)


def _bytes_in(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _remove_measured() -> int:
    """Forget what `dtype: auto` has measured; returns the file's bytes."""
    file = cache_folder() / MEASURED_DTYPES
    try:
        size = file.stat().st_size
        file.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise SpecgenError(f"{file}: cannot be removed: {error.strerror or error}.") from error
    return size


def remove_leftovers(root: Path) -> int:
    """Remove the temporary folders in a part of the cache; returns their bytes.

    To be called under the lock: whoever writes one holds it, so all that are found belong to dead processes.
    """
    freed = 0
    for folder in root.glob(".*.partial"):
        freed += _bytes_in(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return freed


@contextlib.contextmanager
def cache_lock(root: Path, *, wait: bool) -> Iterator[None]:
    """One process at a time fetches, or converts, on this machine: two conversions would also compete for memory."""
    from filelock import FileLock, Timeout

    lock = FileLock(root / ".lock")
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise SpecgenError(f"{root}: another specgen is writing there; try again later.") from None
    except OSError as error:
        raise SpecgenError(f"{lock.lock_file}: cannot be locked: {error.strerror or error}.") from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def disk_errors(checkpoint: str, folder: Path) -> Iterator[None]:
    """Name the folder in errors of the disk; the libraries' own messages name neither it nor a remedy."""
    try:
        yield
    except SpecgenError as error:
        if not disk_full(error):
            raise
        raise SpecgenError(no_room(checkpoint, folder)) from error
    except OSError as error:
        if disk_full(error):
            raise SpecgenError(no_room(checkpoint, folder)) from error
        raise SpecgenError(
            f"{checkpoint}: cannot be written to {folder}: {error.strerror or error}. "
            "Set SPECGEN_CACHE to a folder that can be written."
        ) from error


def no_room(checkpoint: str, folder: Path, need: int | None = None) -> str:
    needs = f" The conversion needs {size_text(need)}." if need else ""
    return (
        f"{checkpoint}: no room for it: the disk of {folder} is full.{needs} "
        "Free some, or set SPECGEN_CACHE to a folder elsewhere."
    )
