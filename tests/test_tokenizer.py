"""Text becomes transformers' tokens, and tokens become text without half characters or stops."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine.model_config import ModelFileError
from engine.tokenizer import (
    ChatTemplateError,
    Detokenizer,
    InvalidText,
    StopMatcher,
    Tokenizer,
    UnknownToken,
    byte_level_tokenizer,
    load_tokenizer,
)
from tests.tiny import MERGES, SPECIAL, tiny_llama, tiny_tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


TINY = Tokenizer(
    tokenizers.Tokenizer.from_str(
        byte_level_tokenizer(
            tokens=tiny_tokens(), merges=MERGES, special=SPECIAL, digits_alone=True
        )
    )
)


def texts_of(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def byte_fallback_tokenizer() -> Tokenizer:
    """A vocabulary in the manner of SentencePiece: pieces with ▁, and single bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁cat", "s", "▁"]
    backend = tokenizers.Tokenizer(models.BPE(dict(zip(pieces, range(260 + 1), strict=True)), []))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", left=1, right=0),
        ]
    )
    return Tokenizer(backend)


def test_ids_and_chat_equal_those_of_transformers(directory: Path, tokenizer: Tokenizer) -> None:
    """Plain prompts and chats give the ids that transformers gives."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for text in ("", "in the water 1234", "日本 🎈 é", "<|im_start|>x<|im_end|>", "a\r\n\t b"):
        assert tokenizer.encode(text) == theirs.encode(text)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  in <b> & 'the'"},
    ]
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat(messages) == prompt
    assert tokenizer.encode_chat(messages) == theirs.encode(prompt, add_special_tokens=False)


def test_a_template_that_refuses_is_a_typed_error(tokenizer: Tokenizer) -> None:
    """The template's own refusal and its absence reach the caller as one class with a reason."""
    with pytest.raises(ChatTemplateError, match="unknown role tool"):
        tokenizer.apply_chat([{"role": "tool", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="content"):
        tokenizer.apply_chat([{"role": "user"}])
    with pytest.raises(ChatTemplateError, match="the model has none"):
        TINY.apply_chat([])
    assert tokenizer.has_chat_template
    assert not TINY.has_chat_template


def test_a_template_cannot_leave_its_sandbox(directory: Path) -> None:
    """A hostile template gets neither attributes of objects nor endless ranges."""
    hostile = ("{{ ''.__class__.__mro__ }}", "{{ range(10**9) | list }}", "{{ 1 // 0 }}")
    for template in hostile:
        evil = Tokenizer(TINY._backend, chat_template=template)
        with pytest.raises(ChatTemplateError):
            evil.apply_chat([])


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    """A list of named templates and a chat_template.jinja beside it are both read; bad ones fail."""
    directory = tiny_llama(tmp_path / "tiny")
    described = {
        "chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ bos_token }}{{ messages | tojson }}"},
        ],
        "bos_token": {"content": "<|im_start|>"},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    loaded = load_tokenizer(directory)
    assert loaded.apply_chat([{"role": "<é>"}]) == '<|im_start|>[{"role": "<é>"}]'
    (directory / "chat_template.jinja").write_text("from a file")
    assert load_tokenizer(directory).apply_chat([]) == "from a file"
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelFileError, match="chat template"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        load_tokenizer(directory)


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    """Truncation and padding that a tokenizer.json carries from its training are switched off."""
    directory = tiny_llama(tmp_path / "tiny")
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(directory / "tokenizer.json"))
    assert len(load_tokenizer(directory).encode("abcdefgh")) == 8


def test_fingerprints_tell_tokenizers_apart(directory: Path, tokenizer: Tokenizer) -> None:
    """Equal files have equal fingerprints; another template or vocabulary has another."""
    assert load_tokenizer(directory).fingerprint == tokenizer.fingerprint
    assert (
        len({tokenizer.fingerprint, TINY.fingerprint, byte_fallback_tokenizer().fingerprint}) == 3
    )


def test_bad_input_is_a_typed_error(tokenizer: Tokenizer) -> None:
    """Text without a UTF-8 form and ids outside the vocabulary name what is wrong."""
    with pytest.raises(InvalidText) as text:
        tokenizer.encode("ab\udc80")
    assert text.value.index == 2
    for token in (-1, tokenizer.vocabulary, 1 << 40):
        for call in (Detokenizer(tokenizer).push, lambda token: tokenizer.decode([token])):
            with pytest.raises(UnknownToken) as unknown:
                call(token)
            assert (unknown.value.token, unknown.value.vocabulary) == (token, 264)


