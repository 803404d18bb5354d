"""Models whose rotary embedding changes with the length of the text: texts that would cross it are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
import yaml

from specgen.decoding.batch import BatchGeneration
from specgen.errors import UsageError
from specgen.models.rope import context_of, rope_constant_up_to
from specgen.session import load
from support.command import WORDS, process, refused, write_tokenizer
from support.tiny import build

LENGTH = 64
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": LENGTH}
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, **FACTORS}
CONFIGS = {
    "phi3": lambda: tf.Phi3Config(
        **SIZES,
        max_position_embeddings=512,
        original_max_position_embeddings=LENGTH,
        rope_parameters=dict(LONGROPE),
    ),
    "phimoe": lambda: tf.PhimoeConfig(
        **SIZES,
        max_position_embeddings=512,
        original_max_position_embeddings=LENGTH,
        rope_parameters={**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.3},
        num_local_experts=2,
    ),
    "llama longrope": lambda: tf.LlamaConfig(**SIZES, max_position_embeddings=512, rope_parameters=dict(LONGROPE)),
    "llama dynamic": lambda: tf.LlamaConfig(
        **SIZES,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
}
PROMPT = "abcabcabcabcabcabcabcabcabcabcab"  # 32 tokens
FITS, CROSSES = str(LENGTH - len(PROMPT)), str(LENGTH - len(PROMPT) + 1)


def written(kind: str, where: Path) -> Path:
    build(CONFIGS[kind](), seed=5).save_pretrained(where / "model")
    write_tokenizer(where / "model")
    settings = {
        "target": {"checkpoint": "./model", "dtype": "float32", "engine": "eager"},
        "draft": {"kind": "ngram"},
        "decoding": {"end_tokens": [], "mode": "greedy"},
    }
    (where / "model.yaml").write_text(yaml.safe_dump(settings))
    (where / "p.txt").write_text(PROMPT)
    return where


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(request.param, tmp_path_factory.mktemp("longrope"))


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("phi3", tmp_path_factory.mktemp("phi"))


def test_a_text_that_stays_within_is_what_generate_writes(folder: Path) -> None:
    session = load(str(folder / "model.yaml"), max_new_tokens=int(FITS))
    assert session.context == LENGTH
    assert any(f"changes beyond {LENGTH} tokens" in note for note in session.notes)
    tokens = session.encode(PROMPT)
    model: Any = session.pair.target
    own = model.model.generate(
        torch.tensor([tokens]), do_sample=False, max_new_tokens=int(FITS), attention_mask=torch.ones(1, len(tokens))
    )
    for plain in (True, False):
        generation = session.generate(tokens, plain=plain).run()
        assert list(generation.tokens) == own[0, len(tokens) :].tolist()
    assert sum(r.accepted for r in generation.rounds) > 0


@pytest.mark.parametrize("options", [[], ["--plain"], ["--mode", "exact"]])
def test_a_text_that_would_cross_is_refused(phi: Path, options: list[str]) -> None:
    profile = ["--profile", "model.yaml", "--max-new-tokens", CROSSES]
    result = process(phi, "run", "p.txt", *profile, "-q", *options)
    refused(
        result, 2, "that makes 65", "more than the context of 64 tokens, beyond which the target's rotary embedding"
    )


def test_so_do_the_other_commands(phi: Path) -> None:
    profile = ["--profile", "model.yaml", "--max-new-tokens", CROSSES]
    for command in (["bench", "p.txt", "--k", "2", "--runs", "1"], ["audit", "--prompts", "p.txt"]):
        refused(process(phi, *command, *profile), 2, "more than the context of 64 tokens, beyond which the target's")
    refused(process(phi, "overlap", "p.txt", "--profile", "model.yaml", "--own", CROSSES), 2, "beyond which")
    # A text of its own is scored in windows that the embedding is constant in.
    (phi / "long.txt").write_text(PROMPT * 4)
    result = process(phi, "overlap", "long.txt", "--profile", "model.yaml", "--c", "0.1")
    assert result.returncode == 0, result.stderr
    assert f"longer than the context of {LENGTH} tokens" in result.stderr + result.stdout


def test_a_prompt_beyond_is_refused_however_few_tokens_follow(folder: Path) -> None:
    """It is taken in by pieces, of which the first would be read with the factors of short texts."""
    session = load(str(folder / "model.yaml"), max_new_tokens=1)
    with pytest.raises(UsageError, match="beyond which the target's rotary embedding changes"):
        session.encode("a" * (LENGTH + 6))


def test_a_batch_is_refused(folder: Path) -> None:
    """Its padded slots would count as the longest row."""
    session = load(str(folder / "model.yaml"), max_new_tokens=4)
    with pytest.raises(UsageError, match="--batch-size 1"):
        BatchGeneration(session.pair, [session.encode(PROMPT)] * 2).run()


def test_generate_itself_changes_at_the_crossing(folder: Path) -> None:
    """Why they are refused: fed token by token, the text beyond is another than from one call on all of it."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    text = torch.arange(LENGTH + 4)[None] % (len(WORDS) - 1)
    with torch.inference_mode():
        cache, whole = tf.DynamicCache(config=model.config), model(text).logits[0, -1]
        for token in text[0]:
            step = model(token[None, None], past_key_values=cache).logits[0, -1]
    assert (whole - step).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2.0}, None),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        (LONGROPE, LENGTH),
        ({**LONGROPE, "long_factor": [1.0] * 4}, None),
        ({"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}, LENGTH),
    ],
)
def test_the_property_is_the_embeddings_not_the_models_name(rope: dict[str, Any], length: int | None) -> None:
    config = tf.LlamaConfig(**SIZES, max_position_embeddings=512)
    config.rope_parameters = {"rope_theta": 1e4, **rope} if "rope_type" in rope else rope
    assert rope_constant_up_to(config) == length
    assert context_of(config) == (length or 512)


def test_a_draft_says_that_it_is_the_draft(tmp_path: Path) -> None:
    for name, kind in (("target", "llama"), ("draft", "phi3")):
        config = tf.LlamaConfig(**SIZES, max_position_embeddings=512) if kind == "llama" else CONFIGS[kind]()
        build(config, seed=1).save_pretrained(tmp_path / name)
        write_tokenizer(tmp_path / name)
    pair = {"target": {"checkpoint": "./target"}, "draft": {"kind": "checkpoint", "checkpoint": "./draft"}}
    (tmp_path / "pair.yaml").write_text(json.dumps(pair))
    session = load(str(tmp_path / "pair.yaml"), max_new_tokens=40)
    assert any(note.startswith("the draft's rotary embedding changes beyond 64") for note in session.notes)
