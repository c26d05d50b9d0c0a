"""Compile every Triton kernel ahead of time, and keep what it takes in `docs/kernels.md`.

Owns: which variants are compiled for which targets, and the table in the document.
Must not know: how the kernels work.

No GPU is needed: Triton's wheel holds the compilers for NVIDIA and AMD.
Run as a program it writes the table.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tempfile
from typing import Any

import attrs
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import triton_ops
from kernels.layout import PageLayout, PageMemory
from kernels.tables import LayerStep, PageLabels, PageTables, new_flags
from kernels.triton_ops import Launch
from tools import generate_docs, house

DOCUMENT = house.ROOT / "docs/kernels.md"
PART = "kernel-reports"

LAYOUT = PageLayout(layers=32, kv_heads=8, head_dim=128, page_tokens=32, dtype=torch.bfloat16)
"""The shape of common models of 7 to 9 billion parameters."""

HEADS = 32
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_DIVISIBLE = [["tt.divisibility", 16]]


@attrs.frozen
class Report:
    """What one kernel takes on one target.

    registers: of one thread (vector registers on AMD); spilled: bytes of stack on NVIDIA, spilled
    vector registers on AMD; shared_bytes: of one program.
    """

    kernel: str
    target: str
    registers: int
    spilled: int
    shared_bytes: int

    def line(self) -> str:
        """The row of the table."""
        numbers = f"{self.registers} | {self.spilled} | {self.shared_bytes:,}"
        return f"| {self.kernel} | {self.target} | {numbers} |"


def launches(layout: PageLayout = LAYOUT, heads: int = HEADS) -> dict[str, Launch]:
    """Every kernel in every variant that the operations launch, over tiny operands."""
    # The smallest memory with all layers would be large; the kernels' constants are the same.
    one = dataclasses.replace(layout, layers=1)
    memory, staging = PageMemory.allocate(one, 32), PageMemory.allocate(one, 1)
    table = PageTables.of([list(range(32))], [[1] * 32], tokens=[1024], rows=[512])
    labels = PageLabels.of([0], [1], positions=[0], filled=[32])
    flags = new_flags(1, torch.device("cpu"))
    queries = torch.zeros((1, heads, one.head_dim), dtype=one.dtype)
    keys = torch.zeros((16, one.kv_heads, one.head_dim), dtype=one.dtype)
    digests = torch.zeros((1, 1), dtype=torch.int64)
    targets = (labels.pages, labels.tags)
    step = LayerStep(memory, 0, table, flags)
    attend, join = triton_ops.plan_decode(step, queries, queries)
    found = {
        "decode attention, split": attend,
        "decode attention, join": join,
        "prefill attention": triton_ops.plan_prefill(step, queries, queries),
        "write": triton_ops.plan_write(step, keys, keys),
        "check": triton_ops.plan_check(memory, labels, flags),
        "digest": triton_ops.plan_digest(memory, labels, flags, digests),
    }
    for name, sealed in (("pack", False), ("unpack", True)):
        found[name] = triton_ops.plan_copy(
            memory, staging, labels, flags, digests, targets=targets, sealed=sealed
        )
    return found


def compiled(launch: Launch, target: GPUTarget) -> Any:
    """The kernel compiled for a target, specialised as a launch with these arguments would be."""
    names = launch.kernel.arg_names
    signature: dict[str, str] = dict.fromkeys(names, "constexpr")
    hints: dict[tuple[int], list[list[Any]]] = {}
    for index, value in enumerate(launch.arguments):
        if isinstance(value, torch.Tensor):
            signature[names[index]] = "*" + _TYPES[value.dtype]
            hints[index,] = _DIVISIBLE
        elif isinstance(value, float):
            signature[names[index]] = "fp32"
        elif value != 1:
            signature[names[index]] = "i32"
            if value % 16 == 0:
                hints[index,] = _DIVISIBLE
    # As at a launch, an argument of 1 becomes a constant.
    constants: dict[tuple[int], Any] = {
        (index,): value
        for index, value in enumerate(launch.arguments)
        if isinstance(value, int) and value == 1
    }
    constants[names.index("shape"),] = launch.shape
    source = ASTSource(launch.kernel, signature, constants, hints)
    return triton.compile(source, target=target, options={"num_warps": launch.warps})


def report(kernel: str, target: str, built: Any) -> Report:
    """What a compiled kernel takes, read from its binary or its assembly."""
    shared = int(built.metadata.shared)
    if "cubin" in built.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            program = triton.knobs.nvidia.cuobjdump.path
            usage = subprocess.run(
                [program, "-res-usage", file.name], check=True, capture_output=True, text=True
            ).stdout
        return Report(kernel, target, _number(r"REG:(\d+)", usage), _stack(usage), shared)
    text = built.asm["amdgcn"]
    registers = _number(r"\.vgpr_count:\s+(\d+)", text)
    return Report(kernel, target, registers, _number(r"\.vgpr_spill_count:\s+(\d+)", text), shared)


def table() -> str:
    """The whole table, in Markdown; what is being compiled is told on stderr."""
    lines = [
        "| kernel | target | registers | spilled | shared bytes |",
        "|---|---|---|---|---|",
    ]
    for kernel, launch in launches().items():
        for name, target in TARGETS.items():
            print(f"{kernel} for {name}", file=sys.stderr)
            lines.append(report(kernel, name, compiled(launch, target)).line())
    return "\n".join(lines)


def kept_lines(document: str) -> list[str]:
    """The lines between the marks in the document."""
    _, _, rest = document.partition(generate_docs.begin(PART))
    kept, _, _ = rest.partition(generate_docs.end(PART))
    return kept.strip().splitlines()


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise LookupError(f"{pattern} is not in the compiler's report")
    return int(found[1])


def _stack(usage: str) -> int:
    return _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)


if __name__ == "__main__":
    DOCUMENT.write_text(generate_docs.filled(DOCUMENT.read_text(), {PART: table}))
