"""`specgen run --show-origin`: the text as it streams, coloured by who wrote it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from specgen.decoding.text import TextStream
from specgen.rounds.record import Origin

if TYPE_CHECKING:
    from specgen.decoding.generation import Generation


SGR = {Origin.ACCEPTED: "32", Origin.CORRECTION: "4;31", Origin.BONUS: "36"}


_NAMES = {Origin.ACCEPTED: "green", Origin.CORRECTION: "red, underlined", Origin.BONUS: "cyan"}


# Within colours no control character of the model's reaches the terminal: they come out as their pictures (␛).
_PICTURES = {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n"} | {0x7F: 0x2421}


_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def why_not() -> str | None:
    """Why stdout gets no colours; None where it does."""
    if not sys.stdout.isatty():
        return "colours need a terminal as stdout"
    if os.environ.get("NO_COLOR"):
        return "NO_COLOR is set"
    return "TERM is dumb" if os.environ.get("TERM") == "dumb" else None


def legend(*, coloured: bool) -> str:
    """What the colours mean, itself in these colours or not."""
    words = [
        f"\x1b[{SGR[origin]}m{origin}\x1b[0m ({name})" if coloured else f"{origin} ({name})"
        for origin, name in _NAMES.items()
    ]
    return f"who wrote a token: {', '.join(words)}"


class OriginText:
    """Hands out a generation's text as `Generation.take` does, with SGR codes around what each origin wrote.

    The tokens of finished rounds go through a stream of their own, one at a time; a token's text is what the stream
    grew by, also where it is handed out later (it may begin a stop string).
    """

    def __init__(self, generation: Generation) -> None:
        sampling = generation.pair.sampling
        self._generation = generation
        self._stream = TextStream(generation.pair.tokenizer, sampling.end_tokens, sampling.stop)
        self._rounds = 0  # taken in
        self._spans: list[tuple[int, Origin]] = []  # end in the text, who wrote up to there; not yet handed out
        self._at = 0  # characters handed out

    def take(self, *, final: bool = False) -> str:
        """The text that became certain since the last call; every line of it ends without colour."""
        for finished in self._generation.rounds[self._rounds :]:
            for c in finished.committed:
                self._stream(c.token)
                self._spans.append((len(self._stream.text), c.origin))
        self._rounds = len(self._generation.rounds)
        last = self._spans[-1][1] if self._spans else Origin.PLAIN
        piece = self._stream.take(final=final)
        coloured = ""
        while piece:
            while self._spans and self._spans[0][0] <= self._at:
                del self._spans[0]
            end, origin = self._spans[0] if self._spans else (self._at + len(piece), last)
            n = min(len(piece), end - self._at)
            coloured += paint(piece[:n], origin)
            piece, self._at = piece[n:], self._at + n
        return coloured


def paint(text: str, origin: Origin) -> str:
    """The text in its origin's colour, line by line, control characters made visible."""
    code = SGR.get(origin)
    lines = text.translate(_PICTURES).split("\n")
    return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if code and line else line for line in lines)
