"""Is the text still the target's? A file a check."""
