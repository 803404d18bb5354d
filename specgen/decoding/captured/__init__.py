"""Rounds as CUDA graphs, and their double without capture."""
