"""The one list of drafters, and from a profile's draft section to one of them."""

from __future__ import annotations

from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.drafter import Drafter, Ingredients
from specgen.drafting.ngram import NgramDrafter
from specgen.profiles.schema import register_draft

# A new kind is a file beside this one and a line here.
DRAFTERS: list[type[Drafter]] = [
    ModelDrafter,
    NgramDrafter,
]

for drafter in DRAFTERS:
    register_draft(drafter.kind, drafter.settings)


def make_drafter(ingredients: Ingredients) -> Drafter:
    """The drafter of the settings' kind."""
    (drafter,) = (d for d in DRAFTERS if d.kind == ingredients.settings.kind)
    return drafter.made(ingredients)
