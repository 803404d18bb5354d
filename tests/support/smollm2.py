"""SmolLM2's weights, loaded once in a process, under whatever settings a test asks for."""

from __future__ import annotations

import functools

from specgen.profiles.read import load_profile
from specgen.session import Session, load_session


class Sessions:
    """`sessions(max_new_tokens=8, prompt__template="raw")` is `specgen.load("smollm2", …)`, on the CPU in float32."""

    def __call__(self, **flags: object) -> Session:
        return self._load(flags, self._first)

    @functools.cached_property
    def _first(self) -> Session:
        return self._load({}, None)

    @staticmethod
    def _load(flags: dict[str, object], share: Session | None) -> Session:
        dotted = {n.replace("__", ".") if "__" in n else f"decoding.{n}": value for n, value in flags.items()}
        profile = load_profile("smollm2", {"device": "cpu", "dtype": "float32", **dotted})
        session = load_session(profile, share=share)
        assert share is None or session.pair.target is share.pair.target, "the weights were loaded again"
        return session
