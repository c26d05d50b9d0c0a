"""Well-formed messages without sense, drawn from a schema by a seed.

Owns: drawing.
Must not know: what a message means.
"""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS = (0, 1, 2, 3, 7, 64, 65, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
DEPTH_MAX = 5


class Drawer:
    """Fills messages; `words` are strings that mean something to the receiver."""

    def __init__(self, seed: int, words: tuple[str, ...]) -> None:
        self._source = random.Random(seed)
        self._words = (*words, "", "nobody", "é" * 40, "x" * 3000)

    def fill(self, message: Message, *, depth: int = 0) -> None:
        """Set about two in three fields, of a oneof at most one."""
        source = self._source
        left = {oneof.name for oneof in message.DESCRIPTOR.oneofs}
        fields: list[Any] = list(message.DESCRIPTOR.fields)
        source.shuffle(fields)
        for field in fields:
            oneof = field.containing_oneof
            if oneof is not None and oneof.name not in left:
                continue
            if oneof is None and source.random() < 0.3:
                continue
            if oneof is not None:
                left.discard(oneof.name)
            self._set(message, field, depth)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        count = self._source.choice((0, 1, 1, 2, 3)) if field.is_repeated else 1
        for _ in range(count):
            if field.message_type is not None:
                if depth == DEPTH_MAX:
                    return
                value = getattr(message, field.name)
                inner = value.add() if field.is_repeated else value
                inner.SetInParent()
                self.fill(inner, depth=depth + 1)
            elif field.is_repeated:
                getattr(message, field.name).append(self._value(field))
            else:
                setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        source = self._source
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                word = source.choice(self._words)
                return word.encode() if field.type == FieldDescriptor.TYPE_BYTES else word
            case FieldDescriptor.CPPTYPE_BOOL:
                return source.random() < 0.5
            case FieldDescriptor.CPPTYPE_DOUBLE:
                return source.choice((0.0, -1.0, 1e300, float("nan"), float("inf")))
            case FieldDescriptor.CPPTYPE_ENUM:
                assert field.enum_type is not None
                return source.choice((*field.enum_type.values_by_number, 99))
            case FieldDescriptor.CPPTYPE_UINT32:
                return source.choice([n for n in NUMBERS if n < 1 << 32])
            case _:
                return source.choice(NUMBERS)
