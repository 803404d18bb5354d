"""How a model's calls are executed: eager, with packed weights, or as captured graphs."""

from __future__ import annotations

from typing import Any

ENGINES = ("auto", "eager", "packed", "graph")


def prepare(model: Any, engine: str) -> str:
    """Readies a loaded transformers model for an engine, in place; the engine that it now runs under.

    auto: packed on a CPU that can, graph on CUDA, eager elsewhere. Raises ValueError, with a sentence, where the
    engine asked for cannot be had.
    """
    from specgen.models.packed import pack, packs

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
    if engine == "eager" or not on_cpu or not packs(model.dtype):
        return "eager"
    if pack(model):
        return "packed"
    if engine == "packed":
        raise ValueError("engine packed: this model has no linear that is worth packing: use auto or eager")
    return "eager"
