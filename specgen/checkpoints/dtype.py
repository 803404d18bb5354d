"""`dtype: auto` on a CPU: float32 or bfloat16, measured once per machine and checkpoint and kept in the user's cache.

Kept, because a seeded run must not depend on a stopwatch: what was decided once holds until the cache is cleared.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specgen.checkpoints.load import load_config, load_weights, parameter_bytes
from specgen.checkpoints.located import Located, cache_folder
from specgen.checkpoints.store import MEASURED_DTYPES
from specgen.machine.clocks import interleaved_medians
from specgen.machine.environment import processor
from specgen.machine.memory import free_memory
from specgen.models.probe import single_token_call
from specgen.profiles.schema import CheckpointSettings

WORTH = 0.9  # bfloat16 rounds the weights: it must take at most this share of float32's time


SMALL = 10_000_000  # parameters; below, a call is overhead, and a measurement would decide by chance


REPEATS = 9


BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # "bf16": what Arm calls it


# (checkpoint, its settings) → median seconds of a single-token call by the dtype's name.
Measure = Callable[[Located, CheckpointSettings], Mapping[str, float]]


@dataclass(frozen=True)
class Decision:
    """dtype: as `load_weights` takes it; "auto" is the checkpoint's own. note: what the user should know of it."""

    dtype: str
    note: str | None = None


def settle(
    located: Located, settings: CheckpointSettings, device: torch.device, measure: Measure | None = None
) -> Decision:
    """The dtype to load the checkpoint in.

    What the profile names, it gets. `auto` is the checkpoint's own everywhere but on a CPU, and there too for
    float64 and for models below SMALL parameters. Otherwise: float32, or bfloat16 where the CPU has it and a
    single-token call takes at most WORTH of the time. The first decision is kept in `store()`; where it cannot be
    kept, nothing is measured and float32 is taken.
    """
    if settings.dtype != "auto" or device.type != "cpu" or settings.device_map is not None:
        return Decision(settings.dtype)
    own = _own_dtype(located, settings)
    parameters = parameter_bytes(located, torch.int8, settings.trust_remote_code)
    if own not in (None, "float32", "bfloat16", "float16") or parameters < SMALL:
        return Decision("auto")
    if not has_bfloat16():
        changed = own not in (None, "float32")
        return Decision("float32", f"float32: this CPU computes no {own}" if changed else None)
    if measure is None and (short := _memory_short(parameters)) is not None:
        return Decision("float32", f"float32, not measured: {short}")
    try:
        times, fresh = _kept_or_measured(_key(located, settings), lambda: (measure or measured)(located, settings))
    except OSError as error:
        what = error.strerror or error
        return Decision("float32", f"float32, not measured: {store()} cannot be written ({what}); --dtype chooses")
    dtype = "bfloat16" if times["bfloat16"] <= WORTH * times["float32"] else "float32"
    return Decision(dtype, _note(dtype, own, times) if fresh or dtype != (own or "float32") else None)


def _note(dtype: str, own: str | None, times: Mapping[str, float]) -> str:
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    rounded = dtype == "bfloat16" and own != "bfloat16"
    return (
        f"{dtype} ({times[dtype] * 1e3:.1f} ms a call against {times[other] * 1e3:.1f} in {other}; measured once and "
        f"kept in {store()}; --dtype chooses)"
        + (f". The model is then the {own or 'float32'} checkpoint rounded to bfloat16" if rounded else "")
    )


def _own_dtype(located: Located, settings: CheckpointSettings) -> str | None:
    """The dtype that the configuration names; None where it is silent."""
    config = load_config(located, settings.trust_remote_code)
    own = getattr(config, "dtype", None)
    return None if own is None else str(own).removeprefix("torch.")


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself; where it does not, torch imitates it, slowly."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return not BFLOAT16_FLAGS.isdisjoint(value.split())
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe()) if probe is not None else False


