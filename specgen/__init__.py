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
    from specgen.generation import Generation
    from specgen.loading import Session, load
    from specgen.profiles import Profile, load_profile
    from specgen.rounds import Mode, Round, SpecgenError, UsageError
    from specgen.statistics import Statistics, summarise

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

# Names load their room on first use: `import specgen` and `specgen --help` must not import torch.
_ROOMS = {
    "Generation": "generation",
    "Mode": "rounds",
    "Profile": "profiles",
    "Round": "rounds",
    "Session": "loading",
    "SpecgenError": "rounds",
    "Statistics": "statistics",
    "UsageError": "rounds",
    "load": "loading",
    "load_profile": "profiles",
    "summarise": "statistics",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'specgen' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specgen.{_ROOMS[name]}"), name)
