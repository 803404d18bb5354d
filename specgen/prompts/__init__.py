"""Reading prompts; the built-in sets. No torch."""
