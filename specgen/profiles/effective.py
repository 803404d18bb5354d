"""Defaults < generation_config < file < flags: the effective sampling settings, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from specgen.errors import UsageError
from specgen.profiles.generation_config import NEUTRAL, WARPERS, settings_from_config
from specgen.profiles.messages import flag_name
from specgen.profiles.schema import Profile
from specgen.settings import Mode, Sampling

# The effective sampling settings
_LAYERS = ("default", "generation_config", "profile", "flag")


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
    from_config = settings_from_config(config)
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
    values |= {name: None for name, neutral in NEUTRAL.items() if values[name] == neutral}
    _settle_mode(profile, values, sources, from_config.get("temperature"))
    _refuse_idle_flags(values["mode"], sources)
    return Sampling(**values, sources=sources)


def _layer(profile: Profile, name: str) -> str:
    return "flag" if f"decoding.{name}" in profile.flags else "profile"


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
    for name in ("temperature", *WARPERS):
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
