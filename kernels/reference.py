"""Every operation on pages in plain torch: the definition that faster kernels must equal.

It owns what each operation means, faults included.
It must not be fast: it goes page by page, and it waits for the device.

Signatures are those of `kernels.triton_ops`; `kernels.dispatch` checks operands and chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import digest, headers
from kernels.layout import PageMemory
from kernels.tables import Fault, LayerStep, PageLabels


def _page_fault(
    memory: PageMemory, layer: int, *, page: int, tag: int, position: int, needed: int
) -> Fault:
    """What is wrong with one block for a reader of its first `needed` tokens."""
    if not 0 <= page < memory.pages:
        return Fault.PAGE
    words = memory.words[layer, page]
    place, filled = int(words[1]), int(words[2]) & headers.LOW_32
    fault = Fault(0)
    # A tag is never 0, so memory that nobody stamped is nobody's.
    if int(words[0]) != tag or tag == 0:
        fault |= Fault.HEAD_TAG
    if int(words[-1]) != tag:
        fault |= Fault.TAIL_TAG
    if place & headers.LOW_32 != layer:
        fault |= Fault.LAYER
    if (place >> 32) & headers.LOW_32 != position:
        fault |= Fault.POSITION
    if not needed <= filled <= memory.layout.page_tokens:
        fault |= Fault.FILLED
    return fault


def _length_fault(step: LayerStep, sequence: int, row_count: int) -> Fault:
    tables = step.tables
    tokens, rows = int(tables.tokens[sequence]), int(tables.rows[sequence])
    first = int(tables.first_row[sequence])
    room = tables.width * step.memory.layout.page_tokens
    sound = (
        0 <= tokens <= room
        and 0 <= rows <= min(tokens, tables.rows_max)
        and 0 <= first <= row_count - rows
    )
    return Fault(0) if sound else Fault.LENGTH


def _faults(step: LayerStep, sequence: int, positions: range, *, held: int) -> Fault:
    """What is wrong with a sequence's pages of these logical numbers where it holds `held` tokens."""
    size = step.memory.layout.page_tokens
    fault = Fault(0)
    for position in positions:
        fault |= _page_fault(
            step.memory,
            step.layer,
            page=int(step.tables.pages[sequence, position]),
            tag=int(step.tables.tags[sequence, position]),
            position=position,
            needed=min(max(held - position * size, 0), size),
        )
    return fault


