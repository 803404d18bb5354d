"""Two tokenizers compared token by token; ids that no tokenizer has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specgen.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids of a target, and how a draft's differ from them.

    size: the target's highest token id + 1, at most its number of embedding rows.
    unused: ids below `size` that the target's tokenizer does not have; no text contains them.
    missing_in_draft: the target's ids that the draft cannot propose (no such token, or no row for it).
    missing_in_target: ids that only the draft has; they must never be proposed.
    """

    size: int
    unused: tuple[int, ...] = ()
    missing_in_draft: tuple[int, ...] = ()
    missing_in_target: tuple[int, ...] = ()


# Tokenizers
def vocabulary_of(tokenizer: PreTrainedTokenizerBase, *, rows: int) -> Vocabulary:
    """The vocabulary of a target alone. rows: of its embeddings, which may be padded beyond the tokenizer."""
    return _vocabulary(tokenizer, rows)


def compare_tokenizers(
    target_tok: PreTrainedTokenizerBase,
    draft_tok: PreTrainedTokenizerBase,
    *,
    target_rows: int,
    draft_rows: int,
) -> Vocabulary:
    """The vocabulary of a pair, by the maps of tokens to ids; sizes prove nothing, equal or not.

    rows: of the embeddings. Rows beyond the tokenizer are padding; tokens beyond the rows cannot be proposed.
    One side may lack tokens. Raises UsageError where the two sides contradict each other on a token or an id.
    """
    target, draft = _token_map(target_tok, target_rows), _token_map(draft_tok, draft_rows)
    if differing := _contradictions(target, draft):
        shown = "; ".join(differing[:4])
        more = "; …" if len(differing) > 4 else ""
        count = "1 token differs" if len(differing) == 1 else f"{len(differing)} tokens differ"
        raise UsageError(
            f"target and draft do not share a tokenizer: {count}: {shown}{more}\n"
            "A drafted id must mean the same token to both: choose a draft of the target's family."
        )
    ids_target, ids_draft = set(target.values()), set(draft.values())
    return replace(
        _vocabulary(target_tok, target_rows),
        missing_in_draft=tuple(sorted(ids_target - ids_draft)),
        missing_in_target=tuple(sorted(ids_draft - ids_target)),
    )


def _token_map(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, int]:
    """Token → id, added tokens included, for the ids that have a row."""
    return {token: i for token, i in tokenizer.get_vocab().items() if i < rows}


def _vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> Vocabulary:
    ids = set(tokenizer.get_vocab().values())
    size = min(max(ids, default=-1) + 1, rows)
    return Vocabulary(size, unused=tuple(sorted(set(range(size)) - ids)))


def _contradictions(target: Mapping[str, int], draft: Mapping[str, int]) -> list[str]:
    """In words, by the target's id: tokens with two ids, and ids with two tokens."""
    if target == draft:
        return []
    moved = [(i, token, draft[token]) for token, i in target.items() if draft.get(token, i) != i]
    draft_token = {i: token for token, i in draft.items()}
    # A tokenizer may spell one id in two ways, and the other side only in one of them: no contradiction.
    replaced = [
        (i, token, draft_token[i])
        for token, i in target.items()
        if i in draft_token and token not in draft and draft_token[i] not in target
    ]
    found = [(i, f"{token!r} is {i} in the target, {other} in the draft") for i, token, other in moved]
    found += [(i, f"{i} is {token!r} in the target, {other!r} in the draft") for i, token, other in replaced]
    return [words for _, words in sorted(found)]
