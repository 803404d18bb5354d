"""The fields that files of several kinds share, with what they may hold."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from specgen.settings import Mode

SLACK = 1e-6  # of probabilities that are sums of rounded ones


LEAST_SECONDS = 1e-9  # of a whole decoding: less is no measured time


def _finite(value: Any) -> Any:
    """A part without a schema of its own, refused where a number in it is NaN or infinite."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inside:
        _finite(part)
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("finite", "holds a number that is not finite")
    return value


def _none_unless_finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _settings(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("mode") not in list(Mode):
        raise PydanticCustomError("mode", "its mode is none of " + ", ".join(Mode))
    _Lengths.model_validate(value)
    return value


def _machine(value: dict[str, Any]) -> dict[str, Any]:
    """The few entries of an environment that are computed with."""
    _Machine.model_validate(value)
    return value


Count = Annotated[int, Field(ge=0, le=2**62)]


Size = Annotated[int, Field(ge=1, le=2**62)]


Depth = Annotated[int, Field(ge=0, le=4096)]  # of a round: tables have a row for each position


Seconds = Annotated[float, Field(ge=0, le=1e9)]


Share = Annotated[float, Field(ge=0, le=1 + SLACK)]


Number = Annotated[float | None, BeforeValidator(_none_unless_finite)]  # null for what JSON has no number for


Free = Annotated[dict[str, Any], AfterValidator(_finite)]


Settings = Annotated[Free, AfterValidator(_settings)]


Environment = Annotated[Free, AfterValidator(_machine)]


class _Lengths(BaseModel):
    """The few effective settings that are computed with."""

    max_new_tokens: Size | None = None


class _Machine(BaseModel):
    threads: int | None = None
    cpu_count: int | None = None
    load_average: Annotated[list[float], Field(min_length=1)] | None = None
    packages: dict[str, Any] | None = None
    git: dict[str, Any] | None = None


class Record(BaseModel):
    """A part of a file that holds what its type names and no more. Made of keywords, of JSON data, or of a live
    object with these attributes."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, from_attributes=True)


class OpenRecord(Record):
    """A part that may hold more, which is left unread."""

    model_config = ConfigDict(extra="ignore")


def same_length(record: BaseModel, *columns: str) -> None:
    lengths = {name: len(getattr(record, name)) for name in columns}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {n}" for name, n in lengths.items())
        raise PydanticCustomError("columns", "columns of unequal length: {listed}", {"listed": listed})
