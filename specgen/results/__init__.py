"""The schema of every stored file, written and read by the same types. No torch."""
