"""The verbs that measure: `bench serve`, `bench kernels` and `bench weights`.

Owns: how a report is printed.
Must not know: how anything is measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from transport.commands_shared import EXIT_FAILED, EXIT_OK, Json, UsageError, note, say, say_json
from transport.settings import DEFAULT_MODEL, flag_name

if TYPE_CHECKING:
    from transport.bench_stats import Figure, Report, Spread

bench_app = App(
    name="bench",
    help="Measure serving, kernels, weights and the reading of logs on this machine.",
    default_parameter=Parameter(name_transform=flag_name),
)


@bench_app.command(name="serve")
def bench_serve(
    *,
    model: str = str(DEFAULT_MODEL),
    prompt_tokens: int = 512,
    new_tokens: int = 64,
    batch: int = 8,
    runs: int = 3,
    peer: str = "transformers",
    threads: int = 2,
    kv_memory: str = "1GiB",
    weights: str = "float",
    seed: int = 0,
    only: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    json: Json = False,
) -> int:
    """Start what is needed and measure it in turn with what it is compared to.

    Ends with exit code 1 when a figure misses its target; the report is complete all the same.

    Parameters
    ----------
    model
        Model: a GGUF file, or a local directory in Hugging Face's format.
    prompt_tokens
        Length of a prompt.
    new_tokens
        Length of an answer.
    batch
        Streams at once where throughput of a batch is measured.
    runs
        Rounds, each of ours and the other side.
    peer
        What to compare with: transformers or none.
    threads
        Threads of the peer, and of each engine.
    kv_memory
        KV pool of each engine.
    weights
        Weights of our engines, float or int8; the peer always computes in float32.
    seed
        Prompts are a function of it.
    only
        Measure to run; may be repeated.
    json
        Print the report as JSON.
    """
    from transport.bench import run_bench
    from transport.bench_context import BenchSettings, UnknownMeasure

    settings = BenchSettings(
        model=model,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        batch=batch,
        runs=runs,
        peer=peer,
        threads=threads,
        kv_memory=kv_memory,
        weights=weights,
        seed=seed,
        only=only,
    )
    try:
        report = run_bench(settings, progress=lambda text: note(f"bench: {text}"))
    except UnknownMeasure as error:
        raise UsageError(str(error)) from error
    return _tell(report, json=json)


@bench_app.command(name="kernels")
def bench_kernels(
    *,
    model: str = str(DEFAULT_MODEL),
    threads: int = 2,
    runs: int = 3,
    figure_seconds: float = 20.0,
    json: Json = False,
) -> int:
    """Measure the decode step, its attention and its checks beside plain torch and the memory.

    Says on standard error what it measures and has found; minutes on a quiet machine.
    Ends with exit code 1 when a figure misses its target; the report is complete all the same.

    Parameters
    ----------
    model
        Model: a GGUF file, or a local directory in Hugging Face's format.
    threads
        Threads of both sides.
    runs
        Rounds, each of ours and the other side.
    figure_seconds
        Time after which no further calls are made for a figure, beyond one a round.
    json
        Print the report as JSON.
    """
    # As engines do: OpenMP threads that spin make plain torch hundreds of times slower beside a
    # busy process, and the measure endless.  The variable is read once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from transport.bench_kernels import KernelSettings, run_kernels

    if threads < 1 or runs < 1:
        raise UsageError(f"threads is {threads} and runs is {runs}; both must be at least 1")
    if not 0 < figure_seconds < float("inf"):
        raise UsageError(f"figure-seconds is {figure_seconds}; it must be above 0")
    settings = KernelSettings(
        model=model, threads=threads, runs=runs, figure_seconds=figure_seconds
    )
    return _tell(run_kernels(settings, progress=lambda text: note(f"bench: {text}")), json=json)


@bench_app.command(name="weights")
def bench_weights(
    *,
    model: str = str(DEFAULT_MODEL),
    threads: int = 2,
    text: Path | None = None,
    answers: Path | None = None,
    json: Json = False,
) -> int:
    """Measure how far int8 weights move a model's answers from those of its own weights.

    Ends with exit code 1 when a figure misses its target; the report is complete all the same.

    Parameters
    ----------
    model
        Model: a GGUF file, or a local directory in Hugging Face's format.
    threads
        Threads that compute.
    text
        Text to compare over (UTF-8); a page of prose that comes with the program if absent.
    answers
        Recorded greedy answers, a JSON list of objects with the token ids `prompt` and `tokens`,
        whose prompts are asked; pieces of the text if absent.
    json
        Print the report as JSON.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `bench kernels`
    from transport.bench_weights import UnusableText, WeightSettings, run_weights

    if threads < 1:
        raise UsageError(f"threads is {threads}; it must be at least 1")
    settings = WeightSettings(model=model, threads=threads, text=text, answers=answers)
    try:
        report = run_weights(settings, progress=lambda text: note(f"bench: {text}"))
    except UnusableText as error:
        raise UsageError(str(error)) from error
    return _tell(report, json=json)


def _tell(report: Report, *, json: bool) -> int:
    if json:
        say_json(report.to_object())
    else:
        for line in report_lines(report):
            say(line)
    return EXIT_FAILED if any(figure.met is False for figure in report.figures) else EXIT_OK


def report_lines(report: Report) -> Iterator[str]:
    """The report as lines of text."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    yield f"{report.date} on {machine}"
    yield f"with {versions}"
    for figure in report.figures:
        yield from _figure_lines(figure)


def _figure_lines(figure: Figure) -> Iterator[str]:
    from transport.bench_stats import Spread

    yield ""
    yield f"{figure.name}: {figure.says}"
    ours = Spread.of(figure.ours)
    yield f"  ours   {_spread(ours)} {figure.unit}"
    if figure.theirs:
        yield f"  peer   {_spread(Spread.of(figure.theirs))} {figure.unit} ({figure.peer})"
        yield f"  ratio  {_spread(Spread.of(figure.ratios))}"
    if figure.target is not None:
        bound = "at least" if figure.target.better == "higher" else "at most"
        yield f"  target {bound} {figure.target.value:g}: {'met' if figure.met else 'missed'}"
    for name, value in figure.notes.items():
        yield f"  {name} = {value}"


def _spread(spread: Spread) -> str:
    return f"{spread.median:.4g} ({spread.low:.4g} to {spread.high:.4g})"
