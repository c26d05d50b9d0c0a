"""Clusters to replay traces on: the misconfiguration of a real incident, and sound ones.

Owns: the presets by name.
Must not know: traces and files.

In the incident a prefill pool of 681,280 tokens stood behind an offered context of 1,048,576.
The `incident-` presets keep that ratio at contexts that public traces reach; their decode pools
are ample, and their pages have two tokens, because two divides each of these pools.
A running scheduler refuses an engine whose pool is smaller than an explicitly offered context; the
presets hand the cluster to the decision code as it is, because that code must be safe by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.simulator_values import Cluster

INCIDENT_POOL = 681_280
INCIDENT_CONTEXT = 1_048_576
AMPLE_TOKENS = 1 << 20


def incident(context_tokens: int) -> Cluster:
    """The incident's ratio of prefill pool to context, at this context."""
    return Cluster(
        context_tokens=context_tokens,
        prefill_pool_tokens=context_tokens * INCIDENT_POOL // INCIDENT_CONTEXT,
        decode_pool_tokens=max(AMPLE_TOKENS, 8 * context_tokens),
        page_tokens=2,
    )


def sound(context_tokens: int) -> Cluster:
    """Pools that hold every request within the context."""
    return Cluster(
        context_tokens=context_tokens,
        prefill_pool_tokens=2 * context_tokens,
        decode_pool_tokens=max(AMPLE_TOKENS, 8 * context_tokens),
    )


PRESETS: Mapping[str, Cluster] = {
    "incident-8k": incident(8_192),
    "incident-64k": incident(65_536),
    "incident-128k": incident(131_072),
    "incident-192k": incident(196_608),
    "sound-8k": sound(8_192),
    "sound-64k": sound(65_536),
    "sound-128k": sound(131_072),
    "sound-192k": sound(196_608),
}
