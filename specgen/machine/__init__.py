"""Devices, clocks, memory, environment."""
