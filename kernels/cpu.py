"""Whether compiled code for CPUs can be used here, and the way to it.

Owns: the late import, which takes most of a second and is not for those who never compute.
Must not know: what is compiled.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from torch import Tensor


@cache
def load_compiled() -> tuple[Any, str | None]:
    """The module of compiled functions, or nothing and why it cannot be had."""
    try:
        return importlib.import_module("kernels.cpu_entry"), None
    except ImportError as error:
        return None, f"{error.name or error} cannot be imported"


def compiled_code(*tensors: Tensor) -> Any:
    """The compiled functions if all tensors lie in a CPU's memory and the compiler is there."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    return load_compiled()[0]
