"""Prompts: from files, stdin and --prompt to texts, with the place of every fault."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specgen.errors import UsageError

ANSWER_KEY = "specgen"  # of a .jsonl line that comes out: all that is not the input's


@dataclass
class Prompt:
    """One thing to generate from. record: the fields of a .jsonl line, None for a text."""

    name: str
    text: str
    record: dict[str, Any] | None = field(default=None)


def read_prompts(inputs: list[str], prompt: str | None, *, answers: bool = False) -> list[Prompt]:
    """The prompts that files, `-` and --prompt give. Raises UsageError for what cannot be read.

    answers: a .jsonl line comes out again with its answer, so that it may not hold ANSWER_KEY.
    """
    if prompt is not None and inputs:
        raise UsageError("give either files or --prompt, not both")
    if prompt is not None:
        return [_checked(Prompt("--prompt", prompt))]
    found: list[Prompt] = []
    if inputs.count("-") > 1:
        raise UsageError("- (stdin) can be read only once")
    for name in inputs:
        text = _decoded(name, _bytes_of(name))
        if name.lower().endswith(".jsonl"):
            found += _json_lines(name, text, answers)
        else:
            # The line ending that editors and echo put behind the last line is not part of the prompt.
            found.append(_checked(Prompt(name, text.removesuffix("\n").removesuffix("\r"))))
    if len({p.record is None for p in found}) > 1:
        raise UsageError("give either .jsonl files (JSON lines out) or texts, not both at once")
    return found


def _bytes_of(name: str) -> bytes:
    if not name:
        raise UsageError("'' is not a file name")
    if name == "-":
        if sys.stdin is None:
            raise UsageError("-: stdin is closed")
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{name}: no such file (a prompt itself goes behind --prompt)") from None
    except IsADirectoryError:
        raise UsageError(f"{name}: is a folder; give a text file") from None
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name}: not UTF-8 (byte {error.start}); convert it first, for example with iconv"
        ) from None


def _checked(prompt: Prompt) -> Prompt:
    if not prompt.text.strip():
        raise UsageError(f"{prompt.name}: the prompt is empty")
    try:
        prompt.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{prompt.name}: the prompt is not UTF-8 (character {error.start + 1})") from None
    return prompt


def _no_number(text: str) -> float:
    """Python reads NaN and Infinity, and what it writes of them is no JSON either."""
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is more than a float holds")
    return number


def _json_lines(name: str, text: str, answers: bool) -> list[Prompt]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            record = json.loads(line, parse_constant=_no_number, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise UsageError(f'{where}: needs an object with a text in "prompt"')
        if answers and ANSWER_KEY in record:
            raise UsageError(
                f'{where}: has a key "{ANSWER_KEY}" already, where the answer goes: rename it, or leave it out'
            )
        found.append(_checked(Prompt(where, record["prompt"], record)))
    if not found:
        raise UsageError(f"{name}: holds no prompt")
    return found
