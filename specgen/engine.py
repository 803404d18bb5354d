"""How a model call is executed and timed on a device: eager, with packed weights, or as a captured graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is CUDA where there is one, else MPS, else the CPU. Raises ValueError."""
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available():
            name = "mps"
        else:
            name = "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} asked for, but torch sees no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} asked for, but torch sees {torch.cuda.device_count()} CUDA device(s)")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {name!r} asked for, but torch sees no MPS device")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device {name!r} is not supported: use cpu, cuda, cuda:N, mps or auto")
    return device


def clock_for(device: torch.device) -> Callable[[], float]:
    """Seconds, read after the device has finished what it was given: work queued on it is work not yet done."""
    if device.type == "cuda":

        def clock() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return clock
    if device.type == "mps":

        def mps_clock() -> float:
            torch.mps.synchronize()
            return time.perf_counter()

        return mps_clock
    return time.perf_counter


ENGINES = ("auto", "eager", "packed", "graph")


def prepare(model: Any, engine: str) -> str:
    """Readies a loaded transformers model for an engine, in place; the engine that it now runs under.

    auto: packed on a CPU that can, graph on CUDA, eager elsewhere. Raises ValueError, with a sentence, where the
    engine asked for cannot be had.
    """
    from specgen.packing import pack, packs

    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: use one of {', '.join(ENGINES)}")
    on_cpu = model.device.type == "cpu"
    if engine == "packed" and not on_cpu:
        raise ValueError(f"engine packed is for the CPU, and the model is on {model.device}: use auto or eager")
    if engine == "packed" and not packs(model.dtype):
        raise ValueError(
            f"engine packed: this torch and CPU have no packed {str(model.dtype).removeprefix('torch.')} linears: "
            "use float32 or bfloat16, or engine eager"
        )
    if engine == "graph" and model.device.type != "cuda":
        raise ValueError(f"engine graph needs a CUDA device, and the model is on {model.device}: use auto")
    if engine == "graph" or (engine == "auto" and model.device.type == "cuda"):
        return "graph"
    if engine == "packed" or (engine == "auto" and on_cpu and packs(model.dtype)):
        return "packed" if pack(model) else "eager"
    return "eager"
