"""YAML → validated settings: defaults < generation_config < file < flags. No torch."""
