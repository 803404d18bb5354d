"""The profile: a YAML file that names target, draft and settings, checked before anything heavy is imported.

Settings come in layers: defaults < the checkpoint's generation_config < the profile file < flags.
`load_profile` joins the last two, `resolve_sampling` all four. Every fault is a `UsageError` of one or two
lines that names the file and the dotted key, or the flag.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from specgen.rounds import Mode, Sampling, UsageError

DEFAULT_PROFILE = "smollm2"
# Flags of these names alone set the target and a checkpoint draft alike.
SHARED_FLAGS = ("device", "dtype", "engine")

# --------------------------------------------------------------------------------------------------
# The models. A field's description says what is allowed there: error messages are made of it.


def _yaml_float(value: object) -> object:
    """YAML 1.1 reads `1e-3` (no point) as a string. Not mended in the loader: a revision may look so too."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def _well_formed(checkpoint: str) -> str:
    if checkpoint.startswith("package:") and not re.fullmatch(r"package:[\w.]+/\S.*", checkpoint):
        raise ValueError("package:NAME/FILE")
    return checkpoint


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Checkpoint = Annotated[Text, AfterValidator(_well_formed)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_yaml_float)]
TokenRefs = Annotated[tuple[Count | Text, ...], Field(strict=False)]  # not strict: YAML has lists only


def _workable(temperature: float) -> float:
    """Logits divided by less than this leave float32; nobody means it by anything but greedy."""
    if temperature != 0 and temperature < 0.001:
        raise ValueError("too small")
    return temperature


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CheckpointSettings(_Section):
    """One checkpoint and how it is loaded.

    Relative paths in a profile file are taken from the file's folder if they exist there.
    """

    checkpoint: Checkpoint = Field(
        description="a hub id, a folder, a .gguf file, or package:NAME/FILE for one in a Python package"
    )
    revision: Text | None = Field(default=None, description="a branch, tag or commit")
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto, float64, float32, bfloat16 or float16"
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$")] = Field(
        default="auto", description="auto, cpu, mps, cuda or cuda:N"
    )
    engine: Literal["auto", "eager", "packed", "graph"] = Field(
        default="auto", description="auto, eager, packed or graph"
    )
    device_map: Text | dict[str, Count | Text] | None = Field(
        default=None, description="a word such as auto, or a mapping of module names to devices"
    )
    attention: Text | None = Field(default=None, description="the name of an attention implementation, such as sdpa")
    trust_remote_code: bool = Field(default=False, description="true or false")
    tokenizer: Text | None = Field(default=None, description="a hub id or a folder")


class CheckpointDraft(CheckpointSettings):
    """A smaller checkpoint that proposes."""

    kind: Literal["checkpoint"] = Field(description="checkpoint or ngram")


class NgramDraft(_Section):
    """Proposes what followed the text's last tokens earlier in the same text; the lengths are in tokens."""

    kind: Literal["ngram"] = Field(description="checkpoint or ngram")
    max_ngram: Annotated[int, Field(ge=1)] = Field(default=3, description="an integer of at least 1")
    min_ngram: Annotated[int, Field(ge=1)] = Field(default=1, description="an integer of at least 1")

    @model_validator(mode="after")
    def _ordered(self) -> NgramDraft:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is greater than max_ngram {self.max_ngram}")
        return self


Draft = Annotated[CheckpointDraft | NgramDraft, Field(discriminator="kind")]


