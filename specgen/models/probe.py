"""A single-token call, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specgen.errors import SpecgenError
from specgen.models.causal import CausalLM
from specgen.models.engines import prepare
from specgen.models.protocol import prefill

PREFIX = 64  # tokens before the measured call


def single_token_call(model: Any, engine: str) -> Callable[[], None]:
    """A call on one token behind PREFIX cached ones, rolled back again."""
    try:
        engine = prepare(model, engine)
    except ValueError as error:
        raise SpecgenError(f"dtype auto: {error}, or name a dtype") from None
    causal = CausalLM(model, "model")
    tokens = [i % causal.vocabulary for i in range(PREFIX + 1)]
    prefill(causal, tokens[:PREFIX])

    def call() -> None:
        causal.forward(torch.tensor([tokens[PREFIX:]]), 1)
        causal.rollback([1])

    return call
