"""Logits → probabilities through the processors; keyed randomness."""
