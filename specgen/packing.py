"""Linear weights reordered once for oneDNN's CPU kernels: a call on a few tokens then costs what one token does.

As torch runs a float32 `linear`, two to four rows cost two to three times one row. The reordered weights are what
torch's own inductor uses; the operators are torch's private interface, so they stay in this room, are tried before
they are trusted, and the ordinary path is never further away than `unpack`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

WORTH = 1 << 16  # weights a linear: below it a call is overhead, whatever the layout
# float16 needs instructions that few CPUs have, and float64 no kernel of oneDNN serves.
PACKABLE = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the trial's largest result; bfloat16 was seen identical


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W [out, in] in oneDNN's own order. No gradients; lives on the CPU it was packed for."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Not a buffer: an opaque tensor has no storage that `to` or a state dict could handle.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def unpacked(self) -> nn.Linear:
        """The ordinary linear again, its weights bit for bit."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(self.packed.to_dense(), requires_grad=False)
        linear.bias = self.bias
        return linear.eval()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """Whether this torch on this CPU packs linears of that dtype, and multiplies rightly with them."""
    if dtype not in PACKABLE or not torch.backends.mkldnn.is_available():
        return False
    linear = nn.Linear(48, 80).to(dtype).requires_grad_(False)
    x = torch.arange(3 * 48, dtype=torch.float32).sin().reshape(1, 3, 48).to(dtype)
    try:
        with torch.inference_mode():
            found, wanted = PackedLinear(linear)(x), linear(x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool((found - wanted).abs().max() <= CLOSE[dtype] * wanted.abs().max())


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linears worth packing, with where they hang. A subclass, or one that something hooks into, may read its
    weights itself (routers, quantised and offloaded ones do) and is left alone."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is not nn.Linear or hasattr(child, "_hf_hook") or child._forward_hooks:
                continue
            weight = child.weight
            if weight.device.type == "cpu" and weight.numel() >= WORTH and packs(weight.dtype):
                yield parent, name, child


@torch.inference_mode()
def pack(model: nn.Module) -> int:
    """Packs what is worth it in place and frees the ordinary weights, one linear at a time; how many there were.

    A weight that is shared (an output head tied to the embedding table) stays for whoever else reads it, and only
    then are there two copies of it.
    """
    count = 0
    for parent, name, linear in list(_linears(model)):
        setattr(parent, name, PackedLinear(linear))
        linear.weight = None  # type: ignore[assignment]  # the list holds the module: free its weights now
        count += 1
    return count


@torch.inference_mode()
def unpack(model: nn.Module) -> None:
    """Undoes `pack`, bit for bit; a shared weight is no longer shared."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, PackedLinear):
                setattr(parent, name, child.unpacked())


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all weights that are held, packed ones included; each storage once."""
    seen = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    packed = (m.packed for m in model.modules() if isinstance(m, PackedLinear))
    return sum(seen.values()) + sum(w.numel() * w.element_size() for w in packed)


def call_bytes(model: Any) -> int:
    """Bytes of the weights that a call on one token reads: of a table of embeddings one row, unless it is the output
    head as well (packed, the head is a copy of its own)."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    read_whole = head is not None and getattr(head, "weight", None) is table
    return parameter_bytes(model) - (0 if read_whole else table.numel() * table.element_size())
