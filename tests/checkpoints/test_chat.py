"""What becomes of a prompt before weights load: templates, special tokens, an added end; and what is no decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf
import yaml
from tokenizers.processors import TemplateProcessing

from specgen import session as session_module
from specgen.checkpoints.chat import prompt_notes, prompt_tokens, tokenizer_notes
from specgen.checkpoints.load import load_config
from specgen.checkpoints.locate import locate
from specgen.errors import UsageError
from specgen.profiles.schema import PromptSettings
from specgen.session import load
from support.command import WORDS, write_tokenizer
from support.tiny import tiny_llama

PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DROPS_SYSTEM = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    write_tokenizer(tmp_path / "tokenizer")
    return tf.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")


def refusal(tokenizer: Any, template: Any, prompt: str = "a", **settings: Any) -> str:
    tokenizer.chat_template = template
    with pytest.raises(UsageError) as error:
        prompt_tokens(tokenizer, PromptSettings(**settings), "me/it", prompt)
    (line,) = str(error.value).splitlines()
    assert line.startswith("me/it")
    assert "use --raw" in line
    return line


def test_a_template_without_a_system_role(tokenizer: Any) -> None:
    line = refusal(tokenizer, NO_SYSTEM + PLAIN, system="be nice")
    assert "takes no system message (System role not supported): leave --system out" in line
    assert prompt_tokens(tokenizer, PromptSettings(), "me/it", "ab") == tokenizer("ab").input_ids


def test_a_template_that_drops_the_system_message_without_a_word(tokenizer: Any) -> None:
    line = refusal(tokenizer, DROPS_SYSTEM, system="be nice")
    assert "leaves the system message out" in line
    tokenizer.chat_template = PLAIN
    assert prompt_tokens(tokenizer, PromptSettings(system="ab"), "me/it", "c") == tokenizer("abc").input_ids


def test_several_templates_and_no_default(tokenizer: Any) -> None:
    assert "several chat templates (rag, tool_use)" in refusal(tokenizer, {"tool_use": PLAIN, "rag": PLAIN})
    tokenizer.chat_template = {"default": PLAIN, "rag": "x"}
    assert prompt_tokens(tokenizer, PromptSettings(), "me/it", "ab") == tokenizer("ab").input_ids


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}\n{{ m['content'] }", "fails in line 2 (unexpected '}'"),
        ("{{ messages[0]['content'] + 1 }}", "fails (can only concatenate str"),
        ("{{ nowhere.at_all }}", "fails ('nowhere' is undefined)"),
        ("{{ raise_exception('no\\nway') }}", "fails (no)"),
    ],
)
def test_templates_that_fail(tokenizer: Any, template: str, words: str) -> None:
    assert words in refusal(tokenizer, template)
    # With a system message too: the template itself is at fault, not the message.
    assert words in refusal(tokenizer, template, system="ab")


def test_a_template_that_refuses_one_prompt(tokenizer: Any) -> None:
    template = "{% if messages[0]['content'] == 'b' %}{{ raise_exception('not b') }}{% endif %}" + PLAIN
    assert "fails (not b)" in refusal(tokenizer, template, prompt="b")
    assert prompt_tokens(tokenizer, PromptSettings(), "me/it", "a") == tokenizer("a").input_ids


def test_faults_show_before_weights_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(vocab=len(WORDS)).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(NO_SYSTEM + PLAIN)
    profile = {"target": {"checkpoint": "./model"}, "prompt": {"system": "be nice"}}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(profile))

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(session_module, "load_weights", loaded)
    with pytest.raises(UsageError, match="model: its chat template takes no system message"):
        load(str(tmp_path / "model.yaml"))


# Notes


def with_ends(tokenizer: Any, pattern: str) -> Any:
    tokenizer.add_special_tokens({"bos_token": "[bold]", "eos_token": "<end>"})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[bold]", "<end>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=pattern, special_tokens=ids)
    return tokenizer


def noted(tokenizer: Any, prompt: str, template: str = "raw") -> list[str]:
    settings = PromptSettings(template=template)  # type: ignore[arg-type]
    return prompt_notes(tokenizer, settings, prompt, prompt_tokens(tokenizer, settings, "me/it", prompt))


def test_a_raw_text_that_holds_bos_itself_is_noted(tokenizer: Any) -> None:
    tokenizer = with_ends(tokenizer, "[bold] $A")
    (note,) = noted(tokenizer, "[bold]abc")
    assert note.startswith("the prompt begins with [bold] itself, and the tokenizer adds another")
    assert noted(tokenizer, "abc") == []
    assert len(noted(with_ends(tokenizer, "$A"), "[bold]abc")) == 1  # nothing is added: it is a special token, once


def test_special_tokens_in_the_text_are_noted(tokenizer: Any) -> None:
    tokenizer = with_ends(tokenizer, "$A")
    for template in ("raw", "chat"):
        tokenizer.chat_template = PLAIN
        (note,) = noted(tokenizer, "a<end>b[bold]c<end>", template)
        assert note == "the prompt's text holds <end>, [bold], read as special tokens, not as text"
        assert noted(tokenizer, "abc €", template) == []  # an unknown character is none


def test_a_tokenizer_that_appends_an_end_token_is_noted(tokenizer: Any) -> None:
    raw, end = PromptSettings(template="raw"), WORDS.index("<end>")
    tokenizer = with_ends(tokenizer, "$A <end>")
    (note,) = tokenizer_notes(tokenizer, raw, (end,))
    assert note.startswith("the tokenizer appends the end token <end> to a raw prompt")
    assert tokenizer_notes(tokenizer, raw, ()) == []  # it ends nothing here
    tokenizer.chat_template = PLAIN
    assert tokenizer_notes(tokenizer, PromptSettings(), (end,)) == []
    assert tokenizer_notes(with_ends(tokenizer, "$A"), raw, (end,)) == []


# What is no decoder

SIZE = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 50,
}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (tf.BertConfig(**SIZE), "(bert) is an encoder"),
        (tf.RobertaConfig(**SIZE), "(roberta) is an encoder"),
        (tf.ElectraConfig(**SIZE), "(electra) is an encoder"),
        (tf.BartConfig(d_model=32), "(bart) is an encoder-decoder"),
        (tf.T5Config(d_model=32), "(t5) is an encoder-decoder"),
        (tf.WhisperConfig(d_model=32), "(whisper) is an encoder-decoder"),
        (tf.Gemma3TextConfig(use_bidirectional_attention=True), "attends to the text behind"),
        (tf.BertConfig(**SIZE, is_decoder=True), None),
        (tf.BartConfig(d_model=32, is_encoder_decoder=False, is_decoder=True), None),
        (tf.GPTNeoXConfig(**SIZE), None),
        (tf.LlamaConfig(**SIZE), None),
        (tf.LlamaConfig(**SIZE, is_decoder=False), None),  # old files set it, and it means nothing
        (tf.Gemma3TextConfig(), None),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_encoders_are_refused_by_their_configuration(tmp_path: Path, config: Any, words: str | None) -> None:
    config.save_pretrained(tmp_path)
    located = locate(str(tmp_path))
    if words is None:
        assert load_config(located).model_type == config.model_type
        return
    with pytest.raises(UsageError) as error:
        load_config(located)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path} (")
    assert words in line