class DecodingSettings(_Section):
    """What file and flags say about decoding. None, or empty for ban and stop: not set here."""

    mode: Annotated[Mode, Field(strict=False)] | None = Field(default=None, description=" or ".join(Mode))
    k: Annotated[int, Field(ge=1, le=64)] | None = Field(default=None, description="an integer from 1 to 64")
    max_new_tokens: Annotated[int, Field(ge=1)] | None = Field(default=None, description="an integer of at least 1")
    temperature: Annotated[Number, AfterValidator(_workable)] | None = Field(
        default=None, description="0 (greedy), or a finite number of at least 0.001"
    )
    top_k: Count | None = Field(default=None, description="an integer, 0 (off) or more")
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = Field(
        default=None, description="a number greater than 0 and at most 1"
    )
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = Field(default=None, description="a number from 0 to 1")
    lenience: Annotated[Number, Field(gt=0, le=1)] | None = Field(
        default=None, description="a number greater than 0 and at most 1"
    )
    typical_epsilon: Annotated[Number, Field(gt=0, le=1)] | None = Field(
        default=None, description="a number greater than 0 and at most 1"
    )
    typical_delta: Annotated[Number, Field(gt=0)] | None = Field(
        default=None, description="a finite number greater than 0"
    )
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = Field(
        default=None, description="a finite number greater than 0"
    )
    no_repeat_ngram_size: Count | None = Field(default=None, description="an integer, 0 (off) or more")
    ban: TokenRefs = Field(default=(), description="a list of token ids and tokens")
    stop: Annotated[tuple[Text, ...], Field(strict=False)] = Field(
        default=(), description="a list of strings, none of them empty"
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        default=None, description="an integer from 0 to 2**63 - 1"
    )
    end_tokens: TokenRefs | None = Field(default=None, description="a list of token ids and tokens")
    generation_config: bool = Field(default=True, description="true or false")

    @field_validator("ban", "stop", mode="before")
    @classmethod
    def _null_is_empty(cls, value: object) -> object:
        return () if value is None else value


class PromptSettings(_Section):
    """How a prompt becomes token ids."""

    template: Literal["auto", "chat", "raw"] = Field(default="auto", description="auto, chat or raw")
    system: str | None = Field(default=None, description="a string: the chat's system message")


class Profile(_Section):
    """A whole profile. `flags`: the dotted keys that flags set; `source`: what messages call the file."""

    name: Text = Field(description="a string, not empty")
    description: str = Field(default="", description="a string")
    tested: bool = Field(default=False, description="true or false")
    target: CheckpointSettings = Field(description="a mapping with at least a checkpoint")
    draft: Draft | None = Field(default=None, description="null, or a mapping with kind: checkpoint or kind: ngram")
    decoding: DecodingSettings = Field(default_factory=DecodingSettings, description="a mapping")
    prompt: PromptSettings = Field(default_factory=PromptSettings, description="a mapping")

    _flags: frozenset[str] = PrivateAttr(default=frozenset())
    _source: str = PrivateAttr(default="")

    @field_validator("decoding", "prompt", mode="before")
    @classmethod
    def _null_is_empty(cls, value: object) -> object:
        """A section whose lines are all commented out is null in YAML."""
        return {} if value is None else value

    @property
    def flags(self) -> frozenset[str]:
        return self._flags

    @property
    def source(self) -> str:
        return self._source or self.name


_SECTIONS: dict[str, type[_Section]] = {
    "target": CheckpointSettings,
    "decoding": DecodingSettings,
    "prompt": PromptSettings,
}
_DRAFTS: dict[str, type[_Section]] = {"checkpoint": CheckpointDraft, "ngram": NgramDraft}

# --------------------------------------------------------------------------------------------------
# From file and flags to a Profile


def builtin_profiles() -> dict[str, Path]:
    """The profiles that come with the package, by name, sorted."""
    package = Path(__file__).resolve().parent
    folder = package / "profiles_builtin"
    # Beside an installed package a folder `profiles` may be anybody's; a source tree has pyproject.toml too.
    if not folder.is_dir() and (package.parent / "pyproject.toml").is_file():
        folder = package.parent / "profiles"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def load_profile(name_or_path: str, flags: Mapping[str, Any] | None = None) -> Profile:
    """Read and check a built-in profile or a file, with flags on top.

    `flags` go by dotted key ("decoding.k"); "device", "dtype" and "engine" alone set the target and a
    checkpoint draft. None and an empty list mean "not given". Raises `UsageError`.
    """
    source, path = _find(name_or_path)
    data = _parse(_read(source, path), source)
    data.setdefault("name", path.stem)
    _anchor_paths(data, path.parent)
    profile = _validated(data, source, {})
    given = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in (flags or {}).items()
        if value is not None and value not in ([], ())
    }
    if given:
        merged, origin = _merge(data, given)
        profile = _validated(merged, source, {key: (flag, given[flag]) for key, flag in origin.items()})
    # A contradiction between mode and settings is to show before any weight is loaded.
    resolve_sampling(profile, {})
    return profile


def _find(name: str) -> tuple[str, Path]:
    """What to call the profile in messages, and its file."""
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)
    builtins = builtin_profiles()
    if re.search(r"[/\\]", name) or path.suffix.lower() in (".yaml", ".yml"):
        return name, path
    if name in builtins:
        return name, builtins[name]
    if name and _is(Path.is_file, path):
        return name, path
    raise UsageError(f"no built-in profile {_show(name)}{_nearest(name)}; for a file give a path, such as ./my.yaml")


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    try:
        return kind(path)
    except (OSError, ValueError):  # too long, or a null character
        return False