def _attend(step: LayerStep, queries: Tensor, sequence: int, *, tokens: int) -> Tensor:
    """Causal softmax attention of the last rows of one sequence, in float32 or wider."""
    memory = step.memory
    size, block_rows = memory.layout.page_tokens, memory.layout.block_rows
    places = torch.arange(tokens, device=queries.device)
    index = step.tables.pages[sequence].long()[places // size] * block_rows + places % size
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    rows = memory.rows[step.layer].index_select(0, index).to(wide)
    count, heads, head_dim = queries.shape
    group = heads // memory.layout.kv_heads
    grouped = queries.to(wide).view(count, memory.layout.kv_heads, group, head_dim)
    scores = torch.einsum("qhgd,thd->hgqt", grouped, rows[:, 0]) * head_dim**-0.5
    seen = torch.arange(tokens - count, tokens, device=queries.device)
    scores = scores.masked_fill(places[None, :] > seen[:, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hgqt,thd->qhgd", weights, rows[:, 1]).reshape(count, heads, head_dim)


def decode_attention(step: LayerStep, queries: Tensor, output: Tensor) -> Tensor:
    """As `dispatch.decode_attention` says."""
    layout, tables, flags = step.memory.layout, step.tables, step.flags
    for sequence in range(tables.sequences):
        tokens = int(tables.tokens[sequence])
        fault = Fault.LENGTH
        if 0 <= tokens <= tables.width * layout.page_tokens:
            live = range(layout.pages_for_tokens(tokens))
            fault = _faults(step, sequence, live, held=tokens)
        flags[sequence] |= int(fault)
        if int(flags[sequence]) or tokens == 0:
            output[sequence] = 0
        else:
            one = queries[sequence : sequence + 1]
            output[sequence] = _attend(step, one, sequence, tokens=tokens)[0]
    return output


def prefill_attention(step: LayerStep, queries: Tensor, output: Tensor) -> Tensor:
    """As `dispatch.prefill_attention` says."""
    layout, tables, flags = step.memory.layout, step.tables, step.flags
    for sequence in range(tables.sequences):
        fault = _length_fault(step, sequence, queries.shape[0])
        if fault:
            flags[sequence] |= int(fault)
            continue
        tokens, rows = int(tables.tokens[sequence]), int(tables.rows[sequence])
        if rows == 0:
            continue
        live = range(layout.pages_for_tokens(tokens))
        flags[sequence] |= int(_faults(step, sequence, live, held=tokens))
        first = int(tables.first_row[sequence])
        mine = slice(first, first + rows)
        if int(flags[sequence]):
            output[mine] = 0
        else:
            output[mine] = _attend(step, queries[mine], sequence, tokens=tokens)
    return output


def write_tokens(step: LayerStep, keys: Tensor, values: Tensor) -> None:
    """As `dispatch.write_tokens` says."""
    memory, tables, flags = step.memory, step.tables, step.flags
    size, block_rows = memory.layout.page_tokens, memory.layout.block_rows
    for sequence in range(tables.sequences):
        fault = _length_fault(step, sequence, keys.shape[0])
        tokens, rows = int(tables.tokens[sequence]), int(tables.rows[sequence])
        start = tokens - rows
        touched = range(start // size, memory.layout.pages_for_tokens(tokens))
        if fault == Fault(0) and rows > 0:
            fault = _faults(step, sequence, touched, held=start)
        flags[sequence] |= int(fault)
        if int(flags[sequence]) or rows == 0:
            continue
        first = int(tables.first_row[sequence])
        places = torch.arange(start, tokens, device=keys.device)
        table = tables.pages[sequence].long()
        index = table[places // size] * block_rows + places % size
        mine = slice(first, first + rows)
        memory.rows[step.layer].index_copy_(0, index, torch.stack((keys[mine], values[mine]), 1))
        for position in touched:
            words = memory.words[step.layer, int(table[position])]
            words[2] = min(tokens - position * size, size)
            words[3] = 0


def check_headers(memory: PageMemory, labels: PageLabels, flags: Tensor) -> None:
    """As `dispatch.check_headers` says."""
    for entry in range(labels.count):
        for layer in range(memory.layout.layers):
            flags[entry] |= int(_label_fault(memory, layer, labels, entry))


def _label_fault(memory: PageMemory, layer: int, labels: PageLabels, entry: int) -> Fault:
    filled = int(labels.filled[entry])
    if not 0 <= filled <= memory.layout.page_tokens:
        return Fault.LENGTH
    return _page_fault(
        memory,
        layer,
        page=int(labels.pages[entry]),
        tag=int(labels.tags[entry]),
        position=int(labels.positions[entry]),
        needed=filled,
    )


def digest_pages(memory: PageMemory, labels: PageLabels, flags: Tensor) -> Tensor:
    """As `dispatch.digest_pages` says."""
    digests = torch.zeros(
        (memory.layout.layers, labels.count), dtype=torch.int64, device=memory.octets.device
    )
    for entry in range(labels.count):
        page, filled = int(labels.pages[entry]), int(labels.filled[entry])
        if not 0 <= page < memory.pages:
            flags[entry] |= int(Fault.PAGE)
        elif not 0 <= filled <= memory.layout.page_tokens:
            flags[entry] |= int(Fault.LENGTH)
        else:
            digests[:, entry] = _sealed(memory, labels, entry, labels.tags[entry : entry + 1])
    return digests


def _sealed(memory: PageMemory, labels: PageLabels, entry: int, tag: Tensor) -> Tensor:
    """int64 `[layers]`: the digests of one page, bound to `tag`, int64 `[1]`."""
    one = slice(entry, entry + 1)
    filled = labels.filled[one].long()
    sums = digest.data_sums(memory, labels.pages[one].long(), filled)
    positions = labels.positions[one].long()
    return digest.seal(sums, tags=tag, positions=positions, filled=filled)[:, 0]


def copy_pages(
    source: PageMemory,
    destination: PageMemory,
    labels: PageLabels,
    flags: Tensor,
    *,
    target_pages: Tensor,
    target_tags: Tensor,
    sealed: bool,
) -> Tensor:
    """As `dispatch.copy_pages` says."""
    layers = source.layout.layers
    digests = torch.zeros((layers, labels.count), dtype=torch.int64, device=source.octets.device)
    aims = target_pages.tolist()
    for entry, aim in enumerate(aims):
        if not 0 <= aim < destination.pages or aims.count(aim) > 1:
            flags[entry] |= int(Fault.PAGE)
            continue
        tag = target_tags[entry : entry + 1]
        for layer in range(layers):
            fault = _label_fault(source, layer, labels, entry)
            if int(tag) == 0:
                fault |= Fault.HEAD_TAG
            if sealed and not fault & (Fault.PAGE | Fault.LENGTH):
                fault |= _seal_fault(source, layer, labels, entry)
            flags[entry] |= int(fault)
            block = destination.words[layer, aim], destination.data[layer, aim]
            digests[layer, entry] = _copy_block(
                source, labels, block, tag, layer=layer, entry=entry, sound=not fault
            )
    return digests


def _seal_fault(memory: PageMemory, layer: int, labels: PageLabels, entry: int) -> Fault:
    """What only a sealed block shows: exact filled, algorithm and digest."""
    words = memory.words[layer, int(labels.pages[entry])]
    count = int(labels.filled[entry])
    fault = Fault(0)
    if int(words[2]) & headers.LOW_32 != count:
        fault |= Fault.FILLED
    algorithm = (int(words[2]) >> 32) & headers.LOW_32
    found = int(_sealed(memory, labels, entry, labels.tags[entry : entry + 1])[layer])
    if algorithm != digest.ALGORITHM_WSUM32 or found != int(words[3]):
        fault |= Fault.DIGEST
    return fault


def _copy_block(
    source: PageMemory,
    labels: PageLabels,
    block: tuple[Tensor, Tensor],
    tag: Tensor,
    *,
    layer: int,
    entry: int,
    sound: bool,
) -> int:
    """Copy and seal one block, or leave an empty one under no tag; returns its signed digest."""
    words, data = block
    words[: source.layout.header_words] = 0
    words[-8:] = 0
    data.zero_()
    if not sound:
        return 0
    count = int(labels.filled[entry])
    valid = count * source.layout.row_bytes // 4
    data[:valid] = source.data[layer, int(labels.pages[entry]), :valid]
    found = int(_sealed(source, labels, entry, tag)[layer])
    words[0] = words[-1] = tag
    words[1] = layer | int(labels.positions[entry]) << 32
    words[2] = count | digest.ALGORITHM_WSUM32 << 32
    words[3] = found
    return found
