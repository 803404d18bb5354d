"""A tiny GGUF file, written with the library that llama.cpp's converters use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers


def write_gguf(
    file: Path,
    split: str = "smollm",
    *,
    keys: Mapping[str, object] | None = None,
    tensors: Mapping[str, Sequence[float]] | None = None,
    architecture: str = "llama",
) -> dict[str, torch.Tensor]:
    """A one-layer Llama with a byte-level tokenizer that merges two spaces; returns its plain matrices.

    keys, tensors: written as well; a key without the architecture, which is put in front.
    """
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    tokens = ["<unk>", "<s>", "</s>", "<turn>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [1] * (len(tokens) - 4))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    generator = torch.Generator().manual_seed(0)

    def add(name: str, *shape: int) -> torch.Tensor:
        weight = torch.randn(*shape, generator=generator)
        writer.add_tensor(name, weight.numpy())
        return weight

    embeddings = add("token_embd.weight", len(tokens), 32)
    down = add("blk.0.ffn_down.weight", 32, 32)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"):
        add(f"blk.0.{name}.weight", 32, 32)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        add(f"{name}.weight", 32)
    for name, value in (keys or {}).items():
        kind = {bool: "bool", str: "string", int: "uint32", float: "float32", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(f"{architecture}.{name}", value)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, torch.tensor(values).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"model.embed_tokens.weight": embeddings, "model.layers.0.mlp.down_proj.weight": down}
