"""specgen: run and profile speculative generation.

>>> import specgen                                                          # doctest: +SKIP
>>> session = specgen.load("smollm2", k=4, temperature=0.8, seed=1)         # doctest: +SKIP
>>> generation = session.generate("Why is the sky blue?")                   # doctest: +SKIP
>>> for round in generation:                                                # doctest: +SKIP
...     print(generation.take(), end="", flush=True)
>>> generation.text, generation.statistics.alpha, generation.check().verdict    # doctest: +SKIP

`load` reads a profile (a built-in name or a path) and loads its pair; `session.generate` gives an iterable of
`Round`; text, statistics and the run's check of itself hang on it. Errors are `SpecgenError` and `UsageError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.decoding.generation import Generation
    from specgen.errors import SpecgenError, UsageError
    from specgen.profiles.read import load_profile
    from specgen.profiles.schema import Profile
    from specgen.rounds.record import Round
    from specgen.rounds.statistics import Statistics, summarise
    from specgen.session import Session, load
    from specgen.settings import Mode

# Where each name lives. It is loaded on first use: `import specgen` and `specgen --help` must not import torch.
_HOMES = {
    "Generation": "decoding.generation",
    "Mode": "settings",
    "Profile": "profiles.schema",
    "Round": "rounds.record",
    "Session": "session",
    "SpecgenError": "errors",
    "Statistics": "rounds.statistics",
    "UsageError": "errors",
    "load": "session",
    "load_profile": "profiles.read",
    "summarise": "rounds.statistics",
}

__all__ = [
    "Generation",
    "Mode",
    "Profile",
    "Round",
    "Session",
    "SpecgenError",
    "Statistics",
    "UsageError",
    "load",
    "load_profile",
    "summarise",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specgen' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specgen.{_HOMES[name]}"), name)
