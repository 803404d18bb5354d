"""What a checkpoint's generation_config says, and which of it is used, refused or ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from specgen.errors import UsageError
from specgen.profiles.messages import located_key, shown_value
from specgen.profiles.schema import DecodingSettings

WARPERS = ("top_k", "top_p", "min_p")


# Settings at which a processor does nothing.
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


_NUMBERS = ("temperature", *NEUTRAL)


# Every setting that transformers' GenerationConfig knows stands in one of these three (a test says so).
GENERATION_CONFIG_USED = frozenset(
    {
        *_NUMBERS,
        "bad_words_ids",
        "suppress_tokens",
        "stop_strings",
        "eos_token_id",
    }  # eos_token_id: see end_tokens
)


# Settings that change which text comes out and are not built, with the value (besides an empty one) that does
# nothing.
GENERATION_CONFIG_REFUSED: dict[str, Any] = {
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


# Lengths and limits of one call, ranking of beams, caches, outputs, transformers' own assisted generation.
GENERATION_CONFIG_IGNORED = frozenset(
    {
        "_from_model_config",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "do_sample",
        "early_stopping",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_cache_len",
        "max_length",
        "max_matching_ngram_size",
        "max_new_tokens",
        "max_time",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "renormalize_logits",
        "return_dict_in_generate",
        "speculation_type",
        "target_lookbehind",
        "transformers_version",
        "use_cache",
        "use_mtp",
    }
)


def settings_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Sampling` that a generation_config sets; keys unknown here are ignored."""
    for name, neutral in GENERATION_CONFIG_REFUSED.items():
        value = config.get(name)
        # Watch 0: an empty container does nothing, but token id 0 is a token.
        empty = isinstance(value, (list, tuple, dict)) and not value
        if value is not None and not empty and (neutral is None or value != neutral):
            raise _config_error(name, value, "is not supported, and it changes the text")
    found: dict[str, Any] = {name: config[name] for name in _NUMBERS if name in config}
    # A 0 there goes with do_sample: false. Greedy is asked for in a profile or by a flag.
    if found.get("temperature") == 0:
        del found["temperature"]
    if "stop_strings" in config:
        strings = config["stop_strings"]
        found["stop"] = [strings] if isinstance(strings, str) else strings
    try:
        found = DecodingSettings.model_validate(found).model_dump(include=set(found))
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        name, field = located_key(("decoding", *details["loc"]))
        name = name.removeprefix("decoding.").replace("stop", "stop_strings")
        raise _config_error(name, details["input"], f"is not allowed; expected {field.description}") from None
    if "suppress_tokens" in config:
        found["ban"] = tuple(sorted(set(_ids("suppress_tokens", config["suppress_tokens"]))))
    if "bad_words_ids" in config:
        words = config["bad_words_ids"]
        if not isinstance(words, (list, tuple)):
            raise _config_error("bad_words_ids", words, "is not allowed; expected lists of token ids")
        found["bad_words_ids"] = tuple(_ids("bad_words_ids", word) for word in words)
    return found


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or any(type(token) is not int or token < 0 for token in value):
        raise _config_error(name, value, "is not allowed; expected a list of token ids")
    return tuple(value)


def _config_error(name: str, value: object, fault: str) -> UsageError:
    return UsageError(
        f"the checkpoint's generation_config: {name} {shown_value(value)} {fault}\n"
        "`decoding.generation_config: false` in the profile ignores that file"
    )