def _memory_short(parameters: int) -> str | None:
    """Both copies at once, and what preparing an engine takes on the way: in words, if that is more than is free."""
    need, free = parameters * (4 + 2) * 5 // 4, free_memory()
    if need <= free:
        return None
    return f"both copies of the weights take {need / 1e9:.1f} GB and {free / 1e9:.1f} are free; --dtype chooses"


# The store: {"version": 1, "measured": [{**key, "seconds": {dtype: s}, "when": ISO 8601}]}
def store() -> Path:
    """The file with what was measured; `specgen cache clear` removes it."""
    return cache_folder() / MEASURED_DTYPES


def _key(located: Located, settings: CheckpointSettings) -> dict[str, Any]:
    """What a measurement holds for: this checkpoint, on this machine, executed so."""
    return {
        "checkpoint": located.path,
        "state": located.revision or _state(located.folder),
        "processor": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "engine": settings.engine,
        "attention": settings.attention,
    }


def _state(folder: Path | None) -> str | None:
    """Sizes and times of a folder's weights: another training run saved into it is another checkpoint."""
    if folder is None:
        return None
    stats = [(f.name, f.stat()) for f in sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])]
    return " ".join(f"{name}:{s.st_size}:{s.st_mtime_ns}" for name, s in stats)


def _kept_or_measured(
    key: Mapping[str, Any], measure: Callable[[], Mapping[str, float]]
) -> tuple[Mapping[str, float], bool]:
    """Seconds by dtype, and whether they were measured now. Raises OSError where they could not be kept."""
    from filelock import FileLock

    if (times := _find(_entries(), key)) is not None:
        return times, False
    store().parent.mkdir(parents=True, exist_ok=True)
    # Held while measuring: two processes would disturb each other, and might decide differently.
    with FileLock(store().with_name(f".{store().name}.lock")):
        entries = _entries()
        if (times := _find(entries, key)) is not None:
            return times, False
        _write(entries)  # before the work: what cannot be kept must not decide
        times = {name: float(seconds) for name, seconds in measure().items()}
        same = ("checkpoint", "processor", "torch", "threads", "engine", "attention")  # an older state is gone
        entries = [e for e in entries if any(e.get(name) != key[name] for name in same)]
        _write([*entries, {**key, "seconds": times, "when": datetime.now(UTC).isoformat(timespec="seconds")}])
    return times, True


def _entries() -> list[dict[str, Any]]:
    """What the store holds; nothing where it is missing or damaged."""
    try:
        found = json.loads(store().read_text(encoding="utf-8"))["measured"]
        return [entry for entry in found if isinstance(entry, dict)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _find(entries: list[dict[str, Any]], key: Mapping[str, Any]) -> dict[str, float] | None:
    for entry in entries:
        times = entry.get("seconds")
        if all(name in entry and entry[name] == value for name, value in key.items()) and isinstance(times, dict):
            good = all(
                isinstance(times.get(name), float) and 0 < times[name] < math.inf for name in ("float32", "bfloat16")
            )
            if good:
                return times
    return None


def _write(entries: list[dict[str, Any]]) -> None:
    """All at once, so that a reader never sees half a file."""
    partial = store().with_name(f".{store().name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps({"version": 1, "measured": entries}, indent=1) + "\n", encoding="utf-8")
        partial.replace(store())
    finally:
        partial.unlink(missing_ok=True)


# Measuring
def measured(located: Located, settings: CheckpointSettings) -> dict[str, float]:
    """Median seconds of a single-token call in float32 and in bfloat16, taken in turns under the profile's engine.

    The weights are read once, converted, and freed again.
    """
    model = load_weights(
        located,
        dtype="auto",
        device="cpu",
        attention=settings.attention,
        trust_remote_code=settings.trust_remote_code,
    )
    other = copy.deepcopy(model).to(torch.float32)
    steps: dict[str, Callable[[], object]] = {
        "float32": single_token_call(other, settings.engine),
        "bfloat16": single_token_call(model.to(torch.bfloat16), settings.engine),
    }
    return interleaved_medians(steps, time.perf_counter, repeats=REPEATS)
