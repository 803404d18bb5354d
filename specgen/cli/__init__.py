"""Typer only, a file a command: parse, call, print, exit code. Heavy imports inside the commands."""
