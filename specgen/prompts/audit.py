"""The prompts of `specgen audit`."""

from __future__ import annotations

PROMPTS = (
    "Explain to a child why the moon changes its shape in the course of a month.",
    "The ferry left the harbour at six in the morning, and by noon",
    'def running_mean(values, width):\n    """The mean of each window of that width."""\n',
    "List three things to check before lending a bicycle to a friend.",
    "Q: What is 17 times 6?\nA: 102\nQ: What is 23 times 4?\nA:",
)