def _nearest(name: str) -> str:
    """The built-in profiles to suggest for a name that is none; all of them where none is near."""
    names = list(builtin_profiles())
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; built in: {', '.join(names) or 'none'}"


def _read(source: str, path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"profile {source}: no such file{_nearest(path.stem)}") from None
    except IsADirectoryError:
        raise UsageError(f"profile {source}: a folder, not a file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"profile {source}: cannot be read: {reason}") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"profile {source}: not UTF-8: byte 0x{raw[error.start]:02x} in line {line}; save it as UTF-8"
        ) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML silently takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not when constructing: by then merge keys (<<) have been flattened into the same list.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key '{key.value}' is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node


def _parse(text: str, source: str) -> dict[Any, Any]:
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = " ".join(str(error.problem or error.context).split())
        raise UsageError(f"profile {source}: bad YAML{where}: {what}") from None
    except RecursionError:
        raise UsageError(f"profile {source}: bad YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as 2024-99-99, no date
        raise UsageError(f"profile {source}: bad YAML: {' '.join(str(error).split())}") from None
    if data is None:
        raise UsageError(f"profile {source}: the file is empty; `specgen profiles new` writes one to start from")
    if not isinstance(data, dict):
        kind = {"list": "a list", "str": "a string"}.get(type(data).__name__, "a single value")
        raise UsageError(
            f"profile {source}: {kind} at the top; expected a mapping with target, draft, decoding, prompt"
        )
    return data


def _anchor_paths(data: dict[Any, Any], folder: Path) -> None:
    """Turn paths of checkpoints and tokenizers that exist beside the profile into full paths, in place."""
    sections = [data[name] for name in ("target", "draft") if isinstance(data.get(name), dict)]
    for section in sections:
        for key in ("checkpoint", "tokenizer"):
            value = section.get(key)
            if isinstance(value, str) and value and not value.startswith("package:"):
                path = folder / Path(value).expanduser() if value.startswith("~/") else folder / value
                kind = Path.is_file if path.suffix.lower() == ".gguf" else Path.is_dir
                if _is(kind, path):
                    section[key] = str(path.resolve())


def _merge(data: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's data with the flags on top, and for each dotted key set so, the flag's key as given."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    _switch_draft(merged, flags)
    origin = {key: key for key in flags if key not in SHARED_FLAGS}
    for key in SHARED_FLAGS:
        if key in flags:
            origin.setdefault(f"target.{key}", key)
            if _kind(merged) == "checkpoint":
                origin.setdefault(f"draft.{key}", key)
    for dotted, flag in origin.items():
        section, _, name = dotted.partition(".")
        if merged.get(section) is None:
            merged[section] = {}
        if not name or not isinstance(merged[section], dict):
            raise UsageError(f"{flag_name(flag)}: no such setting; a flag sets SECTION.KEY, such as decoding.k")
        if name == "checkpoint" and merged[section].get(name) != flags[flag]:
            # These belong to the checkpoint that the file names; to trust its code is not to trust another's.
            for tied in ("revision", "tokenizer", "trust_remote_code"):
                if f"{section}.{tied}" not in origin:
                    merged[section].pop(tied, None)
        merged[section][name] = flags[flag]
    return merged, origin


def _kind(data: Mapping[str, Any]) -> Any:
    draft = data.get("draft")
    return draft.get("kind") if isinstance(draft, dict) else None


def _switch_draft(merged: dict[str, Any], flags: Mapping[str, Any]) -> None:
    """Where flags ask for another kind of draft than the file has, start from an empty draft of that kind."""
    asked = {key.removeprefix("draft.") for key in flags if key.startswith("draft.")}
    has = _kind(merged)
    kind = flags.get("draft.kind") or ("checkpoint" if "checkpoint" in asked else has)
    if kind is None and asked & {"max_ngram", "min_ngram"}:
        kind = "ngram"
    if asked and kind is not None and kind != has:
        merged["draft"] = {"kind": kind}


def _validated(data: Mapping[Any, Any], source: str, given: Mapping[str, tuple[str, Any]]) -> Profile:
    """`given`: dotted key → (flag, value) where flags were merged in; empty when the file stands alone."""
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        raise UsageError(_message(error, source, given)) from None
    profile._flags = frozenset(given)
    profile._source = source
    return profile


# --------------------------------------------------------------------------------------------------
# Messages


def flag_name(key: str) -> str:
    """The command-line option that sets a dotted key: "decoding.top_p" → "--top-p"."""
    section, _, name = key.rpartition(".")
    if name == "checkpoint":
        name = section
    elif section == "target" or (section == "draft" and not name.endswith("ngram")):
        name = f"{section}-{name}"
    return "--" + name.replace("_", "-")


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def _show(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date):  # of an unquoted 2024-01-31 in YAML
        return str(value)
    return _short.repr(value)


def _show_flag(flag: str, value: object) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[\w./:+-]+", value)
    return f"{flag_name(flag)} {value if plain else _show(value)}"


def _message(error: ValidationError, source: str, given: Mapping[str, tuple[str, Any]]) -> str:
    """At most two lines. A union reports once per member: the first per key speaks for all."""
    lines: dict[str, str] = {}
    for details in error.errors(include_url=False):
        key, field = _locate(details["loc"])
        line = _line(key, field, details, source, given)
        lines.setdefault(key, line)
    shown = list(dict.fromkeys(lines.values()))  # one flag can set two keys
    more = f" (and {len(shown) - 2} more)" if len(shown) > 2 else ""
    return "\n".join(shown[:2]) + more


def _locate(loc: tuple[int | str, ...]) -> tuple[str, Any]:
    """The dotted key of a pydantic location, which also holds tags and union members, and its field."""
    parts = list(loc)
    key, model = str(parts[0]), _SECTIONS.get(str(parts[0]))
    field: Any = Profile.model_fields.get(key)
    rest = parts[1:]
    if key == "draft" and rest:
        model = _DRAFTS[str(rest.pop(0))]
    if model is not None and rest:
        name = str(rest.pop(0))
        key, field = f"{key}.{name}", model.model_fields.get(name)
    return key + "".join(f"[{part}]" for part in rest[:1] if isinstance(part, int)), field


def _line(key: str, field: Any, details: Any, source: str, given: Mapping[str, tuple[str, Any]]) -> str:
    kind, value = details["type"], details["input"]
    base = key.partition("[")[0]
    flag = given.get(base) or next((f for dotted, f in given.items() if dotted.startswith(f"{base}.")), None)
    where = f"{_show_flag(flag[0], value if base in given else flag[1])}: " if flag else f"profile {source}: "
    if kind in ("extra_forbidden", "invalid_key"):
        return f"{where}unknown key {_show(key)}{_known(key, details['loc'])}"
    if kind == "missing":
        return f"{where}{key} is missing; expected {field.description}"
    if kind.startswith("union_tag"):
        missing = kind.endswith("not_found")
        fault = " is missing" if missing else f": {_show(value.get('kind'))} is not allowed"
        return f"{where}draft.kind{fault}; expected checkpoint or ngram"
    if kind == "value_error" and field is Profile.model_fields.get(base):  # of a whole section
        return f"{where}{key}: {details['ctx']['error']}"
    expected = f"expected {field.description if field else details['msg']}"
    if flag:
        return f"{where}{expected}"
    strings_only = kind == "string_type" and details["loc"][-1] == base.rpartition(".")[2]
    quotes = strings_only and value is not None and not isinstance(value, (list, dict))
    hint = f" (YAML reads it as {type(value).__name__}: put it in quotes)" if quotes else ""
    return f"{where}{key}: {_show(value)} is not allowed; {expected}{hint}"


def _known(key: str, loc: tuple[int | str, ...]) -> str:
    """What an unknown key may have meant: a near key of the same section, else the same key of another."""
    section, _, name = key.rpartition(".")
    model = _DRAFTS[str(loc[1])] if section == "draft" else _SECTIONS.get(section, Profile)
    near = difflib.get_close_matches(name, list(model.model_fields), n=1)
    near = near or [f"{s}.{name}" for s, other in _SECTIONS.items() if name in other.model_fields]
    return f"; did you mean '{near[0]}'?" if near else f"; known here: {', '.join(model.model_fields)}"


# --------------------------------------------------------------------------------------------------
# The effective sampling settings

_LAYERS = ("default", "generation_config", "profile", "flag")
_WARPERS = ("top_k", "top_p", "min_p")
# Settings at which a processor does nothing.
_NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
_NUMBERS = ("temperature", *_NEUTRAL)

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


def resolve_sampling(
    profile: Profile,
    generation_config: Mapping[str, Any],
    *,
    ban_ids: tuple[int, ...] = (),
    end_tokens: tuple[int, ...] = (),
) -> Sampling:
    """The effective settings, of defaults < generation_config < profile file < flags, each with its source.

    `generation_config`: what the checkpoint's own file sets. `ban_ids`, `end_tokens`: the profile's tokens as
    ids; where it sets no end_tokens, the checkpoint's. Raises `UsageError` for a generation_config that asks
    for what is not built, and for settings that mean nothing in greedy mode.
    """
    decoding = profile.decoding
    config = {key: v for key, v in generation_config.items() if v is not None and decoding.generation_config}
    from_config = _from_config(config)
    values: dict[str, Any] = {f.name: getattr(Sampling(), f.name) for f in fields(Sampling) if f.name != "sources"}
    sources = dict.fromkeys(values, "default")
    values |= from_config
    sources |= dict.fromkeys(from_config, "generation_config")
    for name in values:
        value = getattr(decoding, name, None)
        if value is not None and value != () and name not in ("ban", "end_tokens"):
            values[name], sources[name] = value, _layer(profile, name)
    if ban_ids:
        values["ban"], sources["ban"] = tuple(sorted({*values["ban"], *ban_ids})), _layer(profile, "ban")
    values["end_tokens"] = end_tokens
    if decoding.end_tokens is not None:
        sources["end_tokens"] = _layer(profile, "end_tokens")
    elif "eos_token_id" in config:
        sources["end_tokens"] = "generation_config"
    # As in transformers, a banned sequence that is only an end token is left out: else no text would end.
    values["bad_words_ids"] = tuple(
        word for word in values["bad_words_ids"] if not (len(word) == 1 and word[0] in end_tokens)
    )
    values |= {name: None for name, neutral in _NEUTRAL.items() if values[name] == neutral}
    _settle_mode(profile, values, sources, from_config.get("temperature"))
    _refuse_idle_flags(values["mode"], sources)
    return Sampling(**values, sources=sources)


def _layer(profile: Profile, name: str) -> str:
    return "flag" if f"decoding.{name}" in profile.flags else "profile"


def _from_config(config: Mapping[str, Any]) -> dict[str, Any]:
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
        name, field = _locate(("decoding", *details["loc"]))
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
        f"the checkpoint's generation_config: {name} {_show(value)} {fault}\n"
        "`decoding.generation_config: false` in the profile ignores that file"
    )


# Settings that one mode alone reads.
_OWNERS = {"lenience": Mode.LENIENT, "typical_epsilon": Mode.TYPICAL, "typical_delta": Mode.TYPICAL}


def _settle_mode(
    profile: Profile, values: dict[str, Any], sources: dict[str, str], config_temperature: float | None
) -> None:
    """Decide between greedy and the other modes, and what becomes of settings that greedy has no use for."""
    rank = {name: _LAYERS.index(source) for name, source in sources.items()}
    by_mode = values["mode"] is Mode.GREEDY
    by_temperature = values["temperature"] == 0
    if by_temperature and not by_mode and rank["mode"] > rank["temperature"]:
        by_temperature = False  # a mode asked for on top of a file's temperature 0
        known = config_temperature is not None
        values["temperature"] = config_temperature if known else Sampling().temperature
        sources["temperature"] = "generation_config" if known else "default"
    if not (by_mode or by_temperature):
        return
    if by_temperature and values["mode"] not in (Mode.EXACT, Mode.GREEDY) and rank["mode"] >= rank["temperature"]:
        raise UsageError(f"temperature 0 is greedy, and mode {values['mode']} draws: leave one of the two out")
    setter = max(rank["mode"] if by_mode else 0, rank["temperature"] if by_temperature else 0)
    for name in ("temperature", *_WARPERS):
        if values[name]:
            if rank[name] >= setter:
                raise _meaningless(profile, name, values[name], sources, by_temperature)
            values[name], sources[name] = None, _LAYERS[setter]
    values["mode"], sources["mode"] = Mode.GREEDY, _LAYERS[setter]
    values["temperature"], sources["temperature"] = None, _LAYERS[setter]


def _refuse_idle_flags(mode: Mode, sources: Mapping[str, str]) -> None:
    """A flag that only another mode reads is a misunderstanding; a profile may keep such settings ready."""
    for name, owner in _OWNERS.items():
        if sources[name] == "flag" and mode is not owner:
            raise UsageError(f"{flag_name(name)} means nothing in {mode} mode: leave it out, or use --mode {owner}")


def _meaningless(
    profile: Profile, name: str, value: object, sources: Mapping[str, str], by_temperature: bool
) -> UsageError:
    """Names the setting where it was made. Asking for exact helps only above the layer of a temperature 0."""
    if sources[name] == "flag":
        what = f"--{name.replace('_', '-')} {value}"
        cure = "use --mode exact"
    else:
        what = f"profile {profile.source}: decoding.{name} {value}"
        cure = "set decoding.mode: exact"
    if by_temperature and sources["temperature"] == sources[name]:
        cure = "set a temperature above 0"
    return UsageError(f"{what} means nothing in greedy mode: leave it out, or {cure}")


# --------------------------------------------------------------------------------------------------
# Showing and writing profiles


def merged_settings(profile: Profile) -> dict[str, Any]:
    """All settings as plain data, defaults included; written as YAML, it loads as the same profile.

    What is still null is the checkpoint's to say: its generation_config, or the default where that is silent.
    """
    settings = profile.model_dump(mode="json")
    sampling = resolve_sampling(profile, {})
    settings["decoding"] |= {
        "mode": str(sampling.mode),
        "k": sampling.k,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": sampling.seed,
    }
    return settings


TEMPLATE = """\
# A profile for specgen. Commented-out settings stand at their defaults or at an example.
# Later wins: defaults, the checkpoint's generation_config, this file, flags.

#name: my-pair              # default: the file's name
description: SmolLM2 1.7B with its 135M sibling as the draft
#tested: false              # whether you have run it

# The model whose text is promised.
target:
  # A hub id, a folder, a .gguf file, or package:NAME/FILE for a file inside an installed Python package.
  # Relative paths are taken from this file's folder if they exist there.
  checkpoint: HuggingFaceTB/SmolLM2-1.7B-Instruct
  #revision: main           # a branch, tag or commit; quote it if it looks like a number
  #dtype: auto              # auto, float64, float32, bfloat16, float16
  #device: auto             # auto, cpu, mps, cuda, cuda:N
  #engine: auto             # how calls are executed: auto, eager, packed (CPU), graph (CUDA)
  #device_map: auto         # spread over several devices, as in transformers
  #attention: sdpa          # attention implementation, as in transformers
  #trust_remote_code: false # run Python code that comes with the checkpoint
  #tokenizer: HuggingFaceTB/SmolLM2-1.7B-Instruct

# What proposes. It must share the target's tokenizer. It takes the same settings as the target.
# Without a checkpoint: kind: ngram, with max_ngram: 3 and min_ngram: 1. `draft: null`: plain decoding only.
draft:
  kind: checkpoint
  checkpoint: HuggingFaceTB/SmolLM2-135M-Instruct
  #dtype: auto
  #device: auto
  #engine: auto

decoding:
  #mode: exact              # exact, greedy (which temperature 0 also means), coupled, lenient or typical
  #k: 4                     # tokens drafted in a round, 1 to 64
  #max_new_tokens: 128
  #seed: 0
  #temperature: 1.0
  #top_k: 0                 # 0: off
  #top_p: 1.0               # 1: off
  #min_p: 0.0               # 0: off
  #lenience: 0.5            # of mode lenient: 1 is exact, less keeps more and is further from the target
  #typical_epsilon: 0.3     # of mode typical: keep what the target gives more than
  #typical_delta: 0.09      # min(epsilon, delta * exp(-entropy of the target))
  #repetition_penalty: 1.0  # 1: off
  #no_repeat_ngram_size: 0  # 0: off
  #ban: []                  # token ids, or tokens, that never come out
  #stop: ["\\n\\n"]           # strings that end the text
  #end_tokens: [0]          # token ids, or tokens, that end the text; default: the checkpoint's own
  #generation_config: true  # take what the checkpoint's own generation_config sets

prompt:
  #template: auto           # chat (the tokenizer's template), raw (as it is), auto (chat if there is one)
  #system: You are a helpful assistant.
"""


def new_profile_text() -> str:
    """A commented profile to start from, for `specgen profiles new`."""
    return TEMPLATE
