"""The parts of an engine, put together: model, tokenizer, core, runner and owner.

Owns: what is loaded, and which parts a role has.
Must not know: the scheduler, tasks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import structlog
import torch

from engine.decode import DecodeCore
from engine.device_pool import DevicePool
from engine.digests import keyed_digest
from engine.model import Model
from engine.pool import KVPool
from engine.prefill import PrefillCore
from engine.runner_decode import DecodeRunner
from engine.runner_prefill import PrefillRunner
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.weights import Precision, load_model
from kernels import cpu as compiled
from kernels.layout import PageLayout
from lifecycle.events import Role
from lifecycle.ids import Party, RequestId
from transport.decode_owner import DecodeOwner
from transport.engine_owner import Owner, Send
from transport.engine_planes import EngineMemory, fingerprint, page_layout
from transport.prefill_owner import PrefillOwner
from transport.settings import EngineSettings, InvalidSetting

Progress = Callable[[str, float], None]

_log = structlog.get_logger("custody.engine")


@attrs.frozen
class Loaded:
    """What is read from disk once: it takes seconds and is made in a worker thread."""

    model: Model
    tokenizer: Tokenizer
    layout: PageLayout
    fingerprint: str


class LifeDigest:
    """The keyed digest of the scheduler's life; its key comes beside each admission."""

    def __init__(self) -> None:
        self.key = b""

    def __call__(self, request: RequestId, tokens: Sequence[int]) -> bytes:
        return keyed_digest(self.key)(request, tokens)


def mint_tag() -> int:
    """A random grant tag of 64 bits, never 0."""
    return secrets.randbelow((1 << 64) - 1) + 1


class ProgressLines:
    """Log lines while a model is loaded, at most five a stage."""

    def __init__(self) -> None:
        self._said: tuple[str, int] | None = None

    def __call__(self, stage: str, share: float) -> None:
        """Say how far a stage is, when another quarter of it is done."""
        reached = (stage, int(4 * share))
        if reached != self._said:
            self._said = reached
            _log.info("model_loading", stage=stage, percent=round(100 * share))


def load(settings: EngineSettings, progress: Progress) -> Loaded:
    """Read model and tokenizer. Raises ModelError's subclasses and LayoutUnsupportedError."""
    device = device_of(settings)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    precision: Precision = "int8" if settings.weights == "int8" else "float"
    model = load_model(
        settings.model, dtype=dtype, device=device, precision=precision, progress=progress
    )
    tokenizer = load_tokenizer(settings.model, progress=progress)
    layout = page_layout(model, page_tokens=settings.page_tokens)
    if device.type == "cpu":
        load_compiled_code()
    return Loaded(model, tokenizer, layout, fingerprint(model, layout))


def device_of(settings: EngineSettings) -> torch.device:
    """The device that is set. Raises InvalidSetting if torch sees none of that name here."""
    device = torch.device(settings.device)
    seen = torch.cuda.device_count()
    if device.type != "cpu" and (device.index or 0) >= seen:
        reason = f"torch {torch.__version__} sees {seen} such devices here"
        raise InvalidSetting(name="device", value=settings.device, reason=reason)
    return device


def pool_of(settings: EngineSettings, memory: EngineMemory) -> KVPool:
    """The pool that is computed in: the memory's own, or one on a device beside it."""
    device = device_of(settings)
    if device.type == "cpu":
        return memory.pool
    host = memory.pool.memory
    landing = host if settings.role is Role.DECODE else None
    return DevicePool(host.layout, host.pages, device=device, landing=landing)


class MakeOwner(Protocol):
    """Puts an engine's owner together over its memory."""

    def __call__(
        self,
        settings: EngineSettings,
        loaded: Loaded,
        memory: EngineMemory,
        *,
        party: Party,
        digest: LifeDigest,
        send: Send,
    ) -> Owner[Any]: ...


def load_compiled_code() -> None:
    """Get compiled code ready before anybody waits for a token, and say in one line what there is.

    It is compiled once for a version and a processor, which takes ten seconds and more, and then
    read from disk.
    """
    start = time.perf_counter()
    code, reason = compiled.load_compiled()
    if code is None:
        _log.warning("computing_plainly", reason=reason)
        return
    code.prepare()
    ready = {"seconds": round(time.perf_counter() - start, 2)}
    if code.KEPT:
        _log.info("compiled_code_ready", **ready)
    else:
        _log.warning("compiled_code_not_kept", reason="no cache folder can be written", **ready)


def make_owner(
    settings: EngineSettings,
    loaded: Loaded,
    memory: EngineMemory,
    *,
    party: Party,
    digest: LifeDigest,
    send: Send,
) -> Owner[Any]:
    """Core, runner and owner of this role, over this memory."""
    note = _log.warning
    pool = pool_of(settings, memory)
    if settings.role is Role.PREFILL:
        assert memory.staging is not None, "prefill's memory has staging"
        prefill_core = PrefillCore(
            party,
            pages=memory.pool.pages,
            page_tokens=settings.page_tokens,
            mint=mint_tag,
            staging=settings.staging_pages,
            chunk_tokens=settings.chunk_tokens,
            digest=digest,
        )
        prefill = PrefillRunner(loaded.model, pool, memory.staging)
        return PrefillOwner(prefill_core, prefill, plane=memory.plane, send=send, note=note)
    decode_core = DecodeCore(
        party,
        pages=memory.pool.pages,
        page_tokens=settings.page_tokens,
        mint=mint_tag,
        batch=settings.batch,
        growth_tokens=settings.growth_tokens,
        digest=digest,
    )
    decode = DecodeRunner(loaded.model, pool, loaded.tokenizer, clock=time.time_ns, digest=digest)
    path, reason = decode.compute.path, decode.compute.reason
    _log.info("decode_path", path=path, reason=reason, weights=settings.weights)
    return DecodeOwner(decode_core, decode, plane=memory.plane, send=send, note=note)
