"""The peer: Hugging Face transformers in a process of its own that answers one line with one line.

Owns: how transformers is loaded and run, and when its tokens came.
Must not know: anything of ours; it imports no other module of this project.

Run as `python -m transport.bench_transformers --model FILE --threads N`.
It lives as long as its standard input, so that runs can alternate with others' on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO


class _Clock:
    """A logits processor that changes nothing and notes when each step's logits were there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, _input_ids: Any, scores: Any) -> Any:
        """Called once for each forward pass, the prefill first."""
        self.times.append(time.perf_counter())
        return scores


def load(model: Path) -> Any:
    """The model in fp32 with transformers' own attention of choice."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    where: dict[str, Any] = (
        {"pretrained_model_name_or_path": model}
        if model.is_dir()
        else {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="sdpa"
    )
    return loaded.eval()


def generate(model: Any, *, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Greedy tokens after prompts of equal length, and the seconds from the call to each step."""
    import torch
    import transformers

    clock = _Clock()
    inputs = torch.tensor(prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            logits_processor=transformers.LogitsProcessorList([clock]),
        )
    return {
        "steps": [at - start for at in clock.times],
        "tokens": output[:, inputs.shape[1] :].tolist(),
    }


def versions() -> dict[str, str]:
    """What is compared with."""
    import torch
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__}


def answer_lines(model: Any, source: TextIO, answers: TextIO) -> None:
    """One JSON line in, one out, until the source ends."""
    for line in source:
        asked = json.loads(line)
        answer = generate(model, prompts=asked["prompts"], new_tokens=asked["new_tokens"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Load, say so, and answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    # Answers keep standard output to themselves; whatever a library prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(options.threads)
    model = load(options.model)
    answers.write(json.dumps({"event": "ready", "versions": versions()}) + "\n")
    answers.flush()
    answer_lines(model, sys.stdin, answers)


if __name__ == "__main__":
    main()
