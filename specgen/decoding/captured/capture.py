"""A step → something that replays it: a CUDA graph, or the step itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

Step = Callable[[], None]


class Captured(Protocol):
    def replay(self) -> None: ...


Capture = Callable[[Step, Step], Captured]  # a step, and what undoes it; the step must not have happened afterwards


class _Called:
    def __init__(self, step: Step) -> None:
        self.replay = step


def call_directly(step: Step, undo: Step) -> Captured:
    """No capture: each replay is a call. What tests run, and CPUs."""
    return _Called(step)


@functools.cache
def _stream_and_pool(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    """One side stream, since each has a workspace of its own, and one pool of memory for all graphs of a device.

    Graphs run one after another and leave nothing in the pool for one another: what they yield lies outside.
    """
    with torch.cuda.device(device):
        return torch.cuda.Stream(), torch.cuda.graph_pool_handle()


class CudaCapture:
    """Warms a step up on a side stream and captures it as a CUDA graph."""

    WARM_UPS = 2

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, step: Step, undo: Step) -> Captured:
        with torch.cuda.device(self.device):
            stream, pool = _stream_and_pool(self.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(self.WARM_UPS):
                    step()
                    undo()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                step()
        return cast(Captured, graph)


def capture_for(device: torch.device) -> Capture:
    return CudaCapture(device) if device.type == "cuda" else call_directly
