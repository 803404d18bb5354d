"""A prompt's text → the target's tokens, through its chat template or as it stands."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from specgen.errors import UsageError
from specgen.profiles.schema import PromptSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, settings: PromptSettings, checkpoint: str, prompt: str
) -> list[int]:
    """Token ids [n] of the prompt. Raises UsageError, which names the checkpoint and the way out, for a template that
    is missing or fails, and for a system message that it cannot take."""
    if is_raw(tokenizer, settings):
        if settings.template == "chat":
            raise UsageError(f"{checkpoint} has no chat template: use --raw")
        if settings.system is not None:
            raise UsageError("--system needs a chat template: leave it out, or do without --raw")
        return list(tokenizer(prompt).input_ids)
    user = {"role": "user", "content": prompt}
    if settings.system is None:
        return _applied(tokenizer, [user], checkpoint)
    messages = [{"role": "system", "content": settings.system}, user]
    try:
        tokens = _applied(tokenizer, messages, checkpoint)
    except UsageError as error:
        try:
            _applied(tokenizer, [user], checkpoint)
        except UsageError:
            raise error from None
        why = _first_line(error.__cause__)
        raise UsageError(
            f"{checkpoint}: its chat template takes no system message ({why}): leave --system out, or use --raw"
        ) from error
    if settings.system.strip() and tokens == _applied(tokenizer, [user], checkpoint):
        raise UsageError(
            f"{checkpoint}: its chat template leaves the system message out of the text: "
            "put it into the prompt and leave --system out, or use --raw"
        )
    return tokens


def is_raw(tokenizer: PreTrainedTokenizerBase, settings: PromptSettings) -> bool:
    """Whether prompts are continued as they stand."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return settings.template == "raw" or not has_template


def _applied(tokenizer: Any, messages: list[dict[str, str]], checkpoint: str) -> list[int]:
    templates = tokenizer.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        raise UsageError(
            f"{checkpoint} has several chat templates ({', '.join(sorted(templates))}) and none of them is the "
            "default: use --raw, or save the one that you want as its chat_template.jinja"
        )
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # Jinja runs the checkpoint's own expressions: any error is the template's
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line is not None else ""
        raise UsageError(
            f"{checkpoint}: its chat template fails{where} ({_first_line(error)}): use --raw, or mend the template"
        ) from error


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")[:160]


def tokenizer_notes(tokenizer: Any, settings: PromptSettings, end_tokens: Collection[int]) -> list[str]:
    """What the user should know of how every prompt is read: an end token that the tokenizer appends to a raw one."""
    if not is_raw(tokenizer, settings):
        return []
    tokens = tokenizer("a").input_ids
    if not tokens or tokens[-1] not in end_tokens:
        return []
    return [
        f"the tokenizer appends the end token {tokenizer.convert_ids_to_tokens(tokens[-1])} to a raw prompt: the "
        "model may take the text for finished, and answer nothing"
    ]


def prompt_notes(tokenizer: Any, settings: PromptSettings, prompt: str, tokens: list[int]) -> list[str]:
    """What the user should know of one prompt: special tokens in its own text, which are read as such."""
    first = tokenizer.bos_token_id
    if is_raw(tokenizer, settings) and first is not None and tokens[:2] == [first, first]:
        bos = tokenizer.bos_token
        return [f"the prompt begins with {bos} itself, and the tokenizer adds another: leave it out of the text"]
    known = set(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if getattr(token, "special", False)
    }
    inside = tokenizer(prompt, add_special_tokens=False).input_ids
    found = [str(tokenizer.convert_ids_to_tokens(i)) for i in dict.fromkeys(inside) if i in known]
    found = [token for token in found if token in prompt]  # not an unknown character's <unk>
    if not found:
        return []
    shown = ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
    return [f"the prompt's text holds {shown}, read as special tokens, not as text"]
