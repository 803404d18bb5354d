"""Validation errors → a line that names file, key and value."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Mapping
from datetime import date
from typing import Any

from pydantic import ValidationError

from specgen.profiles.schema import DRAFTS, SECTIONS, Profile


# Messages
def flag_name(key: str) -> str:
    """The command-line option that sets a dotted key: "decoding.top_p" → "--top-p"."""
    section, _, name = key.rpartition(".")
    if name == "checkpoint":
        name = section
    elif section == "target" or (section == "draft" and not name.endswith("ngram")):
        name = f"{section}-{name}"
    return "--" + name.replace("_", "-")


shortened = reprlib.Repr()


def shown_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date):  # of an unquoted 2024-01-31 in YAML
        return str(value)
    return shortened.repr(value)


def _show_flag(flag: str, value: object) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[\w./:+-]+", value)
    return f"{flag_name(flag)} {value if plain else shown_value(value)}"


def error_message(error: ValidationError, source: str, given: Mapping[str, tuple[str, Any]]) -> str:
    """At most two lines. A union reports once per member: the first per key speaks for all."""
    lines: dict[str, str] = {}
    for details in error.errors(include_url=False):
        key, field = located_key(details["loc"])
        line = _line(key, field, details, source, given)
        lines.setdefault(key, line)
    shown = list(dict.fromkeys(lines.values()))  # one flag can set two keys
    more = f" (and {len(shown) - 2} more)" if len(shown) > 2 else ""
    return "\n".join(shown[:2]) + more


def located_key(loc: tuple[int | str, ...]) -> tuple[str, Any]:
    """The dotted key of a pydantic location, which also holds tags and union members, and its field."""
    parts = list(loc)
    key, model = str(parts[0]), SECTIONS.get(str(parts[0]))
    field: Any = Profile.model_fields.get(key)
    rest = parts[1:]
    if key == "draft" and rest:
        model = DRAFTS[str(rest.pop(0))]
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
        return f"{where}unknown key {shown_value(key)}{_known(key, details['loc'])}"
    if kind == "missing":
        return f"{where}{key} is missing; expected {field.description}"
    if kind.startswith("union_tag"):
        missing = kind.endswith("not_found")
        fault = " is missing" if missing else f": {shown_value(value.get('kind'))} is not allowed"
        return f"{where}draft.kind{fault}; expected {' or '.join(DRAFTS)}"
    if kind == "value_error" and field is Profile.model_fields.get(base):  # of a whole section
        return f"{where}{key}: {details['ctx']['error']}"
    expected = f"expected {field.description if field else details['msg']}"
    if flag:
        return f"{where}{expected}"
    strings_only = kind == "string_type" and details["loc"][-1] == base.rpartition(".")[2]
    quotes = strings_only and value is not None and not isinstance(value, (list, dict))
    hint = f" (YAML reads it as {type(value).__name__}: put it in quotes)" if quotes else ""
    return f"{where}{key}: {shown_value(value)} is not allowed; {expected}{hint}"


def _known(key: str, loc: tuple[int | str, ...]) -> str:
    """What an unknown key may have meant: a near key of the same section, else the same key of another."""
    section, _, name = key.rpartition(".")
    model = DRAFTS[str(loc[1])] if section == "draft" else SECTIONS.get(section, Profile)
    near = difflib.get_close_matches(name, list(model.model_fields), n=1)
    near = near or [f"{s}.{name}" for s, other in SECTIONS.items() if name in other.model_fields]
    return f"; did you mean '{near[0]}'?" if near else f"; known here: {', '.join(model.model_fields)}"
