"""The order of processors is part of the law: every chain against `generate`, on rows where the order matters."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from specgen.sampling.processors import Processors
from specgen.settings import Sampling
from support.tiny import tiny_llama

VOCABULARY, ROWS, LENGTH = 40, 64, 14

# By the setting's name here, in the order in which the chain applies them: (Sampling, GenerationConfig).
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition_penalty": ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "bad_words_ids": ({"bad_words_ids": ((5,), (7, 9), (3, 11))}, {"bad_words_ids": [[5], [7, 9], [3, 11]]}),
    "ban": ({"ban": (2, 13, 21, 30)}, {"suppress_tokens": [2, 13, 21, 30]}),
    "temperature": ({"temperature": 0.6}, {"temperature": 0.6}),
    "top_k": ({"top_k": 6}, {"top_k": 6}),
    "top_p": ({"top_p": 0.8}, {"top_p": 0.8}),
    "min_p": ({"min_p": 0.12}, {"min_p": 0.12}),
}


@cache
def setting() -> tuple[Any, Tensor]:
    """A model with rows of all shapes, and prompts that repeat themselves."""
    generator = torch.Generator().manual_seed(4)
    model = tiny_llama(vocab=VOCABULARY)
    with torch.no_grad():
        model.lm_head.weight *= 1.5
    return model, torch.randint(0, 12, (ROWS, LENGTH), generator=generator)


@cache
def by_generate(names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Raw logits and processed scores [ROWS, V] of the first token that `generate` draws under these settings."""
    model, prompts = setting()
    settings = {key: value for name in names for key, value in SETTINGS[name][1].items()}
    if "top_k" not in settings:
        settings["top_k"] = 0  # transformers' default is 50
    done = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        generation_config=GenerationConfig(pad_token_id=0, **settings),
        do_sample=True,
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    return done.logits[0], done.scores[0]


def chain(names: tuple[str, ...]) -> Processors:
    settings = {key: value for name in names for key, value in SETTINGS[name][0].items()}
    return Processors.of(Sampling(**settings))


def scored(processors: Processors, logits: Tensor) -> Tensor:
    _, prompts = setting()
    rows = [processors.scores(row[None], prompt) for row, prompt in zip(logits, prompts.tolist(), strict=True)]
    return torch.cat(rows)


@pytest.mark.parametrize("size", range(1, len(SETTINGS) + 1))
def test_every_chain_is_that_of_generate(size: int) -> None:
    for names in itertools.combinations(SETTINGS, size):
        logits, wanted = by_generate(names)
        torch.testing.assert_close(scored(chain(names), logits), wanted, rtol=1e-6, atol=1e-6, msg=str(names))


MASKS = ("no_repeat_ngram_size", "bad_words_ids", "ban")
MATTERS = {
    ("repetition_penalty", "top_k"),
    ("repetition_penalty", "top_p"),
    ("repetition_penalty", "min_p"),
    *((mask, warper) for mask in MASKS for warper in ("top_k", "top_p", "min_p")),
    ("temperature", "top_p"),
    ("temperature", "min_p"),
    ("top_k", "top_p"),
    ("top_p", "min_p"),
}


def test_these_rows_show_every_order_that_matters() -> None:
    """Of every pair the other way round: what changes is known, so that the comparison above sees any exchange."""
    seen = set()
    for pair in itertools.combinations(SETTINGS, 2):
        right = chain(pair)
        assert len(right.chain) == 2, pair
        logits, wanted = by_generate(pair)
        other = scored(Processors(right.chain[::-1]), logits)
        if not torch.allclose(other, wanted, rtol=1e-6, atol=1e-6):
            seen.add(pair)
    assert seen == MATTERS
