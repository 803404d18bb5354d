"""The Drafter protocol, and a file a kind."""
