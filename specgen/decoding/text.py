"""Token ids → text that can be printed as it comes, and stop strings found token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specgen.rounds.record import Finish

_INCOMPLETE = "\ufffd"


class TextStream:
    """Decodes committed tokens one at a time.

    `take()` hands out what is certain: text that ends in an incomplete UTF-8 sequence, or in what may be the
    beginning of a stop string, is held back. A stop string itself and what is behind it are never handed out.
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_tokens)
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._from = 0  # tokens before this one are decoded for good
        self._settled = 0  # tokens up to here have given their text
        self.text = ""
        self._taken = 0

    def __call__(self, token: int) -> Finish | None:
        """Takes in one committed token; whether the text ends with it, and how."""
        if token in self._ends:
            return Finish.END
        self._tokens.append(token)
        before = len(self.text)
        self._settle()
        reach = before - max((len(s) for s in self._stop), default=1) + 1
        hits = [at for s in self._stop if (at := self.text.find(s, max(0, reach))) >= 0]
        if hits:
            self.text = self.text[: min(hits)]
            return Finish.STOP
        return None

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"{t} " for t in tokens)
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _settle(self, *, final: bool = False) -> None:
        """Appends the text of the pending tokens once it is whole: the difference of two decodings, because a
        token's text may depend on the one before it."""
        known = self._decode(self._tokens[self._from : self._settled])
        longer = self._decode(self._tokens[self._from :])
        if len(longer) <= len(known) or (longer.endswith(_INCOMPLETE) and not final):
            return
        self.text += longer[len(known) :]
        self._from, self._settled = self._settled, len(self._tokens)

    def take(self, *, final: bool = False) -> str:
        """The text that became certain since the last call; final: everything that is left."""
        if final and len(self._tokens) > self._settled:
            self._settle(final=True)
        certain = len(self.text) if final else len(self.text) - self._possible_stop()
        piece = self.text[self._taken : certain]
        self._taken = max(self._taken, certain)
        return piece

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=0)
        for n in range(min(longest - 1, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-n:]) for s in self._stop):
                return n
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
