"""Packed linears and caches written in place: the same numbers by other means."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from specgen.machine import devices
from specgen.models import packed
from specgen.models.caches import FIRST, InPlaceLayer, Rows, in_place, ragged
from specgen.models.causal import CausalLM
from specgen.models.engines import prepare
from specgen.models.packed import PackedLinear, pack, packs, unpack
from specgen.models.traffic import call_bytes, parameter_bytes
from support.tiny import noisy_copy, tiny_gpt2, tiny_llama

needs_packing = pytest.mark.skipif(not packs(torch.float32), reason="this torch packs no linears on this CPU")


@pytest.fixture
def pack_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have no linear that is worth packing."""
    monkeypatch.setattr(packed, "WORTH", 1)


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens])).logits[0]


@needs_packing
@pytest.mark.usefixtures("pack_everything")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_model_gives_the_same_logits(dtype: torch.dtype) -> None:
    if not packs(dtype):
        pytest.skip(f"no packed {dtype} here")
    model = tiny_llama().to(dtype)
    text = list(range(1, 30))
    before = logits_of(model, text)
    assert pack(model) == 2 * 7 + 1  # q, k, v, o, gate, up, down of two layers, and the head
    after = logits_of(model, text)
    if dtype == torch.bfloat16:
        assert torch.equal(before, after)
    else:
        assert (before - after).abs().max() < 1e-5
        assert not torch.equal(logits_of(noisy_copy(tiny_llama(), 1e-3), text), before)  # the comparison can fail


@needs_packing
@pytest.mark.usefixtures("pack_everything")
def test_a_bias_and_odd_widths_are_kept() -> None:
    linear = nn.Linear(37, 53).requires_grad_(False)
    x = torch.randn(2, 5, 37)
    with torch.inference_mode():
        assert torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)


@needs_packing
@pytest.mark.usefixtures("pack_everything")
def test_ordinary_weights_are_freed_and_come_back_bit_for_bit() -> None:
    model = tiny_llama()
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    whole = parameter_bytes(model)
    weights = [weakref.ref(m.weight) for m in model.modules() if type(m) is nn.Linear]
    pack(model)
    gc.collect()
    assert not any(w() is not None for w in weights)
    assert parameter_bytes(model) == whole
    unpack(model)
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in kept.items()}
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())


@needs_packing
@pytest.mark.usefixtures("pack_everything")
def test_a_tied_head_leaves_the_embedding_table_alone() -> None:
    model = tiny_llama(tie=True)
    table = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is table
    before = logits_of(model, [1, 2, 3])
    whole = parameter_bytes(model)
    pack(model)
    assert model.get_input_embeddings().weight is table
    assert (logits_of(model, [1, 2, 3]) - before).abs().max() < 1e-5
    assert parameter_bytes(model) == whole + table.numel() * 4  # the one weight of which there are two copies
    assert call_bytes(model) == whole  # of which a call reads one


def test_bytes_that_a_call_reads() -> None:
    tied, untied = tiny_llama(tie=True), tiny_llama()
    assert call_bytes(tied) == parameter_bytes(tied)
    assert call_bytes(untied) == parameter_bytes(untied) - 50 * 32 * 4


