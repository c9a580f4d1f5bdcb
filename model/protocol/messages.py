"""What goes over the wire between two engines, and its encoding. Decides nothing about when.

A frame is two bytes (version, kind) and a msgpack array of the fields in order. Every message names the incarnation of
its writer (``src``) and the one it is meant for (``dst``; 0: not yet known), so that nothing said to a dead process is
heard by its successor. ``attempt`` numbers registrations per link (one receiving rank to one sending rank) and
incarnation, from 1. Names of memory (``memory``) are handles: the connector puts descriptors of segments or block lists
there, the simulator what it likes.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from pushkv.model.protocol.errors import MessageError

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 1 << 20
"""A direct registration of 100,000 blocks stays below this; a frame above it is refused before it is parsed."""

GAVE_WAY: Final = "gave way"
"""The one reason of ``Failed`` that is no failure: the sender gives the memory back for a finished prefill (rule 8)."""

FORGOTTEN: Final = "forgotten"
"""Reason of ``Failed`` for a registration that counts as seen, and of which no more is known."""

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Incarnation = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Reason = Annotated[str, msgspec.Meta(max_length=64)]
MAX_OPEN: Final = 8192
"""Registrations that one beat may name."""

Attempts = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_OPEN)]


class Message(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Common to all: who speaks, and to whom."""

    src: Incarnation
    dst: Incarnation


class Hello(Message, frozen=True, gc=False, array_like=True):
    """First word to a peer, and the question that proves who answers at its endpoint now.

    ``floor``: the reader's registrations up to it count as seen by the writer, who has none of them open; it numbers on
    from there. ``facts``: layouts, layer names, abilities.
    """

    number: Number
    floor: Number = 0
    facts: Annotated[bytes, msgspec.Meta(max_length=1 << 19)] = b""


class Welcome(Message, frozen=True, gc=False, array_like=True):
    """Answer to ``Hello`` number ``echo``: connected. ``refusal`` is empty, or says why no transfer is possible, naming
    both sides' values.
    """

    echo: Number
    floor: Number = 0
    facts: Annotated[bytes, msgspec.Meta(max_length=1 << 19)] = b""
    refusal: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class Register(Message, frozen=True, gc=False, array_like=True):
    """Receiver to sender: I want the last ``tokens`` tokens of ``transfer_id``.

    ``fanout`` is how many receiving ranks this sending rank serves for it; ``lowest`` the lowest attempt still open.
    ``memory`` is ``None`` when the destination is granted later.
    """

    attempt: Number
    transfer_id: Name
    tokens: Number
    fanout: Number
    packed: bool
    lowest: Number
    memory: Any = None


class Grant(Message, frozen=True, gc=False, array_like=True):
    """Receiver to sender: here you may write."""

    attempt: Number
    memory: Any


class Cancel(Message, frozen=True, gc=False, array_like=True):
    """Receiver to sender: stop, and say when nobody writes any more. ``requeue``: I shall register it again."""

    attempt: Number
    transfer_id: Name
    requeue: bool = False


class Offer(Message, frozen=True, gc=False, array_like=True):
    """Sender to receiver: the prefill has begun (``finished``: ended) and I have no memory to write to."""

    attempt: Number
    tokens: Number
    finished: bool


class Written(Message, frozen=True, gc=False, array_like=True):
    """Sender to receiver, after the bytes are remotely complete: part ``part`` of ``tokens`` tokens; ``last`` closes
    the count.
    """

    attempt: Number
    part: Number
    tokens: Number
    last: bool


class Failed(Message, frozen=True, gc=False, array_like=True):
    """Sender to receiver: it will not come, and no handle of it is active (evidence E1)."""

    attempt: Number
    reason: Reason


class Cancelled(Message, frozen=True, gc=False, array_like=True):
    """Sender to receiver: stopped as asked, no handle active; or never seen, and refused from now on (E1, E4)."""

    attempt: Number


ASK_REGISTERED: Final = 0
ASK_OFFERED: Final = 1
ASK_GRANTED: Final = 2
ASK_CANCELLED: Final = 3
ASK_REQUEUE: Final = 4
"""Stages of a registration as ``Ask`` tells them; the last is a cancel that gives way."""


class Ask(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One open registration as its receiver sees it: ``stage`` is one of ``ASK_*``."""

    attempt: Number
    stage: Annotated[int, msgspec.Meta(ge=0, le=4)]
    parts: Number


class Beat(Message, frozen=True, gc=False, array_like=True):
    """Both ways, cumulative. ``number`` > 0 asks for an answer; ``echo`` > 0 is one.

    ``highest`` and ``lowest``: last registration issued and lowest one open; ``open``: all that are open; ``missing``:
    registrations or grants in the beat that this one answers which have not arrived here.
    """

    number: Number
    echo: Number
    highest: Number
    lowest: Number
    open: Annotated[tuple[Ask, ...], msgspec.Meta(max_length=MAX_OPEN)] = ()
    missing: Attempts = ()


KINDS: Final[tuple[type[Message], ...]] = (
    Hello,
    Welcome,
    Register,
    Grant,
    Cancel,
    Offer,
    Written,
    Failed,
    Cancelled,
    Beat,
)
_NUMBER_OF: Final = {kind: number for number, kind in enumerate(KINDS)}
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final = tuple(msgspec.msgpack.Decoder(kind) for kind in KINDS)


def encode(message: Message) -> bytes:
    """The frame of ``message``. Raises ``MessageError('oversized')`` above ``MAX_FRAME_BYTES``."""
    frame = bytes((VERSION, _NUMBER_OF[type(message)])) + _ENCODER.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageError("oversized", f"{type(message).__name__} of {len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes) -> Message:
    """The message in ``frame``; for any other bytes ``MessageError`` and nothing else."""
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageError("oversized", f"{len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    if len(frame) < 2:
        raise MessageError("truncated", f"{len(frame)} bytes")
    if frame[0] != VERSION:
        raise MessageError("version", f"{frame[0]}, this side speaks {VERSION}")
    if frame[1] >= len(KINDS):
        raise MessageError("unknown", f"kind {frame[1]}")
    try:
        return _DECODERS[frame[1]].decode(memoryview(frame)[2:])
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        raise MessageError("malformed", f"{KINDS[frame[1]].__name__}: {error}") from None
