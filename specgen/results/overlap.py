"""The schema of what `specgen overlap --json` writes."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from specgen.errors import UsageError
from specgen.settings import Mode

INDICATIVE = (
    "the target did not write these texts: τ, α and predicted speedup are only indicative, and too high where the "
    "target finds a text unlikely (specgen overlap --own N lets the target write)"
)


Ratios = list[Annotated[float, Field(ge=0, le=1)] | None]


Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


_Part = TypeVar("_Part", bound=BaseModel)


CallCost = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Check(BaseModel):
    reason: str | None = None
    ratios: Ratios = []


class _RunCost(BaseModel):
    c: Cost


class RunResult(BaseModel):
    name: str
    plain: bool = False
    finish: str | None = None
    cost: _RunCost | None = None
    check: _Check | None = None


class _Sampling(BaseModel):
    mode: Mode
    max_new_tokens: Annotated[int, Field(ge=1)]


class _Profile(BaseModel):
    name: str | None = None


class RunFile(BaseModel):
    profile: _Profile
    sampling: _Sampling
    results: list[RunResult]


class _Positions(BaseModel):
    ratio: Ratios


class _OverlapText(BaseModel):
    positions: _Positions


class _OverlapCosts(BaseModel):
    c: Cost
    verify: Annotated[list[CallCost], Field(min_length=1)]


class OverlapFile(BaseModel):
    profile: _Profile
    own: Annotated[int, Field(ge=1)] | None
    costs: _OverlapCosts
    notes: list[str] = []
    results: list[_OverlapText]


def whole_part(model: type[_Part], data: dict[str, Any], name: str) -> _Part:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{name}: not a whole result of specgen {data['kind']}: {where}: {first['msg']}") from None
