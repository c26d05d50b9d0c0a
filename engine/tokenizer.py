"""Text to tokens and back: plain prompts and chats.

Owns the vocabulary and the chat template.
It must not know the weights, requests or the network.
`Tokenizer` is shared and immutable; what belongs to one request is in `engine.detokenizer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from engine.detokenizer import Detokenizer, StopMatcher, StopResult
from engine.model_config import ModelFileError
from engine.weights import Progress, read_json, resolve_model

__all__ = [
    "ChatTemplateError",
    "Detokenizer",
    "InvalidText",
    "StopMatcher",
    "StopResult",
    "TextError",
    "Tokenizer",
    "UnknownToken",
    "byte_level_tokenizer",
    "load_tokenizer",
]


class TextError(Exception):
    """The caller's text or tokens cannot be used. Catch this to refuse the request."""


class InvalidText(TextError):
    """Text that has no UTF-8 form (it holds a lone surrogate at `index`)."""

    def __init__(self, *, index: int) -> None:
        super().__init__(f"the text is not valid Unicode at character {index}")
        self.index = index


class UnknownToken(TextError):
    """A token id that the vocabulary does not have."""

    def __init__(self, *, token: int, vocabulary: int) -> None:
        super().__init__(f"token {token} is not in the vocabulary of {vocabulary}")
        self.token = token
        self.vocabulary = vocabulary


class ChatTemplateError(TextError):
    """The model has no chat template, or its template refuses these messages."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(f"chat template: {reason}")
        self.reason = reason


class Tokenizer:
    """A model's vocabulary and chat template. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        bos_text: str | None = None,
        eos_text: str | None = None,
    ) -> None:
        # A tokenizer.json may carry the truncation of its training; a prompt is never cut silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._template_values = {"bos_token": bos_text or "", "eos_token": eos_text or ""}
        self._template = None if chat_template is None else _compiled(chat_template)
        self.vocabulary = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_tokens = frozenset(token for token, it in added.items() if it.special)
        self.byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits over vocabulary, merges, special tokens and chat template."""
        described = [self._backend.to_str(), self._chat_template, self._template_values]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidText.

        Special tokens spelt out in the text become themselves, as chat templates need.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidText(index=error.start) from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for `messages` ({"role", "content"} each), open for the assistant's turn.

        Raises ChatTemplateError. The template is the model's and runs in a sandbox.
        """
        if self._template is None:
            raise ChatTemplateError(reason="the model has none")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **self._template_values,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatTemplateError(reason=str(error)) from error

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat. The template itself writes the special tokens that it wants."""
        return self.encode(self.apply_chat(messages), add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` without special ones. Raises UnknownToken."""
        for token in tokens:
            self.token_text(token)
        return self._backend.decode(list(tokens), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """The vocabulary's own spelling of a token. Raises UnknownToken."""
        text = self._backend.id_to_token(token) if 0 <= token < self.vocabulary else None
        if text is None:
            raise UnknownToken(token=token, vocabulary=self.vocabulary)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary. Raises UnknownToken."""
        text = self.token_text(token)
        table = _byte_of_character()
        try:
            return bytes([table[character] for character in text])
        except KeyError:
            # A token added after training is spelt as itself.
            return text.encode()


def load_tokenizer(
    source: str | Path, *, cache: Path | None = None, progress: Progress | None = None
) -> Tokenizer:
    """The tokenizer of a model named as for `engine.weights.load_model`. Raises ModelError."""
    directory = resolve_model(source, cache=cache, progress=progress)
    path = directory / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise ModelFileError(path=path, reason=str(error)) from error
    config_path = directory / "tokenizer_config.json"
    described = read_json(config_path) if config_path.is_file() else {}
    template_path = directory / "chat_template.jinja"
    template = (
        template_path.read_text(encoding="utf-8")
        if template_path.is_file()
        else _default_template(described.get("chat_template"))
    )
    try:
        return Tokenizer(
            backend,
            chat_template=template,
            bos_text=_special_text(described.get("bos_token")),
            eos_text=_special_text(described.get("eos_token")),
        )
    except jinja2.TemplateError as error:
        raise ModelFileError(path=config_path, reason=f"chat template: {error}") from error


def byte_level_tokenizer(
    *,
    tokens: Sequence[str],
    merges: Sequence[tuple[str, ...]],
    special: Sequence[str],
    digits_alone: bool,
    first: str | None = None,
) -> str:
    """`tokenizer.json` of a byte-level BPE; a token's id is its place in `tokens`.

    `first`, when given, is the special token put before every plain prompt.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if digits_alone
        else byte_level
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    if first is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, vocabulary[first])]
        )
    return backend.to_str()


def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    # HTML escapes, which jinja's own filter writes, have no place in a prompt.
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _default_template(described: Any) -> str | None:
    if isinstance(described, list):
        named = {it.get("name"): it.get("template") for it in described if isinstance(it, dict)}
        described = named.get("default")
    return described if isinstance(described, str) else None


def _special_text(described: Any) -> str | None:
    if isinstance(described, dict):
        described = described.get("content")
    return described if isinstance(described, str) else None


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The printable stand-ins of a byte-level vocabulary: bytes that print stand for themselves,
    the others for the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table |= {chr(0x100 + offset): byte for offset, byte in enumerate(others)}
    return table
