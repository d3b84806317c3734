"""Bad bytes, messages and JSON, made of good ones by a seeded chance."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

EIGHT_GIB = 8 << 30
EDGES = (0, 1, 2, 127, 128, 65_535, 2**31 - 1, 2**31, 2**32 - 1)
"""Numbers of four bytes."""

_WORDS = (
    "",
    "x",
    "decode",
    "float32",
    "unix:/tmp/x",
    "127.0.0.1:1",
    "a:99999",
    "\0",
    "ü" * 200,
    "00" * 16,
    "zz" * 16,
    "x" * 5000,
)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))


def spoil_bytes(chance: random.Random, good: bytes) -> bytes:
    """Something else than ``good``, which has at least one byte: noise, cut, lengthened, flipped, overwritten, or with a part
    twice, gone, or in another place."""
    while True:
        at, to = sorted(chance.randrange(len(good) + 1) for _ in range(2))
        match chance.randrange(8):
            case 0:
                bad = chance.randbytes(chance.choice((0, 1, 10, 52, 300, 5000)))
            case 1:
                bad = good[:at]
            case 2:
                bad = good + chance.randbytes(chance.choice((1, 10, 5000)))
            case 3:
                flipped = bytearray(good)
                flipped[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
                bad = bytes(flipped)
            case 4:
                bad = good[:at] + chance.randbytes(to - at) + good[to:]
            case 5:
                bad = good[:to] + good[at:]
            case 6:
                bad = good[:at] + good[to:]
            case _:
                bad = good[to:] + good[at:to] + good[:at]
        if bad != good:
            return bad


_DRAW: dict[int, Callable[[random.Random], Any]] = {
    FieldDescriptor.TYPE_BOOL: lambda chance: chance.random() < 0.5,
    FieldDescriptor.TYPE_DOUBLE: lambda chance: chance.choice(_FLOATS),
    FieldDescriptor.TYPE_FLOAT: lambda chance: chance.choice((0.0, -1.0, 1e30, float("inf"), float("nan"))),
    FieldDescriptor.TYPE_ENUM: lambda chance: chance.choice((0, 1, 2, 3, 77, -1, 2**31 - 1)),
    FieldDescriptor.TYPE_STRING: lambda chance: chance.choice(_WORDS),
    FieldDescriptor.TYPE_BYTES: lambda chance: chance.randbytes(chance.choice((0, 1, 32, 1025, 100_000))),
    FieldDescriptor.TYPE_UINT32: lambda chance: chance.choice(EDGES),
    FieldDescriptor.TYPE_UINT64: lambda chance: chance.choice((*EDGES, EIGHT_GIB, 2**64 - 1)),
}


def spoil_message(chance: random.Random, message: Message) -> None:
    """Change one field of the message, at whatever depth, to whatever its type allows."""
    field: Any = chance.choice(list(message.DESCRIPTOR.fields))
    inner = field.message_type
    if chance.random() < 0.15:
        message.ClearField(field.name)
    elif inner is not None and inner.GetOptions().map_entry:
        key, value = (_DRAW[each.type](chance) for each in inner.fields)
        getattr(message, field.name)[key] = value
    elif inner is not None and field.is_repeated:
        items = getattr(message, field.name)
        spoil_message(chance, chance.choice(items) if items and chance.random() < 0.5 else items.add())
    elif inner is not None:
        spoil_message(chance, getattr(message, field.name))
    elif field.is_repeated:
        getattr(message, field.name).extend(_DRAW[field.type](chance) for _ in range(chance.choice((1, 1, 3, 700))))
    else:
        setattr(message, field.name, _DRAW[field.type](chance))


def draw_json(chance: random.Random, depth: int = 0) -> Any:
    """Any value, mostly small."""
    if depth < 4 and chance.random() < 0.3:
        items = [draw_json(chance, depth + 1) for _ in range(chance.randrange(4))]
        return items if chance.random() < 0.5 else {chance.choice((*_WORDS[:5], "prompt", "role")): item for item in items}
    return chance.choice((None, True, False, 0, -1, 1.5, 2**64, -(10**45), 1e308, *_WORDS, "\ud800", chance.randrange(300)))


def spoil_json(chance: random.Random, good: dict[str, Any]) -> bytes:
    """A body with some values replaced, mostly still JSON."""
    body = dict(good)
    for _ in range(chance.randrange(1, 4)):
        body[chance.choice(list(body))] = draw_json(chance)
    text = json.dumps(body).encode()
    return spoil_bytes(chance, text) if chance.random() < 0.3 else text
