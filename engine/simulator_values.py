"""What a replayed trace is made of: requests, the cluster that serves them, and what things cost.

Owns: plain values and the cost model's arithmetic.
Must not know: files, and how a simulation moves.

The costs describe a large machine by a handful of constants; they decide when something happens,
never what: every decision is made by the code that serves real requests.
"""

from __future__ import annotations

import attrs

from engine.effects import DecodeSlice, PrefillSlice, Step

SECOND = 1_000_000_000


@attrs.frozen
class TraceRequest:
    """One line of a trace: when it came, and how many tokens went in and out."""

    arrival_ns: int
    prompt_tokens: int
    new_tokens: int


@attrs.frozen(kw_only=True)
class Costs:
    """How long things take, for one engine.

    A prompt token at position p costs `prefill_token_ns * (1 + p / attention_tokens)`: attention
    over `attention_tokens` earlier tokens costs as much as everything else of a token.
    A decode step costs its base, something for each request, and the reading of its KV.
    """

    prefill_step_ns: int = 5_000_000
    prefill_token_ns: int = 50_000
    attention_tokens: int = 53_000
    decode_step_ns: int = 15_000_000
    decode_request_ns: int = 50_000
    decode_read_token_ns: int = 16
    kv_token_bytes: int = 327_680
    link_bytes_per_s: int = 100_000_000_000
    link_latency_ns: int = 20_000
    verify_page_ns: int = 100
    control_ns: int = 200_000
    flush_ns: int = 1_000_000
    tick_ns: int = 250_000_000
    heartbeat_ns: int = 1_000_000_000

    def prefill_ns(self, step: Step) -> int:
        """A prefill pass."""
        total = 0
        for part in step.slices:
            assert isinstance(part, PrefillSlice), "a prefill step has prefill slices"
            middle = part.start + part.count // 2
            linear = part.count * self.prefill_token_ns
            total += linear + linear * middle // self.attention_tokens
        return self.prefill_step_ns + total

    def decode_ns(self, step: Step) -> int:
        """A decode pass: one token for each request in it."""
        tokens = 0
        for part in step.slices:
            assert isinstance(part, DecodeSlice), "a decode step has decode slices"
            tokens += part.position
        return (
            self.decode_step_ns
            + self.decode_request_ns * len(step.slices)
            + self.decode_read_token_ns * tokens
        )

    def transfer_ns(self, tokens: int) -> int:
        """How long one write occupies its writer's link, without the latency."""
        return tokens * self.kv_token_bytes * SECOND // self.link_bytes_per_s


@attrs.frozen(kw_only=True)
class Cluster:
    """What serves a trace. Pools are in tokens, for each engine.

    `context_tokens` is what is offered to clients; nothing says that a pool holds it.
    """

    context_tokens: int
    prefill_pool_tokens: int
    decode_pool_tokens: int
    page_tokens: int = 16
    prefill_engines: int = 4
    decode_engines: int = 1
    slots: int = 256
    batch: int = 256
    chunk_tokens: int = 8_192
    staging_tokens: int = 32_768
    growth_tokens: int = 128
    attempts_max: int = 4
    deadline_ns: int = 86_400 * SECOND
    queue_limit: int = 1 << 30
    queue_ns: int = 86_400 * SECOND


@attrs.frozen(kw_only=True)
class Goals:
    """What a request has to keep to count as good."""

    first_token_ns: int = 30 * SECOND
    token_ns: int = 100_000_000
