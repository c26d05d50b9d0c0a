"""Claims about settings that need no model to be judged: they are refused before one is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from kernels.layout import MAX_PAGE_TOKENS
from lifecycle.events import Role
from tests.test_cli import bare  # noqa: F401 - a fixture for every test here
from transport import cli
from transport.engine_lives import run_engine
from transport.settings import PAGE_TOKENS_MAX, EngineSettings, InvalidSetting

NO_MODEL = "no-such-model"
"""Whoever looks for it complains of it."""


@pytest.mark.parametrize("verb", ["serve", "prefill", "decode"])
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--kv-memory=12 apples", "unit 'apples' is none of"),
        ("--kv-memory=101%", "a share is at most 100%"),
        ("--kv-memory=0", "is less than one byte"),
        ("--page-tokens=65537", "a page holds 1 to 65536 tokens"),
        ("--page-tokens=0", "a page holds 1 to 65536 tokens"),
    ],
)
def test_sizes_are_judged_before_a_model_is_looked_for(
    verb: str, flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`serve` starts no part with them, and an engine reads nothing."""
    assert cli.run([verb, flag, "--model", NO_MODEL]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert flag.removeprefix("--").partition("=")[0].replace("-", "_") in shown.err
    assert NO_MODEL not in shown.err
    assert shown.out == ""


def test_a_page_holds_as_much_as_the_kernels_say() -> None:
    """The limit is written down twice, because reading it there takes seconds."""
    assert PAGE_TOKENS_MAX == MAX_PAGE_TOKENS


@pytest.mark.parametrize(
    ("role", "name", "files"),
    [
        (Role.PREFILL, "token_file", ("token_file",)),
        (Role.DECODE, "token_file", ("token_file",)),
        (Role.PREFILL, "tls_ca", ("tls_ca",)),
        (Role.DECODE, "credentials", ("credentials",)),
        (Role.DECODE, "tls_cert", ("tls_cert", "tls_key")),
    ],
)
@pytest.mark.anyio
async def test_an_engine_looks_at_its_doors_before_it_reads_a_model(
    role: Role, name: str, files: tuple[str, ...], tmp_path: Path
) -> None:
    """A token, certificate or list of callers that is not there is refused at once."""
    given: dict[str, Any] = dict.fromkeys(files, tmp_path / "none")
    settings = EngineSettings(role=role, engine="one", model=NO_MODEL, plane="grpc", **given)
    with pytest.raises(InvalidSetting) as caught:
        await run_engine(settings, ready=pytest.fail, stop=anyio.Event())
    assert caught.value.name == name
