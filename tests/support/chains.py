"""A byte tokenizer, and models that write a chain of bytes with certainty."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

END = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token b is byte b; END is a special token that ends a text."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves in the alphabet
    others = [b for b in range(256) if b not in kept]
    letters = {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False)


def chain_model(tokens: list[int]) -> Any:
    """Behind each of the tokens, which all differ, the next; behind the last one, and any other token, END."""
    size, width = 257, 264
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    following = dict(itertools.pairwise(tokens))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight.zero_()
        for token in range(size):
            model.lm_head.weight[following.get(token, END), token] = 30 / width**0.5
    return model


def write_chain(folder: Path, tokens: list[int]) -> Path:
    """The model with its tokenizer, and a profile `chain.yaml` that speculates with n-grams of the text."""
    chain_model(tokens).save_pretrained(folder / "chain")
    byte_tokenizer().save_pretrained(folder / "chain")
    profile = folder / "chain.yaml"
    profile.write_text("target: {checkpoint: ./chain, dtype: float32}\ndraft: {kind: ngram}\n")
    return profile
