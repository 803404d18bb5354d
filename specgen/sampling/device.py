"""Randomness and processors without a host read, for captured graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import generation as hf

from specgen.errors import CaptureError
from specgen.sampling.processors import Ban, Processors, TopP
from specgen.sampling.randomness import KeyedUniforms, SharedNoise, Stream, gumbel_of, keyed_uniform, signed


class _SortedTopP(TopP):
    """The same set of tokens by sorting them all: how many it takes is not known to the host."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mass, tokens = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)  # of equals the lower ids first
        before = mass.cumsum(-1) - mass
        kept = scores.gather(-1, tokens).masked_fill(before >= self.top_p, -torch.inf)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, kept)


_AS_THEY_ARE = (Ban, hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.MinPLogitsWarper)


def on_device(processors: Processors) -> list[Any]:
    """The chain in a form that no host read takes part in. Raises CaptureError."""
    if type(processors) is not Processors:
        raise CaptureError(f"{type(processors).__name__} is not the usual way from logits to probabilities")
    chain: list[Any] = []
    for processor in processors.chain:
        if type(processor) is TopP:
            chain.append(_SortedTopP(processor.top_p))
        elif type(processor) in _AS_THEY_ARE:
            chain.append(processor)
        else:
            name = type(processor).__name__
            raise CaptureError(f"{name} reads the text so far, or is not known not to")
    return chain


class DeviceUniforms:
    """The numbers of `KeyedUniforms` with every key word a tensor on a device: nothing is read or sent by the host.

    stream, position and round_index are int64 tensors, or a `Stream`; one number an element of their broadcast.
    """

    def __init__(self, device: torch.device) -> None:
        self.key = torch.zeros(2, dtype=torch.int64, device=device)
        self._streams = torch.arange(max(Stream) + 1, device=device)

    def take(self, uniforms: KeyedUniforms) -> None:
        """From now on that one's numbers."""
        self.key.copy_(torch.tensor([signed(word) for word in uniforms._key]))

    def __call__(self, stream: Stream | Tensor, position: Tensor, round_index: Tensor, edges: Tensor) -> Tensor:
        purpose = stream if isinstance(stream, Tensor) else self._streams[int(stream)]
        return keyed_uniform(self.key[0], self.key[1], purpose, position, round_index, device=self.key.device)

    def either(self, condition: Tensor, yes: Stream, no: Stream) -> Tensor:
        """The stream `yes` where the condition holds, else `no`."""
        return torch.where(condition, self._streams[int(yes)], self._streams[int(no)])


class DeviceNoise(DeviceUniforms, SharedNoise):  # type: ignore[misc]
    """The noise of `SharedNoise`, in the same way."""

    def gumbel(self, position: Tensor | int, like: Tensor) -> Tensor:
        tokens = torch.arange(like.shape[-1], device=like.device)
        purpose = self._streams[self._STREAM]
        return gumbel_of(keyed_uniform(self.key[0], self.key[1], purpose, position, tokens, device=like.device))
