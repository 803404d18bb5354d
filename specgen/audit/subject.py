"""What is audited, and how long the texts are on which it is."""

from __future__ import annotations

SHORT = 16  # tokens of a text of which one run says as much as a longer one


CONTINUED = 32  # tokens of its own that the target adds to a prompt for the law
