"""Fixtures and profiles shared by `tests` and `property_tests`.

Owns: how tests find the model file, which event loop they run on, how many examples they draw.
Must not know: any module under test.
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, settings

# Libraries that could reach for a network or start thread pools of their own are told not to,
# before anything imports them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MODEL_FILE = Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")

# For a developer: random, with the example database.
# Deadlines measure the machine, not the code: two cores are shared with other work.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=(HealthCheck.too_slow,),
)
# Blocks a change: the same examples on every run of the same code.
settings.register_profile(
    "ci", parent=settings.get_profile("default"), derandomize=True, database=None
)
# Looks for something new: `make fuzz`.
settings.register_profile("fuzz", parent=settings.get_profile("default"), max_examples=5_000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "default")
)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio alone, because the gRPC library needs it."""
    return "asyncio"


@pytest.fixture(scope="session")
async def one_event_loop(anyio_backend: str) -> AsyncIterator[str]:
    """All async tests share one loop: the gRPC library's poller outlives the loop of a test.

    A fixture that waits keeps its loop until its end, which is the session's.
    """
    yield anyio_backend
    await anyio.lowlevel.checkpoint()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, as engines beside each other do; tests of threads say so."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let every async test, and no other, run on the one loop."""
    for item in items:
        if item.get_closest_marker("anyio") is not None and isinstance(item, pytest.Function):
            item.fixturenames.insert(0, "one_event_loop")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """Path of the real model's GGUF file; a missing file fails the test and is never a skip."""
    root = Path(__file__).resolve().parent
    path = Path(os.environ.get("CUSTODY_MODEL", root / MODEL_FILE))
    if not path.is_file():
        pytest.fail(
            f"The model file {path} is missing. "
            "Run `make model`, or name another copy in CUSTODY_MODEL.",
            pytrace=False,
        )
    return path.resolve()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests counted, one line each, from `record_property("summary", ...)`."""
    lines = [
        str(value)
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "summary"
    ]
    if lines:
        terminalreporter.section("counted")
    for line in lines:
        terminalreporter.write_line(line)
