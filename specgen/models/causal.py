"""A causal language model with its cache: forward(new tokens), lengths, rollback(per row). Knows no profile."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specgen.errors import RunError, UsageError
from specgen.models.caches import in_place
from specgen.models.protocol import PREFILL_CHUNK, LanguageModel
from specgen.models.ragged import RaggedLM
from specgen.models.rope import context_of
from specgen.models.traffic import cache_bytes, call_bytes

SCORE_CHUNK = 256  # rows a call: bounds the [rows, vocabulary] logits of a teacher-forced pass


@functools.cache
def _windows_take_several_calls() -> bool:
    """Whether a recording sliding-window layer shows just its window in a call that no crop preceded.

    A draft makes k calls between two roll-backs. transformers 5.17 returns all that was recorded there, which no
    longer fits the mask.
    """
    from transformers.cache_utils import DynamicSlidingWindowLayer

    layer = DynamicSlidingWindowLayer(sliding_window=2)
    layer.activate_past_recording()
    for n in (3, 1):
        keys, _ = layer.update(torch.zeros(1, 1, n, 1), torch.zeros(1, 1, n, 1))
    return bool(keys.shape[-2] == 2)


class CausalLM(LanguageModel):
    """A transformers model for one row of text.

    Raises UsageError where its cache cannot be rolled back, RunError where a call runs out of memory or the cache
    does not hold what was fed (some releases swallow an unknown cache argument and cache nothing).
    """

    def __init__(self, model: Any, role: str, vocabulary: int | None = None, *, engine: str = "eager") -> None:
        self.model = model
        self.role = role
        self.engine = engine
        self.device: torch.device = model.device
        config = model.config.get_text_config()
        self.vocabulary = vocabulary or int(config.vocab_size)
        self.context = context_of(model.config)
        self.windowed = bool(getattr(config, "sliding_window", None))
        self._embeddings = int(model.get_input_embeddings().weight.shape[0])
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = next((n for n in ("cache", "past_key_values") if n in parameters), None)
        if self._cache_argument is None:
            raise UsageError(f"the {role} ({type(model).__name__}) takes no key-value cache: specgen cannot run it")
        self.dtype: torch.dtype = model.dtype
        self._keeps_logits = "logits_to_keep" in parameters
        self._cache: Any = None
        self.reset()

    def _new_cache(self) -> Any:
        cache = in_place(DynamicCache(config=self.model.config))
        cache.activate_past_recording()  # sliding windows keep what a rollback may need again
        if any(cache.is_sliding) and not any(cache.is_linear) and not _windows_take_several_calls():
            return in_place(DynamicCache())  # whole layers: more memory, but the model's mask hides the past
        if not cache.is_croppable:
            raise UsageError(
                f"the {self.role} ({type(self.model).__name__}) keeps a recurrent state that cannot be rolled back: "
                "speculative generation needs a model whose cache can forget rejected tokens"
            )
        return cache

    def for_rows(self) -> RaggedLM:
        return RaggedLM(self)

    @property
    def bytes_read(self) -> tuple[int, int]:  # type: ignore[override]
        return call_bytes(self.model), cache_bytes(self.model)

    def reset(self) -> None:
        self._cache = self._new_cache()
        self._length = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._length,)

    def call(self, tokens: Tensor, rows: int, cache: Any, *, cached: int | None = None, **more: Any) -> Tensor:
        """One call of the model on tokens [B, n] with any cache, or None; logits [B, rows, V] of the last `rows`.

        Ids that the model has no embedding for (another vocabulary's) are read as id 0. cached: what the message
        about too little memory calls cached, where that is not this model's own cache. more: further arguments.
        """
        tokens = tokens.to(self.device)
        if self._embeddings < self.vocabulary:
            tokens = torch.where(tokens < self._embeddings, tokens, 0)
        arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": cache is not None, **more}
        if cache is not None:
            arguments[str(self._cache_argument)] = cache
        if self._keeps_logits:
            arguments["logits_to_keep"] = rows
        try:
            logits = self.model(**arguments).logits[:, -rows:, : self.vocabulary]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            batch, n = tokens.shape
            fed, cached = f"{batch} times {n}" if batch > 1 else str(n), self._length if cached is None else cached
            smaller = "a smaller --batch-size, " if batch > 1 else ""
            raise RunError(
                f"out of memory in a call of the {self.role} on {fed} tokens after {cached} cached ones "
                f"({self.device}); try {smaller}--dtype bfloat16, a shorter prompt, or smaller --k"
            ) from error
        missing = self.vocabulary - logits.shape[-1]
        if missing > 0:  # tokens that only the other side has: probability 0 here
            logits = torch.nn.functional.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min)
        return logits

    @torch.inference_mode()
    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        logits = self.call(tokens, rows, self._cache)
        self._length += tokens.shape[-1]
        self._check_length()
        return logits

    def _check_length(self) -> None:
        cached = int(self._cache.get_seq_length())
        if cached != self._length:
            raise RunError(
                f"the {self.role}'s cache holds {cached} tokens where {self._length} were expected: "
                "this release of transformers and this model do not agree on their cache"
            )

    def rollback(self, counts: Sequence[int]) -> None:
        (count,) = counts
        if not 0 <= count <= self._length:
            raise ValueError(f"cannot roll back {count} of {self._length} cached tokens")
        if self._length:
            # By each layer's own count: after an interrupted call some hold its tokens and some do not. Once, and
            # also by 0: sliding windows are trimmed here, and what they trim a second crop cannot bring back.
            for layer in self._cache.layers:
                layer.crop(-max(0, layer.get_seq_length() - (self._length - count)))
        self._length -= count
        self._check_length()

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, Tensor]]:
        """As the protocol says: one call without a cache, or, for more rows than a chunk, a fresh cache that is
        only ever appended to."""
        if len(tokens) - start <= SCORE_CHUNK:
            yield start, self.call(torch.tensor([tokens[:-1]]), len(tokens) - start, None)[0]
            return
        cache = self._new_cache()
        for first in range(0, start - 1, PREFILL_CHUNK):
            self.call(torch.tensor([tokens[first : min(first + PREFILL_CHUNK, start - 1)]]), 1, cache)
            cache.crop(0)
        for first in range(start, len(tokens), SCORE_CHUNK):
            chunk = tokens[first - 1 : min(first + SCORE_CHUNK, len(tokens)) - 1]
            yield first, self.call(torch.tensor([chunk]), len(chunk), cache)[0]
            cache.crop(0)