@needs_packing
@pytest.mark.usefixtures("pack_everything")
def test_what_is_no_plain_linear_is_left_alone() -> None:
    class Router(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, self.weight.softmax(0))

    model = nn.Sequential(Router(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[2]._hf_hook = object()  # as accelerate marks what it moves between devices
    assert pack(model) == 1
    assert isinstance(model[0], Router)
    assert isinstance(model[1], PackedLinear)
    assert type(model[2]) is nn.Linear
    gpt2 = tiny_gpt2()  # its projections are Conv1D; only the head is a linear
    assert pack(gpt2) == 1


def test_small_linears_are_not_worth_it() -> None:
    assert pack(tiny_llama()) == 0


@needs_packing
@pytest.mark.usefixtures("pack_everything")
def test_the_trial_refuses_a_kernel_that_multiplies_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: right(self, x) * 1.01)
    packs.cache_clear()
    try:
        assert not packs(torch.float32)
        assert prepare(tiny_llama(), "auto") == "eager"
        with pytest.raises(ValueError, match="engine packed: this torch and CPU have no packed float32 linears"):
            prepare(tiny_llama(), "packed")
    finally:
        packs.cache_clear()


@pytest.mark.usefixtures("pack_everything")
def test_engines_are_what_was_asked_for() -> None:
    assert prepare(tiny_llama(), "eager") == "eager"
    assert prepare(tiny_llama().double(), "auto") == "eager"
    if packs(torch.float32):
        assert prepare(tiny_llama(), "auto") == "packed"
        assert prepare(tiny_llama(), "packed") == "packed"
    with pytest.raises(ValueError, match="float64"):
        prepare(tiny_llama().double(), "packed")
    with pytest.raises(ValueError, match="engine graph needs a CUDA device"):
        prepare(tiny_llama(), "graph")
    with pytest.raises(ValueError, match="unknown engine"):
        prepare(tiny_llama(), "warp")


@needs_packing
@pytest.mark.usefixtures("pack_everything")
def test_packed_and_eager_draw_the_same_text() -> None:
    from specgen.settings import Sampling
    from support.rounds import rounds_of  # the shared way to run a pair

    model = tiny_llama()
    draft = noisy_copy(model, 0.3)
    texts = []
    for name in ("eager", "packed"):
        prepare(model, name)
        prepare(draft, name)
        target, drafter = CausalLM(model, "target"), CausalLM(draft, "draft")
        rounds = rounds_of(target, drafter, [1, 2, 3], Sampling(k=3, max_new_tokens=40, seed=5))
        texts.append([t for r in rounds for t in r.tokens])
    assert texts[0] == texts[1]


@needs_packing
@pytest.mark.smollm2
def test_smollm2_packed_is_within_rounding() -> None:
    from specgen.profiles.read import load_profile
    from specgen.session import load_session

    text = list(range(300, 340))
    found = {}
    for name in ("eager", "packed"):
        session = load_session(load_profile("smollm2", {"engine": name}), plain=True)
        model: Any = session.pair.target
        found[name] = logits_of(model.model, text)
    difference = (found["eager"] - found["packed"]).abs().max()
    assert 0 < difference < 5e-3
    assert torch.equal(found["eager"].argmax(-1), found["packed"].argmax(-1))


@pytest.mark.skipif(not packs(torch.bfloat16), reason="this CPU packs no bfloat16 linears")
@pytest.mark.smollm2
def test_smollm2_packed_in_bfloat16_is_identical() -> None:
    from specgen.profiles.read import load_profile
    from specgen.session import load_session

    text = list(range(300, 340))
    found = {}
    for name in ("eager", "packed"):
        session = load_session(load_profile("smollm2", {"engine": name, "dtype": "bfloat16"}), plain=True)
        model: Any = session.pair.target
        found[name] = logits_of(model.model, text)
    assert torch.equal(found["eager"], found["packed"])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    monkeypatch.setattr(devices, "allowed_cores", lambda: 1.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert devices.settle_threads() == 3  # what the user has set
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert devices.settle_threads() == 1
    monkeypatch.setattr(devices, "allowed_cores", lambda: 0.5)
    assert devices.settle_threads() == 1
    monkeypatch.setattr(devices, "allowed_cores", lambda: 64.0)
    assert devices.settle_threads() == 1  # torch's own choice is never raised


def test_a_cache_in_place_holds_what_concatenation_holds() -> None:
    drawn = torch.Generator().manual_seed(0)
    ours, theirs = InPlaceLayer(), DynamicCache().layer_class_to_replicate()
    length = 0
    for n, back in ((3, 0), (1, 1), (FIRST, 7), (5, 5), (2 * FIRST, 3), (1, 0)):
        new = [torch.randn(1, 2, n, 4, generator=drawn) for _ in range(2)]
        for mine, other in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(mine, other)
        for layer in (ours, theirs):
            layer.crop(-back)
        length += n - back
        assert ours.get_seq_length() == theirs.get_seq_length() == length
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_a_cache_in_place_copies_nothing_while_there_is_room() -> None:
    layer = InPlaceLayer()
    new = torch.ones(1, 1, 1, 2)
    layer.update(new, new)
    address = layer.keys.data_ptr()
    for _ in range(FIRST - 1):
        layer.update(new, new)
    assert layer.keys.data_ptr() == address
    layer.update(new, new)
    assert layer.keys.data_ptr() != address
    with pytest.raises(ValueError, match="0 or less"):
        layer.crop(1)


def test_only_layers_that_concatenate_are_replaced() -> None:
    assert [type(layer) for layer in in_place(DynamicCache(config=tiny_llama().config)).layers] == [InPlaceLayer] * 2
    from support.tiny import tiny_gemma3

    kinds = {type(layer).__name__ for layer in in_place(DynamicCache(config=tiny_gemma3().config)).layers}
    assert kinds == {"InPlaceLayer", "DynamicSlidingWindowLayer"}


@torch.inference_mode()
def test_rows_of_different_lengths_see_their_own_text_only() -> None:
    model = tiny_llama()
    rows = Rows(2)
    cache = ragged(model.config, rows, 4)  # grows on the way
    name = CausalLM(model, "target")._cache_argument

    def call(tokens: list[list[int]]) -> Tensor:
        rows.begin(len(tokens[0]), int(rows.lengths.max()) + len(tokens[0]))
        options = {"position_ids": rows.slots, "attention_mask": rows.mask(model.dtype), name: cache}
        return model(input_ids=torch.tensor(tokens), use_cache=True, **options).logits

    first = call([[1, 2, 3, 4, 5], [7, 8, 9, 40, 41]])  # the last two of row 1 are padding
    rows.lengths = torch.tensor([5, 3])
    second = call([[6, 7], [10, 11]])
    for row, (text, n) in enumerate((([1, 2, 3, 4, 5, 6, 7], 5), ([7, 8, 9, 10, 11], 3))):
        alone = logits_of(model, text)
        assert (first[row, :n] - alone[:n]).abs().max() < 1e-5
        assert (second[row] - alone[n:]).abs().max() < 1e-5


def test_a_ragged_cache_needs_full_attention() -> None:
    from support.tiny import tiny_gemma3

    with pytest.raises(ValueError, match="full attention"):
        ragged(tiny_gemma3().config, Rows(2))


class Odd(nn.Module):
    """Two linears of one tensor, with a hook for what happens between them; called as causal models are."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.between = nn.Embedding(8, 16), between
        self.q, self.k = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        x = self.embed(input_ids)
        q = self.q(x)
        return SimpleNamespace(logits=q + self.k(self.between(x)))


@torch.inference_mode()
def odd_logits(model: nn.Module) -> Tensor:
    return model(torch.arange(6)[None]).logits


@needs_packing
@pytest.mark.usefixtures("pack_everything")
def test_siblings_are_multiplied_together_and_only_where_that_is_the_same() -> None:
    for between, together in ((lambda x: x, True), (lambda x: x.mul_(0.5), False), (lambda x: x * 1, False)):
        model = Odd(between).requires_grad_(False)
        before = odd_logits(model)
        assert pack(model) == 2
        assert isinstance(model.q, packed.PackedPart) is together
        assert torch.allclose(odd_logits(model), before, atol=1e-5)
        unpack(model)
        assert torch.equal(odd_logits(model), before)


@needs_packing
@pytest.mark.usefixtures("pack_everything")
def test_a_linear_in_two_places_is_left_alone() -> None:
    model = Odd().requires_grad_(False)
    model.again = model.q
    before = odd_logits(model)
    assert pack(model) == 1
    assert type(model.q) is nn.Linear
    assert torch.allclose(odd_logits(model), before, atol=1e-5)


@needs_packing
@pytest.mark.usefixtures("pack_everything")
def test_a_model_that_needs_its_weights_keeps_them() -> None:
    class Reads(Odd):
        def forward(self, input_ids: Tensor, **options: Any) -> Any:
            return SimpleNamespace(logits=super().forward(input_ids).logits + self.k.weight.sum())

    model = Reads().requires_grad_(False)
    before = odd_logits(model)
    assert pack(model) == 0
    assert torch.equal(odd_logits(model), before)


@needs_packing
def test_engine_packed_is_refused_where_nothing_is_worth_it() -> None:
    with pytest.raises(ValueError, match="no linear that is worth packing"):
        prepare(tiny_llama(), "packed")
