"""Every guard is removed in turn, by itself; something must notice.

Owns: what counts as a guard, how one is taken out, and who looks.
Must not know: what any guard is for.

A guard of the rules is removed by its name. Whoever looks: the walk over all scenarios, and
a search over legal logs in which one entry is changed; there a second model has to object to what
the reducer without that guard lets in, and the whole reducer would not.

A guard of the decision code is an `if` that does nothing but leave: `return`, `continue`, `break`.
It is cut out of the syntax tree of its function, whose code is replaced in a process of its own.
Where nobody notices, the walk is asked whether it ever came there: in place of leaving the guard
then raises an error.

    python -m property_tests.guard_removal rules
    python -m property_tests.guard_removal code
"""

from __future__ import annotations

import ast
import importlib
import json
import multiprocessing
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import attrs

from engine.scenarios import SCENARIOS
from lifecycle.crossguards import CROSS_GUARDS
from lifecycle.guards import GUARDS, TABLE_PLACE
from property_tests.guard_survivors import RULES_BACKED_UP
from property_tests.mutants_base import hunt, mutant

ROOT = Path(__file__).resolve().parent.parent
CODE = (
    "engine.core",
    "engine.decode",
    "engine.judge",
    "engine.prefill",
    "engine.queue",
    "engine.scheduler",
    "engine.sequencer",
    "lifecycle.admission",
    "lifecycle.decide",
)
RULE_NAMES = (*(g.name for g in GUARDS), *(g.name for g in CROSS_GUARDS), TABLE_PLACE)
CPU_S_MAX = 20.0


def plain(*without: str) -> Any:
    """The product without guards of these names, as a mutant that no oracle was foretold for."""
    return mutant(
        "-".join(without) or "product",
        "",
        story="",
        guard=", ".join(without),
        rules="",
        oracles="",
        without=without,
    )


# --- guards of the decision code --------------------------------------------------------------


@attrs.frozen
class Site:
    """An `if` that leaves: where it is, and what it asks."""

    module: str
    function: str
    line: int
    test: str
    leaves: str

    @property
    def name(self) -> str:
        """A name that holds as long as the condition is written like this."""
        return f"{self.module}:{self.function}: if {self.test}: {self.leaves}"


def _is_guard(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and not node.orelse
        and len(node.body) == 1
        and isinstance(node.body[0], ast.Return | ast.Continue | ast.Break)
    )


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.FunctionDef):
                    yield f"{node.name}.{child.name}", child


def sites() -> list[Site]:
    """Every guard of the decision code, in the order of the source."""
    found = []
    for module in CODE:
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        for function, node in _functions(tree):
            for inner in ast.walk(node):
                if isinstance(inner, ast.If) and _is_guard(inner):
                    test, leaves = ast.unparse(inner.test), ast.unparse(inner.body[0])
                    found.append(Site(module, function, inner.lineno, test, leaves))
    return found


class _Cut(ast.NodeTransformer):
    def __init__(self, line: int, *, fires: bool) -> None:
        self.line = line
        self.fires = fires

    def visit_If(self, node: ast.If) -> ast.AST:
        if node.lineno != self.line or not _is_guard(node):
            return self.generic_visit(node)
        if not self.fires:
            return ast.copy_location(ast.Pass(), node)
        alarm = ast.parse("raise AssertionError('a guard fired')").body
        return ast.copy_location(ast.If(node.test, alarm, []), node)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def cut(site: Site, *, fires: bool = False) -> None:
    """Replace the function's code by one without the guard, in this process, for good.

    With `fires` it stays, and raises an error where it would have left.
    """
    path = ROOT / (site.module.replace(".", "/") + ".py")
    tree = ast.fix_missing_locations(
        _Cut(site.line, fires=fires).visit(ast.parse(path.read_text()))
    )
    fresh = compile(tree, str(path), "exec", dont_inherit=True)
    code = next(c for c in _codes(fresh) if c.co_qualname == site.function)
    target: Any = importlib.import_module(site.module)
    for part in site.function.split("."):
        target = vars(target)[part]
    target = getattr(target, "fget", None) or getattr(target, "__func__", target)
    assert isinstance(target, FunctionType)
    target.__code__ = code


def _walk_without(
    site: Site | None, name: str, *, cpu_s: float, runs: int, fires: bool, out: Any
) -> None:
    # Code without a guard may never return; processor time, so that a loaded machine is no reason.
    resource.setrlimit(resource.RLIMIT_CPU, (int(5 * cpu_s), int(5 * cpu_s) + 1))
    if site is not None:
        cut(site, fires=fires)
    try:
        crippled = plain(*([name] if name else []))
        result = hunt(crippled, runs=runs, cpu_s_max=cpu_s, scenarios=SCENARIOS)
        trace = result.outcome.trace
        found = "" if trace is None else f"{trace.found.name} ({trace.rule})"
    except Exception as error:  # noqa: BLE001 - whatever a crippled core raises was noticed
        found = type(error).__name__
    out.put(found)


def walk_without(
    site: Site | None = None,
    name: str = "",
    *,
    cpu_s: float = CPU_S_MAX,
    runs: int = 5_000,
    fires: bool = False,
) -> str:
    """What the walk finds in a process of its own; empty when nothing.

    With `fires` nothing is removed: it finds out whether it comes to where that guard leaves.
    """
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    settings = {"cpu_s": cpu_s, "runs": runs, "fires": fires, "out": out}
    child = context.Process(target=_walk_without, args=(site, name), kwargs=settings)
    child.start()
    child.join()
    if child.exitcode == -signal.SIGXCPU:
        return "never returns"
    return out.get() if child.exitcode == 0 else f"exit {child.exitcode}"


def main(arguments: list[str]) -> int:
    """Print one JSON object a guard: its name, and what the search made of its removal."""
    if arguments[:1] == ["rules"]:
        from property_tests.changed_logs import caught_by_changes

        by_changes = caught_by_changes(RULES_BACKED_UP)
        for name in RULE_NAMES:
            row = {"guard": name, "changes": by_changes.get((name,), ""), "walk": ""}
            if not row["changes"]:
                row["walk"] = walk_without(name=name)
            if name in RULES_BACKED_UP:
                row["with"] = ", ".join(RULES_BACKED_UP[name])
                row["together"] = by_changes.get((name, *RULES_BACKED_UP[name]), "")
            print(json.dumps(row), flush=True)
        return 0
    total: Counter[str] = Counter()
    for site in sites():
        found = walk_without(site)
        fate = "caught" if found else "missed" if walk_without(site, fires=True) else "unreached"
        total[fate] += 1
        print(json.dumps({"guard": site.name, "walk": found, "fate": fate}), flush=True)
    print(json.dumps(total))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
