"""One moving line on the terminal at a time: a spinner around all of loading makes room for a bar within."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Spinner(Protocol):
    """What is shown while something loads; rich's `Status` is one."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


_shown: list[Spinner] = []


@contextlib.contextmanager
def around(spinner: Spinner) -> Iterator[None]:
    """While this lasts, `alone` stops the spinner."""
    _shown.append(spinner)
    try:
        yield
    finally:
        _shown.remove(spinner)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While this lasts, no spinner moves."""
    stopped = list(_shown)
    for spinner in stopped:
        spinner.stop()
    try:
        yield
    finally:
        for spinner in stopped:
            spinner.start()
