"""What a GGUF file says and transformers' loader drops: applied, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

from specgen.checkpoints.gguf import Account, Header
from specgen.checkpoints.load import load_weights
from specgen.checkpoints.locate import locate
from specgen.errors import UsageError
from specgen.models.rope import rope_changes_with_length
from support.gguf_files import write_gguf

DIMENSIONS, BASE, CONTEXT = 16, 1e4, 64
PLAIN = torch.tensor([BASE ** (-i / DIMENSIONS) for i in range(0, DIMENSIONS, 2)], dtype=torch.float64)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


def converted(tmp_path: Path, **extra):
    write_gguf(tmp_path / "m.gguf", **extra)
    return load_weights(locate(str(tmp_path / "m.gguf"), quiet=True), dtype=torch.float32)


def frequencies(model, length: int = 3) -> torch.Tensor:
    """Of each pair of dimensions, in radians a token, as the model turns a text of that length; and its scale."""
    rotary = model.model.rotary_emb
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    first = torch.atan2(sin[0, 1], cos[0, 1])[: DIMENSIONS // 2].double()
    return torch.stack([first, torch.hypot(sin[0, 1], cos[0, 1])[: DIMENSIONS // 2].double()])


def yarn(factor: float, original: int, attention: float = 1.0) -> torch.Tensor:
    """llama.cpp's ggml_rope_yarn_corr_dims, rope_yarn and rope_yarn_ramp, in words of its own."""

    def correction(rotations: float) -> float:
        return DIMENSIONS * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(BASE))

    low, high = max(0, math.floor(correction(32))), min(DIMENSIONS - 1, math.ceil(correction(1)))
    ramp = [1 - min(1, max(0, (i - low) / max(0.001, high - low))) for i in range(DIMENSIONS // 2)]
    mixed = [f / factor * (1 - r) + f * r for f, r in zip(PLAIN.tolist(), ramp, strict=True)]
    return torch.stack([torch.tensor(mixed), torch.full((8,), attention * (1 + 0.1 * math.log(factor)))]).double()


def divided(factors) -> torch.Tensor:
    return torch.stack([PLAIN / torch.tensor(factors, dtype=torch.float64), torch.ones(8, dtype=torch.float64)])


def llama3(factor: float) -> list[float]:
    """As llama.cpp's converter computes the tensor from a Llama 3.1 configuration."""
    found = []
    for frequency in PLAIN.tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


FREE = [1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 7.0, 9.0]


@pytest.mark.parametrize(
    ("keys", "tensors", "wanted"),
    [
        ({}, {}, divided([1] * 8)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, divided([4] * 8)),
        ({"rope.scaling.factor": 4.0}, {}, divided([4] * 8)),  # llama.cpp's default type
        ({"rope.scale_linear": 2.0}, {}, divided([2] * 8)),  # what it was called once
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, divided([1] * 8)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {}, divided([1] * 8)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
            {},
            yarn(4, 16),
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.attn_factor": 0.5},
            {},
            yarn(8, CONTEXT, attention=0.5),
        ),
        ({}, {"rope_freqs.weight": llama3(8.0)}, divided(llama3(8.0))),
        ({}, {"rope_freqs.weight": llama3(32.0)}, divided(llama3(32.0))),
        ({}, {"rope_freqs.weight": FREE}, divided(FREE)),
        ({}, {"rope_freqs.weight": [1.0] * 8}, divided([1] * 8)),
    ],
)
def test_rotary_scaling_is_applied(tmp_path, keys, tensors, wanted):
    model = converted(tmp_path, keys=keys, tensors=tensors)
    for length in (3, 50):  # the same for every text
        torch.testing.assert_close(frequencies(model, length), wanted, rtol=2e-6, atol=1e-7)
    assert not rope_changes_with_length(model)


def test_llama_3_keeps_its_own_parameters(tmp_path):
    model = converted(tmp_path, tensors={"rope_freqs.weight": llama3(8.0)})
    rope = model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["high_freq_factor"]) == ("llama3", 8.0, 4.0)


