"""What a call has to read: bytes of weights and of cached tokens."""

from __future__ import annotations

from typing import Any

from torch import nn

from specgen.models.packed import PackedLinear, PackedPart


def cache_bytes(model: Any) -> int:
    """Bytes of keys and values that a cached token takes, in all layers of a transformers model; 0 where its
    configuration does not say."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if not layers or not heads:
        return 0
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * layers * kv_heads * size * next(model.parameters()).element_size())


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all weights that are held, packed ones included; each storage once."""
    seen = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    for module in model.modules():
        if isinstance(module, PackedLinear | PackedPart):
            packed = module.packed if isinstance(module, PackedLinear) else module.joint.packed
            seen[id(packed)] = packed.numel() * packed.element_size()
    return sum(seen.values())


def call_bytes(model: Any) -> int:
    """Bytes of the weights that a call on one token reads: of a table of embeddings one row, unless it is the output
    head as well (packed, the head is a copy of its own)."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    read_whole = head is not None and getattr(head, "weight", None) is table
    return parameter_bytes(model) - (0 if read_whole else table.numel() * table.element_size())
