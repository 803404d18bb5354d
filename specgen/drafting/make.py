"""The one list of drafters, and from a profile's draft section to one of them."""

from __future__ import annotations

from specgen.drafting.checkpoint import ModelDrafter
from specgen.drafting.drafter import Drafter, Ingredients
from specgen.drafting.ngram import NgramDrafter
from specgen.profiles.schema import CheckpointDraft, DraftSettings, NgramDraft, register_draft

# A new kind is a file beside this one, which may hold its settings too, and a line here.
DRAFTERS: list[tuple[type[DraftSettings], type[Drafter]]] = [
    (CheckpointDraft, ModelDrafter),
    (NgramDraft, NgramDrafter),
]


def make_drafter(ingredients: Ingredients) -> Drafter:
    """The drafter of the settings' kind."""
    (drafter,) = (drafter for settings, drafter in DRAFTERS if type(ingredients.settings) is settings)
    return drafter.made(ingredients)


for settings, drafter in DRAFTERS:
    register_draft(drafter.kind, settings)
