"""Bad inputs made of good ones: of bytes, of JSON, and of protobuf's messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.message import DecodeError, Message

Mutate = Callable[[bytes, Random], bytes]

NUMBERS = (
    0, 1, 2, 3, 7, 8, 64, 127, 255, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
    (1 << 60) - 1, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30, -1, -2, -8,
    -(1 << 31), -(1 << 63),
)  # fmt: skip
TEXTS = (
    "", " ", ".", "..", "/", "../x", "/etc/passwd", "a/b", "\0", "\x1b[31m", "\x9b31m", "\u202e",
    "\ud800",
    "<script>", "=1+1", "%s", "{0}", "$(x)", "w", "w.scale", "int4", "float32", "x" * 300, "-", "*",
    "re:(", "re:.*", "[", "none", "true", "1e999", "nan", "-inf",
)  # fmt: skip


def of_bytes(data: bytes, rng: Random, words: Sequence[bytes] = ()) -> bytes:
    """A few bytes changed, put in, taken out, or written again elsewhere."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at, size = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 8, 64))
        end = min(at + size, len(changed))
        number = rng.choice(NUMBERS) % (1 << 64)
        new = [
            rng.randbytes(size), changed[at:end] * 2, b"", number.to_bytes(8, "little")[:size],
            str(number).encode(), rng.choice([*words, *(t.encode("utf-8",
            "replace") for t in TEXTS)]),
            bytes(byte ^ 1 << rng.randrange(8) for byte in changed[at:end]),
        ]  # fmt: skip
        changed[at : rng.choice((at, end))] = rng.choice(new)
        if rng.random() < 0.05:
            del changed[at:]
    return bytes(changed)


def of_json(data: bytes, rng: Random) -> bytes:
    """Values of a document replaced, left out, doubled or called otherwise."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return of_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(document))
        if not places or rng.random() < 0.02:
            document = _value(rng, places)
            continue
        _change(*rng.choice(places), rng, places)
    text = json.dumps(document).encode()
    return of_bytes(text, rng) if rng.random() < 0.1 else text


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        inside = waiting.pop()
        if isinstance(inside, dict | list):
            keys = list(inside) if isinstance(inside, dict) else range(len(inside))
            found += [(inside, key) for key in keys]
            waiting += [inside[key] for key in keys if isinstance(inside[key], dict | list)]
    return found


def _change(container: Any, key: Any, rng: Random, places: Sequence[tuple[Any, Any]]) -> None:
    if not (key in container if isinstance(container, dict) else key < len(container)):
        return  # taken out meanwhile
    action = rng.random()
    if action < 0.1:
        del container[key]
    elif action < 0.2 and isinstance(container, list):
        container.insert(key, container[key])
    elif action < 0.2:
        container[rng.choice((*TEXTS, *(str(k) for _, k in places)))] = container[key]
    else:
        container[key] = _value(rng, places)


def _value(rng: Random, places: Sequence[tuple[Any, Any]]) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(NUMBERS), lambda: rng.choice(TEXTS), lambda: rng.choice((True, False)),
        lambda: None, lambda: rng.choice(([], {}, [[]], [{}])), lambda: rng.choice(NUMBERS) / 3,
        lambda: [rng.choice(NUMBERS) for _ in range(rng.randrange(5))],
        lambda: json.loads("[" * 90 + "]" * 90), lambda: rng.choice((1e308, -1e-308, 0.5)),
        lambda: rng.choice((10**400, float("nan"), float("-inf"))),
    ]  # fmt: skip
    if places and rng.random() < 0.3:  # what stands elsewhere
        container, key = rng.choice(places)
        if key in container if isinstance(container, dict) else key < len(container):
            return json.loads(json.dumps(container[key]))
    return rng.choice(kinds)()


def of_message(kind: type[Message], data: bytes, rng: Random) -> bytes:
    """Fields of a message, or of one inside, set, cleared, or repeated."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return of_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        inside = [message, *_messages(message)]
        _change_field(rng.choice(inside), rng, inside)
    made: bytes = message.SerializeToString()
    return of_bytes(made, rng) if rng.random() < 0.1 else made


def _messages(message: Message) -> list[Message]:
    found: list[Message] = []
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                found += [inner, *_messages(inner)]
    return found


def _change_field(message: Message, rng: Random, others: Sequence[Message]) -> None:
    """One field: cleared or not, then given another value, or one more."""
    held = [field for field, _ in message.ListFields()]
    field = rng.choice(held if held and rng.random() < 0.7 else message.DESCRIPTOR.fields)
    if field.message_type is not None:
        alike = [m for m in others if m.DESCRIPTOR is field.message_type]
        found = getattr(message, field.name)
        if rng.random() < 0.2:
            message.ClearField(field.name)
        elif alike:
            copied = type(alike[0])()
            copied.CopyFrom(rng.choice(alike))
            (found.add() if field.is_repeated else found).CopyFrom(copied)
        return
    value = _scalar(field, rng, others)
    if not field.is_repeated:
        setattr(message, field.name, value)
        return
    values = list(getattr(message, field.name))
    if values and rng.random() < 0.7:
        values[rng.randrange(len(values))] = value
    else:
        values = rng.choice(([*values, value], values[1:], []))
    message.ClearField(field.name)
    getattr(message, field.name).extend(values)


def _scalar(field: Any, rng: Random, others: Sequence[Message]) -> Any:
    """A value of a field's type; of texts one that stands elsewhere, most of the time."""
    if field.type == field.TYPE_BYTES:
        return rng.randbytes(rng.randrange(9))
    if field.type == field.TYPE_STRING:
        named = [getattr(m, f, None) for m in others for f in ("name", "op_type")]
        texts = [text for text in named if text and isinstance(text, str)]
        text = rng.choice(texts if texts and rng.random() < 0.6 else TEXTS)
        return text.encode("utf-8", "replace").decode()
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
    if field.cpp_type == field.CPPTYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    bits = 31 if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 63
    low = 0 if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) else -(1 << bits)
    return rng.choice([*(n for n in NUMBERS if low <= n < 1 << bits), *range(30)])