def test_what_was_applied_stands_in_the_stamp(tmp_path, cache):
    converted(tmp_path, keys={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    (stamp,) = cache.glob("*/specgen.json")
    assert json.loads(stamp.read_text())["applied"]["rope_parameters"]["factor"] == 4.0


@pytest.mark.parametrize(
    ("keys", "tensors", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, {}, "llama.attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, {}, "llama.final_logit_softcapping"),
        ({"attention.sliding_window": 16}, {}, "llama.attention.sliding_window"),
        ({"attention.scale": 0.1}, {}, "llama.attention.scale"),
        ({"attention.causal": False}, {}, "llama.attention.causal"),
        ({"attention.key_length": 8}, {}, "llama.attention.key_length"),
        ({"rope.dimension_sections": [4, 4]}, {}, "llama.rope.dimension_sections"),
        ({"logit_scale": 0.5}, {}, "llama.logit_scale"),
        ({"never.heard.of": 3}, {}, "llama.never.heard.of"),
        ({"rope.scaling.type": "longrope"}, {}, "llama.rope.scaling.type"),
        ({"rope.scaling.type": "ntk"}, {}, "llama.rope.scaling.type"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.5},
            {},
            "llama.rope.scaling.attn_factor",
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1},
            {},
            "llama.rope.scaling.yarn_log_multiplier",
        ),
        ({"rope.scaling.alpha": 2.0}, {}, "llama.rope.scaling.alpha"),
        ({}, {"blk.0.attn_q.bias": [1.0] * 32}, "blk.0.attn_q.bias"),
        ({}, {"rope_factors_long.weight": FREE}, "rope_factors_long.weight"),
        ({}, {"rope_freqs.weight": FREE[:4]}, "rope_freqs.weight"),
        ({}, {"blk.0.attn_norm_2.weight": [1.0] * 32}, "blk.0.attn_norm_2.weight"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_freqs.weight": FREE},
            "rope_freqs.weight, llama.rope.scaling.factor",
        ),
    ],
)
def test_what_the_converted_model_would_not_use_is_refused_by_name(tmp_path, cache, keys, tensors, named):
    write_gguf(tmp_path / "m.gguf", keys=keys, tensors=tensors)
    with pytest.raises(UsageError) as error:
        locate(str(tmp_path / "m.gguf"), quiet=True)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path / 'm.gguf'}: this GGUF file holds {named}")
    assert "changes the text" in line
    assert not [f for f in cache.iterdir() if f.is_dir()]


@pytest.mark.parametrize(
    "keys",
    [
        {"attention.sliding_window": 64},  # as long as the context
        {"attention.sliding_window": 0, "expert_count": 0, "expert_used_count": 0, "attention.causal": True},
        {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16},
        {"attn_logit_softcapping": 0.0, "logit_scale": 1.0, "rope.scaling.finetuned": True},
        {"rope.scaling.original_context_length": 32, "rope.scaling.yarn_beta_fast": 32.0},
    ],
)
def test_keys_that_say_what_the_model_does_anyway(tmp_path, keys):
    model = converted(tmp_path, keys=keys)
    torch.testing.assert_close(frequencies(model), divided([1] * 8), rtol=2e-6, atol=1e-7)


def test_a_window_that_the_loader_leaves_out_is_set():
    header = Header("phi3", {"attention.sliding_window": 16, "context_length": 64}, ())
    config = Phi3Config(sliding_window=None)
    Account(header, "phi").apply(config)
    assert config.sliding_window == 16


def test_a_base_that_the_loader_leaves_out_is_set():
    """Of StarCoder 2, whose files name 999999.4 where transformers' default is 10000."""
    config = Starcoder2Config()
    assert config.rope_parameters["rope_theta"] != 999999.4
    Account(Header("starcoder2", {"rope.freq_base": 999999.4}, ()), "starcoder").apply(config)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 999999.4}


@pytest.mark.parametrize(
    ("architecture", "config", "keys"),
    [
        ("qwen2", Qwen2Config(), {"attention.head_count": 32, "attention.head_count_kv": 32, "rope.freq_base": 1e4}),
        ("qwen3", Qwen3Config(), {"attention.key_length": 128, "attention.value_length": 128}),
        (
            "gemma2",
            Gemma2Config(),
            {
                "attention.key_length": 256,
                "attention.value_length": 256,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "attention.sliding_window": 4096,
                "attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
            },
        ),
        ("gemma3", Gemma3TextConfig(), {"rope.freq_base": 1e6, "attention.sliding_window": 4096}),
        ("stablelm", StableLmConfig(), {"rope.dimension_count": 20, "use_parallel_residual": False}),
        ("phi3", Phi3Config(), {"rope.dimension_count": 96, "rope.scaling.original_context_length": 4096}),
        ("qwen3moe", Qwen3MoeConfig(norm_topk_prob=True), {"expert_used_count": 8, "expert_weights_norm": True}),
    ],
)
def test_files_of_other_architectures_pass(architecture, config, keys):
    account = Account(Header(architecture, {"block_count": 1, **keys}, ()), "file")
    account.apply(config)
    assert [key for key in keys if not account._holds(key, config)] == []
    for key in keys:  # and each is really looked at
        if key not in ("rope.freq_base", "rope.scaling.original_context_length"):
            other = Account(Header(architecture, {key: 7}, ()), "file")
            assert not other._holds(key, config), key


def test_gemma_3_scales_its_full_attention_alone(tmp_path):
    header = Header("gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}, ())
    account, config = Account(header, "gemma"), Gemma3TextConfig()
    local = dict(config.rope_parameters["sliding_attention"])
    account.apply(config)
    config.save_pretrained(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path)
    assert saved.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert saved.rope_parameters["sliding_attention"] == local
