"""The serving engine: model, paged KV, prefill, decode and scheduler as classes that do no IO of their own."""
