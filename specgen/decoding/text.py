"""Token ids → text that can be printed as it comes, and stop strings found token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specgen.rounds.record import Finish

_INCOMPLETE = "\ufffd"


class _Decoded:
    """Tokens decoded as they come, with special tokens or without. text: what is whole; pending: what may not be.

    A token's text may depend on the one before it: it is the difference of two decodings.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._from = 0  # tokens before this one are decoded for good
        self._settled = 0  # tokens up to here have given their text
        self.text = ""
        self.pending = ""

    def add(self, token: int) -> None:
        self._tokens.append(token)
        known = self._decode(self._tokens[self._from : self._settled])
        longer = self._decode(self._tokens[self._from :])
        self.pending = longer[len(known) :]
        if not longer.endswith(_INCOMPLETE):
            self.settle()

    def settle(self) -> None:
        """The pending text as it is, half a character and all."""
        if not self.pending:
            return
        self.text, self.pending = self.text + self.pending, ""
        self._from, self._settled = self._settled, len(self._tokens)


class TextStream:
    """Decodes committed tokens one at a time.

    `take()` hands out what is certain: text that ends in an incomplete UTF-8 sequence, or in what may be the
    beginning of a stop string, is held back. A stop string itself and what is behind it are never handed out.

    Special tokens are never handed out either, but stop strings are looked for in the text that holds them, as
    transformers' `generate(stop_strings=…)` does, and in what is held back. Of several the one that begins first
    counts; the prompt is not searched.
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_tokens)
        self._stop = tuple(stop)
        self._longest = max((len(s) for s in self._stop), default=0)
        self._shown = _Decoded(lambda tokens: self._decode(tokens, special=False))
        self._searched = _Decoded(lambda tokens: self._decode(tokens, special=True))  # kept where there is a stop
        self._special: dict[int, bool] = {}  # by token
        self._silent: list[tuple[int, int]] = []  # of the searched text: (begin, end) of what is never handed out
        self._cut: int | None = None  # characters in front of a stop string that was found
        self._taken = 0

    @property
    def text(self) -> str:
        """What is whole so far, up to a stop string."""
        return self._shown.text if self._cut is None else self._shown.text[: self._cut]

    def __call__(self, token: int) -> Finish | None:
        """Takes in one committed token; whether the text ends with it, and how."""
        ends = token in self._ends
        if self._cut is None:
            if not ends:
                self._shown.add(token)
            if self._stop:
                self._search(token, silent=ends)
        if ends:
            return Finish.END
        return None if self._cut is None else Finish.STOP

    def _decode(self, tokens: Sequence[int], *, special: bool) -> str:
        if self._tokenizer is None:
            return "".join(f"{t} " for t in tokens)
        return str(
            self._tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def _search(self, token: int, *, silent: bool) -> None:
        """Cuts the text at the first stop string that this token completes."""
        before = len(self._searched.text)
        self._searched.add(token)
        whole = self._searched.text + self._searched.pending
        if silent or self._is_special(token):
            self._silent.append((len(whole) - len(self._decode([token], special=True)), len(whole)))
        certain = whole.rstrip(_INCOMPLETE) if self._searched.pending else whole  # the rest is half a character
        reach = max(0, before - self._longest + 1)
        hits = [at for s in self._stop if (at := certain.find(s, reach)) >= 0]
        if hits:
            self._shown.settle()
            self._cut = max(0, len(self._shown.text) - self._heard(min(hits), len(whole)))

    def _is_special(self, token: int) -> bool:
        if token not in self._special:
            alone = self._decode([token], special=True), self._decode([token], special=False)
            self._special[token] = bool(alone[0]) and not alone[1]
        return self._special[token]

    def _heard(self, begin: int, end: int) -> int:
        """How many characters of searched[begin:end] are handed out: counted from the end, where both texts agree."""
        hidden = (min(end, b) - max(begin, a) for a, b in self._silent if a < end and b > begin)
        return end - begin - sum(hidden)

    def take(self, *, final: bool = False) -> str:
        """The text that became certain since the last call; final: everything that is left."""
        if final and self._cut is None:
            self._shown.settle()
        text = self.text
        certain = len(text) if final or self._cut is not None else len(text) - self._possible_stop()
        piece = text[self._taken : certain]
        self._taken = max(self._taken, certain)
        return piece

    def _possible_stop(self) -> int:
        """Characters at the end of the text that may begin a stop string: its longest end that does."""
        text = self._searched.text
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stop):
                return self._heard(len(text) - n, len(text))
        return 0


def pieces(tokenizer: Any, tokens: Sequence[int], first: int) -> list[str]:
    """What each of tokens[first:] adds to the text, special tokens included.

    A character of several tokens stands at the one that completes it, the others are empty; what the last token
    leaves incomplete is that token's. The text may depend on the tokens before (a space that a lone token lacks, a
    character begun), also on those before `first`. tokenizers' `DecodeStream` would not do: it keeps an incomplete
    end for good, raises where bytes undo what was decoded, and not every tokenizer has one.
    """

    def decode(ids: Sequence[int]) -> str:
        if tokenizer is None:
            return "".join(f" {i}" for i in ids)
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    settled, begin = first, max(0, first - 1)  # tokens[begin:settled] are what the next piece stands behind
    while begin and not decode(tokens[begin:first]).strip(_INCOMPLETE):
        begin -= 1
    found = []
    for end in range(first + 1, len(tokens) + 1):
        known, longer = decode(tokens[begin:settled]), decode(tokens[begin:end])
        if longer.endswith(_INCOMPLETE) and end < len(tokens):
            found.append("")
            continue
        if not longer.startswith(known):
            known = known.rstrip(_INCOMPLETE)  # half a character, now a whole one
        found.append(longer[len(known) :] if longer.startswith(known) else decode(tokens[settled:end]))
        begin, settled = settled, end
    return found