def test_a_beginning_token_is_put_before_plain_prompts_only() -> None:
    """Where the model asks for it; the chat template writes its own."""
    source = byte_level_tokenizer(
        tokens=tiny_tokens(), merges=MERGES, special=SPECIAL, digits_alone=True, first=SPECIAL[1]
    )
    begun = Tokenizer(tokenizers.Tokenizer.from_str(source))
    assert begun.encode("in") == [1, *begun.encode("in", add_special_tokens=False)]


@given(st.text())
@example("🎈")
@example("in the\x00é")
def test_text_survives_token_by_token(text: str) -> None:
    """Pushing the tokens of any text gives the text, in pieces that are whole characters."""
    tokens = TINY.encode(text)
    if set(tokens) & TINY.special_tokens:
        return
    pieces = texts_of(TINY, tokens)
    assert "".join(pieces) == text
    for piece in pieces:
        piece.encode()


@given(st.lists(st.integers(0, 263)))
@example([3 + 188 + 3, 100])
def test_any_tokens_give_the_text_of_the_whole(tokens: list[int]) -> None:
    """Even bytes that are no UTF-8 come out as in a decode of all tokens at once."""
    assert "".join(texts_of(TINY, tokens)) == TINY.decode(tokens)


def test_a_character_waits_for_its_last_byte() -> None:
    """Nothing of a character leaves before it is whole, and a cut one leaves as U+FFFD."""
    tokens = TINY.encode("🎈")
    assert len(tokens) == 4
    assert texts_of(TINY, tokens) == ["", "", "", "🎈", ""]
    assert texts_of(TINY, tokens[:3]) == ["", "", "", "\ufffd"]
    for cut in (tokens[:3], tokens):
        fallback = byte_fallback_tokenizer()
        ids = [1 + byte for byte in "🎈".encode()[: len(cut)]]
        pieces = texts_of(fallback, ids)
        assert "".join(pieces) == fallback.decode(ids)
        assert pieces[:3] == ["", "", ""]


def test_pieces_with_spaces_join_as_in_the_whole() -> None:
    """A vocabulary that marks spaces by ▁ keeps those between words and drops the first."""
    fallback = byte_fallback_tokenizer()
    ids = [257, 258, 259, 257, *(1 + byte for byte in "é✓".encode()), 260, 259]
    assert "".join(texts_of(fallback, ids)) == fallback.decode(ids) == "the cats theé✓ s"


def test_special_tokens_are_not_shown() -> None:
    """Neither in the middle of a character's bytes nor alone."""
    first, *others = TINY.encode("🎈")
    assert "".join(texts_of(TINY, [0, first, 1, *others, 2])) == "🎈"


def matched(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """What a client sees of `pieces`, and the stop string that ended them."""
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        result = matcher.push(piece)
        shown += result.text
        if result.stopped:
            return shown, result.stop
    return shown + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stop"),
    [
        (["\n\n"], "one\n\ntwo", "one", "\n\n"),
        (["END"], "the E is no EN", "the E is no EN", None),
        (["aab"], "aaab", "a", "aab"),
        (["bcd", "c"], "abcd", "ab", "c"),
        (["c", "abc"], "xabc", "x", "abc"),
        ([], "anything", "anything", None),
    ],
)
def test_stop_strings_across_any_cut(
    stops: list[str], text: str, shown: str, stop: str | None
) -> None:
    """The result is that of the whole text, however it is cut."""
    for cut in range(len(text) + 1):
        assert matched(stops, [text[:cut], text[cut:]]) == (shown, stop)
    assert matched(stops, list(text)) == (shown, stop)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.text("abc", max_size=20),
    st.integers(0, 1 << 32),
)
def test_how_text_is_cut_never_matters(stops: list[str], text: str, seed: int) -> None:
    """Random cuts agree with single characters, and no stop string is ever shown."""
    generator = random.Random(seed)
    cuts = sorted(generator.randint(0, len(text)) for _ in range(4))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, stop = matched(stops, pieces)
    assert (shown, stop) == matched(stops, list(text))
    assert not any(string in shown for string in stops)
    assert stop is not None or shown == text


def test_text_is_held_back_only_while_it_must_be() -> None:
    """Only the possible beginning of a stop string waits, and nothing follows a stop."""
    matcher = StopMatcher(["STOP"])
    assert matcher.push("go ST").text == "go "
    assert matcher.push("AY").text == "STAY"
    assert matcher.push(" STO").text == " "
    result = matcher.push("P it")
    assert (result.text, result.stop, result.stopped) == ("", "STOP", True)
    assert matcher.push("more").text == ""
    assert matcher.push("more").stop == "STOP"
    assert matcher.flush() == ""
