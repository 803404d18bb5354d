"""The settings that a profile may hold."""

from __future__ import annotations

import functools
import operator
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from specgen.settings import Mode

# Flags of these names alone set the target and a checkpoint draft alike.
SHARED_FLAGS = ("device", "dtype", "engine")


# A release of a Python package, with the file or folder meant in it where it ships several checkpoints.
RELEASE = re.compile(r"package:([A-Za-z0-9][\w.-]*)==(\d[\w.!+]*)(?:/(\S.*))?")


# The models. A field's description says what is allowed there: error messages are made of it.
def _yaml_float(value: object) -> object:
    """YAML 1.1 reads `1e-3` (no point) as a string. Not mended in the loader: a revision may look so too."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def _well_formed(checkpoint: str) -> str:
    if checkpoint.startswith("package:") and not (
        RELEASE.fullmatch(checkpoint) or re.fullmatch(r"package:[\w.]+/\S.*", checkpoint)
    ):
        raise ValueError("package:NAME==VERSION")
    return checkpoint


Text = Annotated[str, Field(min_length=1)]


Count = Annotated[int, Field(ge=0)]


Checkpoint = Annotated[Text, AfterValidator(_well_formed)]


Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_yaml_float)]


def _number_is_id(token: int | str) -> int | str:
    """On a command line everything is text: a number means an id there, and so the same, quoted, in a file."""
    return int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token


TokenRef = Annotated[Count | Text, AfterValidator(_number_is_id)]


TokenRefs = Annotated[tuple[TokenRef, ...], Field(strict=False)]  # not strict: YAML has lists only


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
        description="a hub id, a folder, a .gguf file, or package:NAME==VERSION for what a Python package ships"
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
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        default=None, description="the SHA-256 of a package's wheel, 64 digits of 0-9 and a-f"
    )
    bytes: Annotated[int, Field(ge=1)] | None = Field(default=None, description="the size of a package's wheel")
    otherwise: Text | None = Field(default=None, description="a hub id, taken where the package cannot be fetched")

    @model_validator(mode="after")
    def _only_of_a_release(self) -> Self:
        given = [name for name in ("sha256", "bytes", "otherwise") if getattr(self, name) is not None]
        if given and not RELEASE.fullmatch(self.checkpoint):
            raise ValueError(f"{given[0]} means something only with checkpoint: package:NAME==VERSION")
        if self.revision is not None and self.otherwise is None and RELEASE.fullmatch(self.checkpoint):
            raise ValueError("revision means something only with a hub id; a package's version stands behind its ==")
        return self


class DraftSettings(_Section):
    """The base of every kind of draft's settings; `kind` names it."""

    kind: str


class CheckpointDraft(CheckpointSettings, DraftSettings):
    """A smaller checkpoint that proposes."""

    kind: Literal["checkpoint"] = Field(description="checkpoint or ngram")


class NgramDraft(DraftSettings):
    """Proposes what followed the text's last tokens earlier in the same text; the lengths are in tokens."""

    kind: Literal["ngram"] = Field(description="checkpoint or ngram")
    max_ngram: Annotated[int, Field(ge=1)] = Field(default=3, description="an integer of at least 1")
    min_ngram: Annotated[int, Field(ge=1)] = Field(default=1, description="an integer of at least 1")

    @model_validator(mode="after")
    def _ordered(self) -> NgramDraft:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is greater than max_ngram {self.max_ngram}")
        return self


# By kind. Those of kinds that are defined with their drafter join by `register_draft`.
DRAFTS: dict[str, type[DraftSettings]] = {"checkpoint": CheckpointDraft, "ngram": NgramDraft}


class _AnyKind:
    """A draft section is what its `kind` says, of the kinds there are when the profile's schema is built."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = functools.reduce(operator.or_, DRAFTS.values())
        return handler.generate_schema(Annotated[kinds, Field(discriminator="kind")])


def register_draft(kind: str, settings: type[DraftSettings]) -> None:
    """From now on profiles may have a draft of that kind."""
    if DRAFTS.get(kind) is not settings:
        DRAFTS[kind] = settings
        Profile.model_rebuild(force=True)


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
    draft: Annotated[DraftSettings, _AnyKind] | None = Field(
        default=None, description="null, or a mapping with kind: checkpoint or kind: ngram"
    )
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


SECTIONS: dict[str, type[_Section]] = {
    "target": CheckpointSettings,
    "decoding": DecodingSettings,
    "prompt": PromptSettings,
}
