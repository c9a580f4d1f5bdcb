"""Control messages between the ranks of different engines, over ZMQ.

Decides who may speak (holders of the shared secret; without one, this machine), where a peer is reached, and how much a
peer that does not listen may cost. Does not decide what is said, nor whether it arrives: a frame may be dropped, and
the protocol says it again.

Every rank listens on one ROUTER and opens one DEALER per peer that it addresses first. A message is two frames: the
head (version, for whom, from whom) and the protocol's frame. A DEALER's routing id follows from the two links, so the
ROUTER answers whoever was admitted as that link last, and keeps nothing once the connection is gone. Somebody who is
addressed by another's name says so with an empty frame: a process that answers at an endpoint at which another has
answered before has taken its place (evidence E2, see ``replaced``).

Sockets are bounded whatever names and addresses the requests hold: by the peers in use that were heard, ``IDLE`` and
``SILENT``. What is remembered of a peer is its address; a peer with which nothing is open (``trim``), or that was never
heard, gives its socket up for others, and the next frame to it opens another.

Memory: per link at most ``HIGH_WATER`` frames of up to ``SMALL_BYTES`` and ``WINDOW_BYTES`` of larger ones wait for a
peer that does not read. Whoever holds the secret is trusted not to exhaust memory on purpose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import zmq
import zmq.utils.monitor

from pushkv.model.protocol.events import Link
from pushkv.model.protocol.messages import MAX_FRAME_BYTES
from pushkv.reference import addresses, envelope
from pushkv.reference.envelope import SideChannelError
from pushkv.reference.keys import Keys, derive

HIGH_WATER: Final = 512
SMALL_BYTES: Final = 1 << 16
WINDOW_BYTES: Final = 1 << 24
BATCH: Final = 128
"""Messages that one ``receive`` takes from one socket: a flood from one peer does not starve the others."""

IDLE: Final = 64
"""Sockets to peers that were heard and with whom nothing is open: they need not be connected anew."""
SILENT: Final = 64
"""Sockets to peers that have not been heard: whoever is there does so within milliseconds, and is asked again."""
ADDRESSES: Final = 4096
"""Addresses without a socket that are remembered."""

_OWING: Final = 4096
_SEALED: Final = 64  # what encryption adds to a frame, rounded up
_ZAP: Final = "inproc://zeromq.zap.01"
_FAILED: Final = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH


class _Peer:
    """A link that this side opened, and its socket. ``answered``: its own process has spoken there. ``heard``: or at
    our ROUTER, where both sides have opened the link.
    """

    __slots__ = ("answered", "dealer", "head", "heard", "link")

    def __init__(self, link: Link, head: bytes, dealer: zmq.Socket[bytes]) -> None:
        self.link, self.head, self.dealer = link, head, dealer
        self.answered = self.heard = False


class SideChannel:
    """One rank's side channel. To be used from one thread, which may be another than the one that made it.

    ``me``: this rank's link; ``host`` and ``port``: where it listens (port 0: any, see ``port``). Raises
    ``SideChannelError`` when that is impossible, and ``keys.SecretError`` for a useless secret.
    """

    def __init__(
        self, me: Link, host: str, port: int, secret: str | None, *, reconnect_s: float = 0.05, silent_s: float = 15.0
    ) -> None:
        self.me = me
        self.counters: dict[str, int] = {}
        self._keys: Keys | None = None if secret is None else derive(secret)
        self._reconnect_ms, self._silent_ms = max(1, round(reconnect_s * 1000)), max(3, round(silent_s * 1000))
        envelope.head(me, me)  # refuses a name that cannot be sent
        address = addresses.listening(host, secured=secret is not None)
        self._addresses: OrderedDict[Link, str] = OrderedDict()  # this and the next: opened last comes last
        self._peers: OrderedDict[Link, _Peer] = OrderedDict()
        self._silent: OrderedDict[Link, None] = OrderedDict()
        self._by_socket: dict[zmq.Socket[bytes], _Peer] = {}
        self._owing: OrderedDict[Link, int] = OrderedDict()
        self._replaced: list[Link] = []
        # A name that resolves slowly stalls the thread that connects; it must not stall the one that listens.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self.poller = zmq.Poller()
        """Knows all sockets, at any time; its user may add descriptors of its own."""
        self._zap: zmq.Socket[bytes] | None = None
        try:
            self._router = self._listen(address, port)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SideChannelError(f"the side channel cannot listen on {host} port {port}: {error}") from None
        self._monitor = self._router.get_monitor_socket(int(_FAILED))
        self.poller.register(self._monitor, zmq.POLLIN)
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rsplit(":", 1)[1])

    def _listen(self, address: str, port: int) -> zmq.Socket[bytes]:
        if self._keys is not None:
            self._zap = self._context.socket(zmq.ROUTER)
            self._zap.set(zmq.LINGER, 0)
            self._zap.bind(_ZAP)
            self.poller.register(self._zap, zmq.POLLIN)
        router = self._socket(zmq.ROUTER)
        self.poller.register(router, zmq.POLLIN)
        router.set(zmq.AFFINITY, 1)
        router.set(zmq.ROUTER_HANDOVER, 1)
        router.set(zmq.ROUTER_MANDATORY, 1)  # a send that reaches nobody is told
        if self._keys is not None:
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_SECRETKEY, self._keys.server.secret)
            router.set(zmq.ZAP_DOMAIN, b"pushkv")
            router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.set(zmq.IPV6, int(":" in address))
        router.bind(addresses.endpoint(address, port))
        return router

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _SEALED)
        made.set(zmq.SNDHWM, HIGH_WATER)
        made.set(zmq.RCVHWM, HIGH_WATER)
        made.set(zmq.RECONNECT_IVL, self._reconnect_ms)
        made.set(zmq.RECONNECT_IVL_MAX, 20 * self._reconnect_ms)
        made.set(zmq.HANDSHAKE_IVL, self._silent_ms)
        made.set(zmq.HEARTBEAT_IVL, self._silent_ms // 3)
        made.set(zmq.HEARTBEAT_TIMEOUT, self._silent_ms)
        made.set(zmq.TCP_KEEPALIVE, 1)
        made.set(zmq.TCP_KEEPALIVE_IDLE, 15)
        made.set(zmq.TCP_KEEPALIVE_INTVL, 5)
        made.set(zmq.TCP_KEEPALIVE_CNT, 3)
        return made

    # ------------------------------------------------------------ links

    def open(self, link: Link, host: str, port: int) -> str:
        """``link`` listens on ``host`` and ``port`` (an address is better than a name). Answers ``""``, or a sentence
        that says why it cannot be reached there; never raises, as the address may be a peer's word.
        """
        if not addresses.is_address(host) or not 0 < port < 1 << 16:
            return self._unreachable(f"{host[:64]!r} port {port} is not an address")
        if self._keys is None and not addresses.is_loopback(host):
            return self._unreachable(f"{host!r} is not loopback, and without a shared secret nothing else is reached")
        endpoint = addresses.endpoint(host, port)
        try:
            if link not in self._peers or self._addresses.get(link) != endpoint:
                self._connect(link, endpoint)
        except (zmq.ZMQError, ValueError) as error:
            return self._unreachable(f"{link[0]!r} rank {link[1]} cannot be reached at {host} port {port}: {error}")
        self._addresses[link] = endpoint
        for kept in (self._addresses, self._peers):
            kept.move_to_end(link)
        if len(self._addresses) > ADDRESSES + len(self._peers):
            del self._addresses[next(one for one in self._addresses if one not in self._peers)]
        return ""

    def _connect(self, link: Link, endpoint: str) -> _Peer:
        """Raises ``ZMQError`` or ``ValueError``; then the socket that ``link`` has is kept."""
        head = envelope.head(link, self.me)
        dealer = self._socket(zmq.DEALER)
        try:
            dealer.set(zmq.AFFINITY, 2)
            dealer.set(zmq.ROUTING_ID, envelope.routing_id(link, self.me))
            dealer.set(zmq.IPV6, int("[" in endpoint))
            if self._keys is not None:
                dealer.set(zmq.CURVE_SERVERKEY, self._keys.server.public)
                dealer.set(zmq.CURVE_PUBLICKEY, self._keys.client.public)
                dealer.set(zmq.CURVE_SECRETKEY, self._keys.client.secret)
            dealer.connect(endpoint)
        except (zmq.ZMQError, ValueError):
            dealer.close()
            raise
        self.close_link(link)
        while len(self._silent) >= SILENT:
            self.close_link(next(iter(self._silent)))
        peer = self._peers[link] = self._by_socket[dealer] = _Peer(link, head, dealer)
        self._silent[link] = None
        self.poller.register(dealer, zmq.POLLIN)
        return peer

    def close_link(self, link: Link) -> None:
        """Close the socket to ``link``; what is still to be sent is dropped."""
        self._owing.pop(link, None)
        self._silent.pop(link, None)
        peer = self._peers.pop(link, None)
        if peer is not None:
            del self._by_socket[peer.dealer]
            self.poller.unregister(peer.dealer)
            peer.dealer.close()

    def trim(self, open_on: Callable[[Link], bool]) -> None:
        """Close the sockets of links on which nothing is open, but for the ``IDLE`` that were opened last of those that
        have been heard. To be called from time to time.
        """
        idle = [link for link in self._peers if not open_on(link)]
        kept = [link for link in idle if self._peers[link].heard][-IDLE:]
        for link in {*idle}.difference(kept):
            self.close_link(link)

    def replaced(self) -> list[Link]:
        """Links at whose endpoint another engine has answered since the last call, after the link's own process had
        answered there: that process is gone, if an endpoint is one process's own.
        """
        found, self._replaced = self._replaced, []
        return found

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for input now (``poller`` follows by itself)."""
        own = [self._router, self._monitor] if self._zap is None else [self._router, self._monitor, self._zap]
        return [*own, *self._by_socket]

    def close(self) -> None:
        """Close everything at once. Call it last: from then on a peer may take this process for gone."""
        self._peers.clear()
        self._by_socket.clear()
        self._router.disable_monitor()
        self._context.destroy(linger=0)

    # ------------------------------------------------------------ frames

    def send(self, link: Link, frame: bytes) -> bool:
        """Hand ``frame`` over to be sent; ``False``: dropped, and counted. Never blocks."""
        size = len(frame)
        if not 0 < size <= MAX_FRAME_BYTES:
            return self._drop("oversized_out")
        if size > SMALL_BYTES:
            owing = self._owing.get(link, 0) + size
            if owing > WINDOW_BYTES:
                return self._drop("full")
        peer = self._peers.get(link)
        try:
            if peer is None and (endpoint := self._addresses.get(link)) is not None:
                peer = self._connect(link, endpoint)
            if peer is not None:
                peer.dealer.send_multipart((peer.head, frame), zmq.DONTWAIT)
            else:
                route = envelope.routing_id(self.me, link)
                self._router.send_multipart((route, envelope.head(link, self.me), frame), zmq.DONTWAIT)
        except zmq.Again:
            return self._drop("full")
        except (zmq.ZMQError, ValueError):
            return self._drop("nobody")
        if size > SMALL_BYTES:
            self._owing[link] = owing
            if len(self._owing) > _OWING:
                self._owing.popitem(last=False)
        return True

    def receive(self) -> list[tuple[Link, bytes]]:
        """The frames that have come, at most ``BATCH`` per socket, in their order per link."""
        found: list[tuple[Link, bytes]] = []
        for ready, _ in self.poller.poll(0):
            if ready is self._router:
                self._take(self._router, None, found)
            elif ready is self._zap:
                self._admit(self._zap)
            elif ready is self._monitor:
                self._watch()
            elif (peer := self._by_socket.get(ready)) is not None:
                self._take(peer.dealer, peer, found)
        return found

    def _take(self, source: zmq.Socket[bytes], peer: _Peer | None, found: list[tuple[Link, bytes]]) -> None:
        for _ in range(BATCH):
            try:
                parts = source.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if peer is None:
                self._from_router(parts, found)
            else:
                self._from_dealer(peer, parts, found)

    def _from_router(self, parts: list[bytes], found: list[tuple[Link, bytes]]) -> None:
        opened = self._unpack(parts[1:])
        if opened is None:
            return
        to, link, frame = opened
        if parts[0] != envelope.routing_id(to, link):
            self._drop("misnamed")
        elif not frame:
            self._drop("malformed")
        elif to != self.me:
            self._drop("misaddressed")
            try:
                self._router.send_multipart((parts[0], envelope.head(link, self.me), b""), zmq.DONTWAIT)
            except zmq.ZMQError:
                self._drop("nobody")
        else:
            if link in self._silent:
                self._hears(self._peers[link])
            self._owing.pop(link, None)
            found.append((link, frame))

    def _hears(self, peer: _Peer) -> None:
        peer.heard = True
        self._silent.pop(peer.link, None)

    def _from_dealer(self, peer: _Peer, parts: list[bytes], found: list[tuple[Link, bytes]]) -> None:
        opened = self._unpack(parts)
        if opened is None:
            return
        to, link, frame = opened
        if to != self.me:
            self._drop("misaddressed")
        elif link != peer.link:
            self._drop("stranger")
            if peer.answered:
                peer.answered = peer.heard = False
                self._silent[peer.link] = None
                self._replaced.append(peer.link)
        elif not frame:
            self._drop("malformed")
        else:
            if not peer.answered:
                peer.answered = True
                self._hears(peer)
            self._owing.pop(link, None)
            found.append((link, frame))

    def _unpack(self, parts: list[bytes]) -> tuple[Link, Link, bytes] | None:
        """(for whom, from whom, frame) of any message, or ``None``."""
        if len(parts) != 2:
            self._drop("malformed")
        elif len(parts[1]) > MAX_FRAME_BYTES:
            self._drop("oversized")
        elif parts[0][:1] != envelope.VERSION_BYTE:
            self._drop("version" if parts[0] else "malformed")
        else:
            links = envelope.links(parts[0])
            if links is not None:
                return *links, parts[1]
            self._drop("malformed")
        return None

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        """Answer what the ROUTER asks of its authenticator (ZMQ's RFC 27): only the derived client key comes in."""
        assert self._keys is not None
        for _ in range(BATCH):
            try:
                parts = zap.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(parts) < 8:
                self._drop("malformed")
                continue
            fits = parts[7] == b"CURVE" and parts[8:] == [self._keys.client.raw_public]
            if not fits:
                self._drop("denied")
            status = (b"200", b"OK") if fits else (b"400", b"not a holder of the shared secret")
            zap.send_multipart((*parts[:2], b"1.0", parts[3], *status, b"", b""))

    def _watch(self) -> None:
        """Handshakes that failed: peers with another secret, or none."""
        while self._monitor.poll(0):
            zmq.utils.monitor.recv_monitor_message(self._monitor)
            self._drop("handshake")

    def _drop(self, why: str) -> bool:
        self.counters[why] = self.counters.get(why, 0) + 1
        return False

    def _unreachable(self, sentence: str) -> str:
        self._drop("unreachable")
        return sentence
