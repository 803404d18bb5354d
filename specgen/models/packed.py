"""Linear weights reordered once for oneDNN's CPU kernels: a call on a few tokens then costs what one token does.

As torch runs a float32 `linear`, two to four rows cost two to three times one row. The reordered weights are what
torch's own inductor uses; the operators are torch's private interface, so they stay in this room, are tried before
they are trusted, and the ordinary path is never further away than `unpack`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
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
        return _linear(self.packed.to_dense(), self.bias)

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


Place = tuple[nn.Module, str, nn.Linear]  # a linear, and where it hangs: parent and name


def _linears(model: nn.Module) -> Iterator[Place]:
    """The linears worth packing, with where they hang. A subclass, or one that something hooks into, may read its
    weights itself (routers, quantised and offloaded ones do) and is left alone."""
    places = Counter(id(child) for parent in model.modules() for child in parent._modules.values())
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is not nn.Linear or hasattr(child, "_hf_hook") or child._forward_hooks:
                continue
            if places[id(child)] > 1:  # what hangs in two places is left alone
                continue
            weight = child.weight
            if weight.device.type == "cpu" and weight.numel() >= WORTH and packs(weight.dtype):
                yield parent, name, child


class Joint:
    """Linears that are called with the same tensor one after another (query, key and value, say), multiplied at once:
    one large product has more of the memory's bandwidth than a few small ones."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat([x.weight.detach() for x in linears]), None)
        biases = [x.bias for x in linears if x.bias is not None]
        self.bias = torch.cat([b.detach() for b in biases]) if biases else None
        self._input: Tensor | None = None  # held while parts of its product are wanted, so that `is` means the same
        self._products: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        """The product with the linear `index`. A part that was taken before, or of another tensor, is made anew."""
        if x is not self._input or index not in self._products:
            product = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            self._input, self._products = x, dict(enumerate(product.split(self.sizes, -1)))
        found = self._products.pop(index)
        if not self._products:
            self._input = None
        return found


class PackedPart(nn.Module):
    """One linear of a `Joint`."""

    def __init__(self, joint: Joint, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.joint, self.index, self.bias = joint, index, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.joint.part(self.index, x)

    def unpacked(self) -> nn.Linear:
        whole = self.joint.packed.to_dense()
        return _linear(whole.split(self.joint.sizes)[self.index].clone(), self.bias)


def _linear(weight: Tensor, bias: Any) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = bias
    return linear.eval()


def _siblings(model: nn.Module, linears: Sequence[Place]) -> list[list[Place]]:
    """The linears, those of one parent that a trial calls with the same tensor one after another together."""
    calls: list[tuple[Place, Tensor]] = []
    hooks = [
        place[2].register_forward_pre_hook(lambda module, inputs, place=place: calls.append((place, inputs[0])))
        for place in linears
    ]
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except Exception:  # a model that is called otherwise: its linears stay single
        return [[place] for place in linears]
    finally:
        for hook in hooks:
            hook.remove()
    groups: list[list[Place]] = []
    last: Tensor | None = None
    called = [place[2] for place, _ in calls]
    for place, x in calls:
        once, linear = called.count(place[2]) == 1, place[2]
        lead = groups[-1][0] if groups else None
        joins = lead is not None and x is last and lead[0] is place[0] and once
        if joins and lead is not None and (lead[2].bias is None) == (linear.bias is None):
            groups[-1].append(place)
        elif not any(linear is other[2] for group in groups for other in group):
            groups.append([place])
        last = x if once else None
    grouped = {id(place[2]) for group in groups for place in group}
    return groups + [[place] for place in linears if id(place[2]) not in grouped]


@torch.inference_mode()
def pack(model: nn.Module) -> int:
    """Packs what is worth it in place and frees the ordinary weights, a few linears at a time; how many there were.

    A weight that is shared (an output head tied to the embedding table) stays for whoever else reads it, and only
    then are there two copies of it. The model is tried before and after: where siblings that are multiplied together
    change its logits (one that writes into its input between two of them, say), each linear is packed alone; where
    that does, too, nothing is packed and 0 returned.
    """
    before = _trial(model)
    for together in (True, False):
        linears = list(_linears(model))
        if not linears:
            return 0
        groups = _siblings(model, linears) if together else [[place] for place in linears]
        for group in groups:
            _pack(group)
        if before is None or _close(before, _trial(model)):
            return len(linears)
        unpack(model)
    return 0


def _pack(group: Sequence[Place]) -> None:
    joint = Joint([linear for _, _, linear in group]) if len(group) > 1 else None
    for index, (parent, name, linear) in enumerate(group):
        setattr(parent, name, PackedLinear(linear) if joint is None else PackedPart(joint, index, linear))
        linear.weight = None  # type: ignore[assignment]  # the list holds the module: free its weights now


def _trial(model: nn.Module) -> Tensor | None:
    """Logits of a few tokens; None where the model is not one that takes tokens so."""
    try:
        found = model(input_ids=torch.arange(4)[None], use_cache=False).logits
    except Exception:
        return None
    return found if isinstance(found, Tensor) else None


def _close(before: Tensor, after: Tensor | None) -> bool:
    allowed = 1e-3 if before.dtype == torch.float32 else CLOSE[torch.bfloat16]
    if after is None:
        return False
    masked = before.isneginf() & after.isneginf()  # a head may rule tokens out by its bias
    before, after = before.masked_fill(masked, 0.0), after.masked_fill(masked, 0.0)
    return bool((before - after).abs().max() <= allowed * before.abs().max())


@torch.inference_mode()
def unpack(model: nn.Module) -> None:
    """Undoes `pack`, bit for bit; a shared weight is no longer shared."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, PackedLinear | PackedPart):
                setattr(parent, name, child.unpacked())
