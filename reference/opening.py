"""Puts an engine together: a rank with its memory, transport and side channel, and the office over its ranks.

Decides what depends on the settings and on nothing that happens later.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from pushkv.model.layout import Layout, LayoutError, Part, count_spans, pair
from pushkv.model.protocol import Settings
from pushkv.reference import evidence, grants, mailbox
from pushkv.reference.device_copies import DeviceCopier, copier
from pushkv.reference.facts import Arrival, Facts, Landing, Region
from pushkv.reference.office import Office
from pushkv.reference.pools import SegmentPool
from pushkv.reference.ports import EngineSetup, RankCard
from pushkv.reference.rank import Rank
from pushkv.reference.side_channel import SideChannel
from pushkv.reference.trace import RecordLog, Trace
from pushkv.reference.transport import Transport, agent_name

log = logging.getLogger(__name__)


def open_rank(setup: EngineSetup, rank: int, layout: Layout, regions: Sequence[Any]) -> Rank:
    """Rank ``rank`` with its threads running. ``regions``: flat uint8 tensors, one per region of ``layout``; the
    settings say how much landing and staging memory there is.

    Raises what its parts raise: ``TransportError``, ``SideChannelError``, ``PoolError``, ``SecretError``.
    """
    settings = setup.settings
    protocol = settings.protocol
    segment = settings.segment_bytes
    device = regions[0].device
    sys.setswitchinterval(min(sys.getswitchinterval(), settings.switch_s))
    staging = SegmentPool(_segments(settings.staging_bytes, segment, setup.send), segment, device)
    landing = SegmentPool(_segments(settings.landing_bytes, segment, setup.receive), segment, device)
    incarnation = secrets.randbits(62) | 1
    channel = SideChannel((setup.engine_id, rank), setup.host, setup.port + rank, settings.secret)
    transport = Transport(agent_name(setup.engine_id, rank, incarnation), settings.backend)
    transport.register([*regions, staging.tensor, landing.tensor])
    number = int(landing.tensor.get_device()) if landing.tensor.is_cuda else 0
    facts = Facts(
        engine_id=setup.engine_id,
        rank=rank,
        tp_size=setup.tp_size,
        dp_rank=setup.dp_rank,
        model=setup.model,
        dtype=setup.dtype,
        block_tokens=setup.block_tokens,
        mode="push",
        role="both" if setup.send and setup.receive else "prefill" if setup.send else "decode",
        backend=settings.backend,
        arrival=cast(Arrival, transport.arrival),
        layout=layout,
        agent=transport.metadata,
        landing=Landing(landing.base, segment, landing.count, number),
        regions=tuple(
            Region(int(tensor.data_ptr()), size, number) for tensor, size in zip(regions, layout.regions, strict=True)
        ),
        vllm=setup.vllm_version,
        process=evidence.here(setup.host, setup.port + rank),
    )
    door = mailbox.Door() if setup.tp_size > 1 or setup.apart else None
    own = "" if door is None else f".{rank}"  # the office in another process has files of its own
    trace = None
    if settings.trace:
        trace = Trace(settings.trace + own, protocol, setup.tp_size, {rank: incarnation}, setup.engine_id)
    gathers = copier(regions, staging.tensor, segment, _stream(device), _stream(device))
    scatters = copier(regions, landing.tensor, segment, _stream(device))
    if isinstance(gathers, DeviceCopier) and isinstance(
        scatters, DeviceCopier
    ):  # compiled before the first prompt comes
        gathers.warm(gather=True)
        scatters.warm(gather=False)
    made = Rank(
        facts,
        protocol,
        channel=channel,
        transport=transport,
        staging=(staging, gathers),
        landing=scatters,
        evidence=evidence.Evidence(),
        trace=trace,
        door=door,
        log=RecordLog(settings.records + own) if settings.records else None,
        incarnation=incarnation,
    )
    made.card = RankCard(
        rank=rank,
        landing_bytes=landing.count * segment,
        staging_bytes=staging.count * segment,
        bytes_per_token=grants.token_bytes(layout),
        bytes_per_request=grants.request_bytes(layout),
        pieces_per_block=_pieces(layout, setup.block_tokens),
        device=device.type,
        door=door.address if door is not None else "",
    )
    if door is not None:
        made.start()
    return made


def _stream(device: Any) -> Any:
    """A stream of its own, of high priority: copies do not queue behind the engine's next step."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.Stream(device, priority=-1)


def _pieces(layout: Layout, tokens: int) -> int:
    """Of one block, when it is sent as it lies to a cache of the same layout."""
    try:
        return count_spans(pair([layout], [layout])[0], Part.whole(0, tokens))
    except LayoutError:
        return len(layout.regions)


def _segments(size: int | None, segment: int, used: bool) -> int:
    return max(1, (size or 0) // segment) if used else 1


def open_office(setup: EngineSetup, cards: Sequence[RankCard], local: Rank | None) -> Office:
    """The office over the ranks of ``cards``. ``local``: the only rank, in this process; it begins to run."""
    settings = setup.settings
    landing = min(card.landing_bytes for card in cards)
    protocol = settings.with_memory(landing, min(card.staging_bytes for card in cards)).protocol
    card = max(cards, key=lambda card: card.bytes_per_token)

    def needed(tokens: int, links: int) -> int:
        return tokens * card.bytes_per_token + card.bytes_per_request + grants.ALIGN * links

    def costs_less(tokens: int) -> bool:
        blocks = -(-tokens // setup.block_tokens)
        costs = settings.path_costs(card.device, needed(tokens, 1), blocks * card.pieces_per_block)
        return costs.packed

    def make(deliver: Any, wake: Any, stop: Any) -> Office:
        return Office(
            protocol,
            len(cards),
            path=settings.path,
            packed_costs_less=costs_less,
            segment_bytes=settings.segment_bytes,
            token_bytes=card.bytes_per_token,
            landing_bytes=needed,
            deliver=deliver,
            wake=wake,
            stop=stop,
        )

    if local is None:
        return _beside(setup, protocol, cards, make)
    office = make(lambda rank, command: local.receive(command), local.wake, local.stop)
    office.trace = local.trace
    local.office = office
    local.start()
    return office


def _beside(setup: EngineSetup, protocol: Settings, cards: Sequence[RankCard], make: Callable[..., Office]) -> Office:
    """The office on a thread of its own, its ranks in other processes, each with a trace of its own."""
    path = setup.settings.trace
    trace = Trace(path, protocol, len(cards), {}, setup.engine_id) if path else None

    def traced(**hands: Any) -> Office:
        office = make(**hands)
        office.trace = trace
        return office

    return mailbox.Desk([card.door for card in cards], traced).office
