"""The clients as the scheduler's owner task sees them: who waits for which request.

Owns: readers of open requests, what they were sent, idempotency keys.
Must not know: gRPC calls, tokenizers; the core decides.

Everything here is called by the owner task and never waits.
An outcome is told once the store holds it durably; tokens are kept until the request is closed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from engine.digests import commitment
from engine.effects import Payload, TellAdmitted, TellOutcome, TellTokens
from lifecycle.events import Cause, Finished, RejectCode, Rejected, Role
from lifecycle.ids import Party, RequestId
from lifecycle.state import TERMINAL
from transport import refusals
from transport.client_records import (
    Asked,
    Key,
    Reader,
    Record,
    admission_step,
    chunk_step,
    end_step,
    note_stop,
)
from transport.pb import fleet_pb2

if TYPE_CHECKING:
    from transport.scheduler_owner import SchedulerOwner

KEYS_MAX = 4096
"""Idempotency keys that are remembered after their requests have been answered."""

TOKEN_CHARACTERS_MAX = 1 << 16
"""Text that may come with one token: what a stop string held back comes with a later one."""

_log = structlog.get_logger("custody.clients")


class ClientDesk:
    """Requests by id while anybody may still read them."""

    def __init__(
        self,
        owner: SchedulerOwner,
        *,
        digest_key: bytes,
        tenant_salt: bytes,
        reader_tokens_max: int,
    ) -> None:
        self.owner = owner
        self.reader_tokens_max = reader_tokens_max
        self.digest_key = digest_key
        self._tenant_salt = tenant_salt
        self._records: dict[RequestId, Record] = {}
        self._of_reader: dict[Reader, Record] = {}
        self._keys: OrderedDict[Key, tuple[bytes, RequestId]] = OrderedDict()
        self._admissions: deque[tuple[int, TellAdmitted]] = deque()
        self._outcomes: deque[TellOutcome] = deque()

    @property
    def waiting(self) -> bool:
        """Whether a client has not been told its outcome yet."""
        return bool(self._outcomes)

    def commit(self, tenant: str) -> str:
        """The tenant as it stands in events."""
        return commitment(self._tenant_salt, tenant)

    # --- from clients -------------------------------------------------------------------------

    def submit(self, reader: Reader, asked: Asked) -> None:
        """Decide on a request, or attach to the one of the same key."""
        owner = self.owner
        if asked.key and self._attach(reader, asked):
            return
        refusal = owner.log_refusal
        if refusal is not None:
            reader.close(refusals.log_unavailable(refusal))
            return
        request = owner.core.mint()
        record = Record(request, asked.asked_ns, asked.deadline_ns, prompt_tokens=len(asked.tokens))
        if asked.key:
            record.key = (asked.tenant, asked.key)
            self._keys[record.key] = (asked.body, request)
            self._forget_keys()
        record.numbers = self._numbers(record)
        self._enter(record, reader)
        effects = owner.core.submit(
            request,
            tenant=self.commit(asked.tenant),
            payload=Payload(asked.tokens, 0, asked.sampling),
            new_tokens_max=asked.new_tokens_max,
            deadline_ns=asked.deadline_ns,
            now_ns=owner.now(),
        )
        owner.perform(effects)

    def _numbers(self, record: Record) -> dict[str, object]:
        """What the core compares besides the request's size, as it stands at this moment."""
        core = self.owner.core
        roles = [life.attached.role for life in core.log.fleet.alive() if life.usable]
        return {
            "waiting": len(core.queue),
            "queue_limit": core.queue.limit,
            "queue_ns": core.queue_ns,
            "prefill_engines": roles.count(Role.PREFILL),
            "decode_engines": roles.count(Role.DECODE),
            "deadline_ns": record.deadline_ns,
        }

    def refuse(
        self,
        reader: Reader,
        *,
        tenant: str,
        field: str,
        reason: str,
        told: str = "",
        numbers: Mapping[str, object] | None = None,
    ) -> None:
        """Reject what never became a prompt; the refusal stands in the log as well.

        told: a message for the client alone, where it may say more than the log.
        """
        owner = self.owner
        refusal = owner.log_refusal
        if refusal is not None:
            reader.close(refusals.log_unavailable(refusal))
            return
        now_ns = owner.now()
        record = Record(owner.core.mint(), now_ns, now_ns, field=field, told=told)
        record.numbers = {} if numbers is None else numbers
        self._enter(record, reader)
        effects = owner.core.refuse(
            record.request,
            tenant=self.commit(tenant),
            code=RejectCode.INVALID_REQUEST,
            reason=reason,
            now_ns=now_ns,
        )
        owner.perform(effects)

    def leave(self, reader: Reader, cause: Cause) -> None:
        """A reader is gone; a request that nobody reads is ended for that cause."""
        record = self._of_reader.pop(reader, None)
        if record is None:
            return
        record.readers.remove(reader)
        if record.end is None and not record.readers:
            owner = self.owner
            owner.perform(owner.core.cancel(record.request, cause, "client", owner.now()))

    def _enter(self, record: Record, reader: Reader) -> None:
        self._records[record.request] = record
        record.readers.append(reader)
        self._of_reader[reader] = record

    def _attach(self, reader: Reader, asked: Asked) -> bool:
        """Answer from the request of the same key; False when there is none to speak of."""
        known = self._keys.get((asked.tenant, asked.key))
        if known is None:
            return False
        body, request = known
        record = self._records.get(request)
        if body != asked.body or record is None:
            reader.close(refusals.key_reused(asked.key, request, answered=body == asked.body))
            return True
        record.readers.append(reader)
        self._of_reader[reader] = record
        if record.admission is not None:
            reader.put(record.admission, 0)
        for chunk in record.chunks:
            # What is repeated is in memory anyway, so it does not count as falling behind.
            reader.put(chunk, 0)
        if record.end is not None:
            self._finish(record, reader)
        return True

    def _free_key(self, record: Record) -> None:
        """Let the key of this request be used for another, unless it is already."""
        known = None if record.key is None else self._keys.get(record.key)
        if record.key is not None and known is not None and known[1] == record.request:
            del self._keys[record.key]

    def _forget_keys(self) -> None:
        for key, (_, request) in tuple(self._keys.items()):
            if len(self._keys) <= KEYS_MAX:
                return
            if request not in self._records:
                del self._keys[key]

    # --- from engines -------------------------------------------------------------------------

    def relay(self, party: Party, batch: fleet_pb2.TokenBatch) -> None:
        """Hand an engine's new tokens to the core. Raises ValueError for a malformed batch."""
        tokens, texts, logprobs = batch.token_ids, batch.texts, batch.logprobs
        if len(texts) != len(tokens) or len(logprobs) not in {0, len(tokens)}:
            raise ValueError(
                f"tokens: {len(tokens)}, texts: {len(texts)}, logprobs: {len(logprobs)}; "
                "each token has one of each"
            )
        longest = max(map(len, texts), default=0)
        if longest > TOKEN_CHARACTERS_MAX:
            limit = TOKEN_CHARACTERS_MAX
            raise ValueError(f"the text of a token has {longest} characters, the limit is {limit}")
        core = self.owner.core
        request = RequestId(batch.request)
        effects = core.tokens(
            party,
            request,
            batch.attempt,
            first=batch.first_index,
            tokens=tuple(tokens),
            texts=tuple(texts),
            logprobs=tuple(logprobs),
        )
        record, state = self._records.get(request), core.log.state(request)
        if record is not None and effects and state.attempt == batch.attempt:
            note_stop(record, batch)
        self.owner.perform(effects)

    # --- from the core ------------------------------------------------------------------------

    def admitted(self, effect: TellAdmitted) -> None:
        """Tell the client once the admission is appended."""
        self._admissions.append((self.owner.core.position, effect))
        self.release()

    def tokens(self, effect: TellTokens) -> None:
        """Pass tokens on to every reader that keeps up."""
        record = self._records.get(effect.request)
        if record is None:
            return
        if not record.first_token_ns:
            record.first_token_ns = self.owner.now()
        step = chunk_step(effect)
        record.chunks.append(step)
        record.tokens = effect.first + len(effect.tokens)
        for reader in tuple(record.readers):
            if not reader.put(step, len(effect.tokens)):
                self._cut(record, reader)

    def outcome(self, effect: TellOutcome) -> None:
        """Tell the client once its end is durable.

        Where nothing was answered the same key may try again, from the decision on: who comes
        between the end and its flush did not ask for that end.
        """
        record = self._records.get(effect.request)
        if record is not None and not isinstance(effect.outcome, Finished):
            self._free_key(record)
        code = effect.outcome.code if isinstance(effect.outcome, Rejected) else None
        if record is not None and code is RejectCode.NO_ENGINE:
            # Engines may have gone since it was asked.
            record.numbers = self._numbers(record)
        self._outcomes.append(effect)
        self.owner.journal.want(effect.durable)
        self.release()

    def closed(self, request: RequestId) -> None:
        """The request is settled and forgotten by the core."""
        record = self._records.get(request)
        if record is not None:
            record.closed = True
            self._forget(record)

    def release(self) -> None:
        """More is appended or durable: tell those who waited for it."""
        journal = self.owner.journal
        while self._admissions and self._admissions[0][0] <= journal.appended:
            self._tell_admitted(self._admissions.popleft()[1])
        while self._outcomes and self._outcomes[0].durable <= journal.durable:
            self._tell_outcome(self._outcomes.popleft())

    def tick(self, now_ns: int) -> None:
        """An outcome that cannot become durable is no outcome once its deadline has passed.

        An admission that cannot be appended is none, and its client need not wait to hear that.
        """
        failure = self.owner.journal.failure
        if failure is None:
            return
        for _, admitted in tuple(self._admissions):
            record = self._records.get(admitted.request)
            if record is not None and record.end is None and record.admission is None:
                self._finish_unadmitted(record, failure)
        for effect in self._outcomes:
            record = self._records.get(effect.request)
            if record is not None and record.end is None and now_ns >= record.deadline_ns:
                record.end = refusals.log_unavailable(failure, request=record.request)
                self._finish_all(record)

    def _finish_unadmitted(self, record: Record, failure: str) -> None:
        record.end = refusals.log_unavailable(failure, request=record.request)
        self._free_key(record)
        self._finish_all(record)
        owner, cause = self.owner, Cause.LOG_UNAVAILABLE
        owner.perform(owner.core.cancel(record.request, cause, "scheduler", owner.now()))

    # --- to readers ---------------------------------------------------------------------------

    def _tell_admitted(self, effect: TellAdmitted) -> None:
        record = self._records.get(effect.request)
        if record is None:
            return
        record.attempts = effect.attempt
        if record.admission is not None:
            return
        queued_ns = max(0, self.owner.now() - record.asked_ns)
        record.admission = admission_step(effect, queued_ns=queued_ns)
        for reader in record.readers:
            reader.put(record.admission, 0)

    def _tell_outcome(self, effect: TellOutcome) -> None:
        record = self._records.get(effect.request)
        if record is None:
            return
        if record.end is None:
            record.end = end_step(record, effect.outcome)
            self._finish_all(record)
        self._forget(record)

    def _finish_all(self, record: Record) -> None:
        for reader in tuple(record.readers):
            self._finish(record, reader)

    def _finish(self, record: Record, reader: Reader) -> None:
        reader.close(record.end)
        record.readers.remove(reader)
        self._of_reader.pop(reader, None)

    def _cut(self, record: Record, reader: Reader) -> None:
        _log.warning("reader_cut", request_id=record.request, limit=reader.limit)
        refusal = refusals.slow_reader(record.request, waiting=reader.waiting, limit=reader.limit)
        reader.cut(refusal)
        self.leave(reader, Cause.SLOW_READER)

    def _forget(self, record: Record) -> None:
        if record.end is None:
            return
        state = self.owner.core.log.state(record.request)
        if record.closed or state.phase in TERMINAL:
            self._records.pop(record.request, None)
