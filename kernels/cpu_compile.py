"""How this package's compiled code is declared, with its types kept for readers and checkers.

Owns: the compiler's options.
Must not know: what is compiled.

A function marked `compiled` runs without the interpreter's lock and is never called by Python;
one marked `entry` is, and its machine code is kept on disk beside the source or, where that
cannot be written, in the user's cache. `CAN_BE_KEPT` says whether there is such a place.

Kept code is found by the source of the entry's own module and by what its closure holds, not by
what it calls: so an entry closes over the `edition` of every module that it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit
from numba.extending import intrinsic as _intrinsic

F = TypeVar("F", bound=Callable[..., Any])

CAN_BE_KEPT: bool


def compiled(function: F) -> F:
    """Compile into its callers; a division by zero gives what the hardware gives."""
    return cast("F", njit(nogil=True, error_model="numpy")(function))


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that says of which type it is and writes its own instructions."""
    return _intrinsic(function)


def entry(function: F) -> F:
    """Compile for Python to call, and keep the machine code from one process to the next."""
    if CAN_BE_KEPT:
        return cast("F", njit(nogil=True, cache=True, error_model="numpy")(function))
    return cast("F", njit(nogil=True, error_model="numpy")(function))


def _can_be_kept() -> bool:
    def nothing() -> None:
        """Stands for any function of this package."""

    try:
        njit(cache=True)(nothing)
    except RuntimeError:
        # No directory can be written, neither this one nor the user's.
        return False
    return True


CAN_BE_KEPT = _can_be_kept()


def edition(*modules: object) -> int:
    """A number of 61 bits that changes with the code and the constants of modules."""
    parts: list[bytes] = []
    for module in modules:
        for name, value in sorted(vars(module).items()):
            function = getattr(value, "py_func", value)
            function = getattr(function, "_defn", function)
            code = getattr(function, "__code__", None)
            if code is not None and function.__module__ == vars(module)["__name__"]:
                parts += _code_parts(code)
            elif isinstance(value, (int, float, str, tuple)) and not name.startswith("__"):
                parts.append(f"{name}={value!r}".encode())
    return int.from_bytes(b"\0".join(parts), "little") % ((1 << 61) - 1)


def _code_parts(code: Any) -> list[bytes]:
    parts = [code.co_code, repr(code.co_names).encode(), repr(code.co_freevars).encode()]
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            parts += _code_parts(constant)
        else:
            parts.append(repr(constant).encode())
    return parts
