"""Tiny random models of real architectures, made from transformers' configs: broad enough laws to test against."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from specgen.models.causal import CausalLM
from support.doubles import TableModel


def build(config: Any, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, which depend on the seed and on nothing else; the caller's generator is kept."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tf.AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "norm" not in name:
                torch.nn.init.normal_(weight, std=0.25)
    return model.to(dtype).eval()


def tiny_llama(
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    vocab: int = 50,
    dtype: torch.dtype = torch.float32,
    tie: bool = False,
) -> Any:
    config = tf.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=None,
    )
    return build(config, seed, dtype)


def tiny_gpt2(seed: int = 0) -> Any:
    return build(
        tf.GPT2Config(
            vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=512, bos_token_id=None, eos_token_id=None
        ),
        seed,
    )


def tiny_opt(seed: int = 0) -> Any:
    config = tf.OPTConfig(
        vocab_size=50,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=1,
    )
    return build(config, seed)


def tiny_gpt_neox(seed: int = 0) -> Any:
    config = tf.GPTNeoXConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    return build(config, seed)


def tiny_gemma3(seed: int = 0) -> Any:
    """Every second layer has a sliding window of 8 tokens."""
    config = tf.Gemma3TextConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        max_position_embeddings=512,
        layer_types=["sliding_attention", "full_attention"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        query_pre_attn_scalar=8,
    )
    return build(config, seed)


def tiny_qwen3(seed: int = 0) -> Any:
    config = tf.Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return build(config, seed)


def tiny_mamba(seed: int = 0) -> Any:
    config = tf.MambaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return build(config, seed)


ARCHITECTURES = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "opt": tiny_opt,
    "gpt_neox": tiny_gpt_neox,
    "gemma3": tiny_gemma3,
    "qwen3": tiny_qwen3,
}


def noisy_copy(model: Any, scale: float = 0.1, seed: int = 1) -> Any:
    """The same model with each weight moved a little: a draft that is accepted often and not always."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight += (torch.randn(weight.shape, generator=generator) * scale * weight.std()).to(weight)
    return other


def tiny_pair(name: str = "llama", scale: float = 0.3, seed: int = 0, **options: Any) -> tuple[CausalLM, CausalLM]:
    """Target and draft of one architecture; the draft is a noisy copy."""
    model = ARCHITECTURES[name](seed, **options)
    return CausalLM(model, "target"), CausalLM(noisy_copy(model, scale), "draft")


@torch.inference_mode()
def plain_logits(model: CausalLM, tokens: list[int] | tuple[int, ...]) -> Tensor:
    """Logits [n, V] after each token, by transformers alone: one call, no cache."""
    return model.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


class Recorder(CausalLM):
    """Keeps every row of logits with the text that it followed, as the cache had it."""

    def reset(self) -> None:
        super().reset()
        self.content: list[int] = []
        self.rows: list[tuple[tuple[int, ...], Tensor]] = []

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        logits = super().forward(tokens, rows)
        self.content += tokens[0].tolist()
        first = len(self.content) - rows + 1
        self.rows += [(tuple(self.content[: first + i]), row) for i, row in enumerate(logits[0])]
        return logits

    def rollback(self, counts: Any) -> None:
        super().rollback(counts)
        del self.content[len(self.content) - counts[0] :]

    def largest_error(self) -> float:
        """The largest difference to logits recomputed without a cache, over every row ever returned."""
        worst, known = 0.0, {}
        for prefix, _ in sorted(self.rows, key=lambda r: -len(r[0])):
            if prefix not in known:
                logits = plain_logits(self, prefix)
                known.update({prefix[: i + 1]: logits[i] for i in range(len(prefix))})
        for prefix, row in self.rows:
            worst = max(worst, float((known[prefix][: len(row)] - row[: known[prefix].shape[-1]]).abs().max()))
        return worst


class Memo(TableModel):
    """A model that computes the logits of a prefix once, for tests that run the same prefixes thousands of times."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(torch.empty(1, model.vocabulary), model.role)
        self.model = model
        self.known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, prefix: Any) -> Tensor:
        key = tuple(prefix)
        if key not in self.known:
            self.known[key] = plain_logits(self.model, key)[-1]
        return self.known[key]
