"""What every test shares: no network, no flaky deadlines, and tests that start engines last."""

import os
from pathlib import Path

# Before anything imports them: a test that reaches for the network is wrong, and Ray must not report home.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest
from hypothesis import settings

ENGINE_TIMEOUT_S = 300
"""For a test that starts engines: vLLM alone takes 20 to 30 s to come up on two cores."""

# The machine may be busy with an engine next door, so time says nothing about an example; and the same examples
# every time, because a failure has to be one that the next person sees too.
settings.register_profile("full", deadline=None, derandomize=True, print_blob=True, max_examples=200)
# For `make check`: the same properties, on fewer examples.
settings.register_profile("quick", settings.get_profile("full"), max_examples=30)
settings.load_profile(os.environ.get("DORA_TESTS", "full"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engine tests to the end, the order within both halves kept, so that a cheap failure is seen first."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    from dora_rl.models.source import prepare_model  # imports torch, which most tests can do without

    folder = tmp_path_factory.mktemp("models") / "tiny"
    prepare_model("tiny:0", folder)
    return folder
