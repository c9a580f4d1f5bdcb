"""The hand-over protocol, sans I/O: what two engines say to each other, and what each may do when.

Theory of operation. Every rank of an engine has an :class:`Endpoint`; every engine has one :class:`Ledger` beside its
scheduler. A host feeds events (``pushkv.model.protocol.events``) with the present time and carries out the actions that
come back. Nobody here reads a clock, opens a socket or starts a thread, so the connector and the simulator run the same
code, and a run can be repeated step by step.

Push, packed: D's ledger gets ``Arrived`` and has its ranks register (``Register``); P's ranks learn of the prompt by
``Begin``; when both have met, P offers, D's ledger grants landing memory (``Grant``), P packs what is computed into
staging (``Pack``), posts it (``Post``) and says ``Written`` once the bytes are there; when every part of every shard on
every rank has landed, D's ledger says ``Ready``. Push, direct: the same, but memory is D's KV blocks, from the start
(admit early) or after the offer (``Admit``, late). Pull: the halves change places. P's ``Receiver`` exposes the source,
D's ``Sender`` reads it, and ``Written`` means that it has been read.

Read ``states`` for the rules, then ``events``, ``messages``, ``sender``, ``receiver``, ``peer``, ``endpoint`` and
``ledger``.
"""

from pushkv.model.protocol.endpoint import Endpoint
from pushkv.model.protocol.errors import LocalProtocolError, MessageError
from pushkv.model.protocol.ledger import Ledger
from pushkv.model.protocol.messages import GAVE_WAY, decode, encode
from pushkv.model.protocol.peer import Peer
from pushkv.model.protocol.receiver import Receiver
from pushkv.model.protocol.sender import Sender
from pushkv.model.protocol.settings import Settings

__all__ = [
    "GAVE_WAY",
    "Endpoint",
    "Ledger",
    "LocalProtocolError",
    "MessageError",
    "Peer",
    "Receiver",
    "Sender",
    "Settings",
    "decode",
    "encode",
]
