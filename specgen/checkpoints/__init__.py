"""From a name to weights: locate, convert, load, compare vocabularies."""
