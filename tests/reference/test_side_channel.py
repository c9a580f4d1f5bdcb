"""The side channel over real sockets, in one process and in two."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time

import pytest
import zmq

from pushkv.model.protocol.messages import MAX_FRAME_BYTES
from pushkv.reference import envelope, side_channel
from pushkv.reference.keys import SecretError, derive
from pushkv.reference.side_channel import SideChannel, SideChannelError

from .channels import OTHER_SECRET, SECRET, D, P, answers, channel, echo, gather, until

SECRETS = pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "loopback"])


@SECRETS
def test_there_and_back(secret: str | None) -> None:
    with channel(P, secret) as p, channel(D, secret) as d:
        assert d.open(P, "127.0.0.1", p.port) == ""
        assert d.send(P, b"hello")
        assert gather(p, 1, [d]) == [(D, b"hello")]
        assert p.send(D, b"welcome")
        assert gather(d, 1, [p]) == [(P, b"welcome")]
        assert p.counters == d.counters == {}


@SECRETS
def test_frames_of_any_size_in_order(secret: str | None) -> None:
    sizes = [1, 100, side_channel.SMALL_BYTES, side_channel.SMALL_BYTES + 1, MAX_FRAME_BYTES - 1, MAX_FRAME_BYTES, 7]
    frames = [bytes([n]) * size for n, size in enumerate(sizes)]
    with channel(P, secret) as p, channel(D, secret) as d:
        d.open(P, "127.0.0.1", p.port)
        assert all(d.send(P, frame) for frame in frames)
        assert gather(p, len(frames), [d]) == [(D, frame) for frame in frames]
        assert all(p.send(D, frame) for frame in frames)
        assert gather(d, len(frames), [p]) == [(P, frame) for frame in frames]


@SECRETS
def test_where_both_sides_open_a_link_their_sockets_last(secret: str | None) -> None:
    """Each hears the other at its ROUTER, and neither ever where it sends: they are no strangers all the same."""
    with channel(P, secret) as p, channel(D, secret) as d:
        assert d.open(P, "127.0.0.1", p.port) == p.open(D, "127.0.0.1", d.port) == ""
        for number in range(3):
            assert d.send(P, b"from d %d" % number)
            assert gather(p, 1, [d]) == [(D, b"from d %d" % number)]
            assert p.send(D, b"from p %d" % number)
            assert gather(d, 1, [p]) == [(P, b"from p %d" % number)]
            sockets = [one.sockets() for one in (p, d)]
            for one in (p, d):
                one.trim(lambda link: False)
            assert [one.sockets() for one in (p, d)] == sockets
            assert not p._silent and not d._silent


def test_a_frame_that_no_peer_would_take_is_not_sent() -> None:
    with channel(P) as p:
        assert not p.send(D, b"x" * (MAX_FRAME_BYTES + 1))
        assert not p.send(D, b"")
        assert p.counters == {"oversized_out": 2}


def test_nobody_of_that_name() -> None:
    with channel(P) as p:
        assert not p.send(D, b"x")
        assert not p.send(("", -1), b"x")
        assert p.counters == {"nobody": 2}


def test_ipv6() -> None:
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    p, d = SideChannel(P, "::1", 0, None), SideChannel(D, "::1", 0, SECRET)
    with channel(("E", 0), None) as e:
        e.open(P, "::1", p.port)
        e.send(P, b"x")
        assert gather(p, 1, [e]) == [(("E", 0), b"x")]
    p.close()
    d.close()


def test_two_links_to_one_process_and_many_ranks() -> None:
    with channel(P) as p, channel(D) as d, channel(("D", 2)) as other:
        for one in (d, other):
            one.open(P, "127.0.0.1", p.port)
            one.send(P, b"x")
        assert sorted(gather(p, 2, [d, other])) == [(D, b"x"), (("D", 2), b"x")]
        p.send(("D", 2), b"to 2")
        p.send(D, b"to 1")
        assert gather(d, 1, [p]) == [(P, b"to 1")]
        assert gather(other, 1, [p]) == [(P, b"to 2")]


# ---------------------------------------------------------------- who may speak


@pytest.mark.parametrize(("p_secret", "d_secret"), [(SECRET, OTHER_SECRET), (SECRET, None), (None, SECRET)])
def test_only_holders_of_the_secret_are_heard(p_secret: str | None, d_secret: str | None) -> None:
    with channel(P, p_secret) as p, channel(D, d_secret) as d, channel(("E", 0), p_secret) as e:
        for one in (d, e):
            one.open(P, "127.0.0.1", p.port)
            one.send(P, b"x")
        assert gather(p, 2, [d, e], patience_s=1.0) == [(("E", 0), b"x")]
        assert not p.send(D, b"to somebody who was not admitted")
        if p_secret and d_secret:
            assert until(lambda: p.counters.get("handshake", 0) > 0, [p, d])


def test_knowing_the_public_key_is_not_enough() -> None:
    """The server's public key alone, with a client pair that does not follow from the secret: denied."""
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    with channel(P) as p:
        thief = context.socket(zmq.DEALER)
        thief.curve_serverkey, thief.curve_publickey, thief.curve_secretkey = (
            derive(SECRET).server.public,
            public,
            secret,
        )
        thief.setsockopt(zmq.ROUTING_ID, envelope.routing_id(P, D))
        thief.connect(f"tcp://127.0.0.1:{p.port}")
        thief.send_multipart((envelope.head(P, D), b"x"))
        assert until(lambda: p.counters.get("denied", 0) > 0, [p])
        assert gather(p, 1, patience_s=0.3) == []
        context.destroy(linger=0)


def test_a_name_that_is_not_the_speakers() -> None:
    """A message under another link's name than the connection's is dropped."""
    context = zmq.Context()
    with channel(P, None) as p:
        liar = context.socket(zmq.DEALER)
        liar.setsockopt(zmq.ROUTING_ID, envelope.routing_id(P, ("E", 0)))
        liar.connect(f"tcp://127.0.0.1:{p.port}")
        liar.send_multipart((envelope.head(P, D), b"x"))
        assert until(lambda: p.counters == {"misnamed": 1}, [p])
        context.destroy(linger=0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*", "192.0.2.7"])
def test_without_a_secret_on_loopback_only(host: str) -> None:
    with pytest.raises(SideChannelError, match="no shared secret, so it listens on loopback only"):
        SideChannel(P, host, 0, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_loopback_needs_no_secret(host: str) -> None:
    SideChannel(P, host, 0, None).close()


def test_with_a_secret_anywhere() -> None:
    SideChannel(P, "0.0.0.0", 0, SECRET).close()


def test_a_short_secret_is_refused_and_not_shown() -> None:
    with pytest.raises(SecretError, match="has 7 bytes, at least 16") as caught:
        SideChannel(P, "127.0.0.1", 0, "hunter2")
    assert "hunter2" not in str(caught.value)
    assert SECRET not in repr(derive(SECRET)) and derive(SECRET).server.secret.decode() not in repr(derive(SECRET))


def test_keys_follow_from_the_secret_and_nothing_else() -> None:
    keys, other = derive(SECRET), derive(OTHER_SECRET)
    derive.cache_clear()
    assert derive(SECRET) == keys
    assert len({keys.server.public, keys.client.public, other.server.public, other.client.public}) == 4
    assert len(keys.client.raw_public) == 32


def test_an_address_that_is_taken() -> None:
    with channel(P) as p, pytest.raises(SideChannelError, match=f"cannot listen on 127.0.0.1 port {p.port}"):
        SideChannel(D, "127.0.0.1", p.port, SECRET)


@pytest.mark.parametrize("link", [("", 0), ("x" * 257, 0), ("P", -1), ("P", 1 << 16)])
def test_a_name_that_cannot_be_sent(link: tuple[str, int]) -> None:
    with pytest.raises(SideChannelError, match="engine id"):
        SideChannel(link, "127.0.0.1", 0, None)


@pytest.mark.parametrize(
    ("host", "port"),
    [("127.0.0.1", 0), ("127.0.0.1", 1 << 16), ("", 5), ("lo;127.0.0.1", 5), ("a b", 5), ("127.0.0.1/x", 5), ("\0", 5)],
)
def test_what_is_no_address_of_a_peer(host: str, port: int) -> None:
    with channel(P) as p:
        assert "is not an address" in p.open(D, host, port)
        assert "cannot be reached" in p.open(("", 0), "127.0.0.1", 5)
        assert p.counters == {"unreachable": 2}
        assert not p.send(D, b"x")


def test_without_a_secret_nobody_else_is_reached() -> None:
    with channel(P, None) as p:
        assert "without a shared secret" in p.open(D, "192.0.2.7", 5)


# ---------------------------------------------------------------- peers that come and go


@SECRETS
def test_killed_and_restarted_at_the_same_address(secret: str | None) -> None:
    with channel(D, secret) as d:
        with echo("P", secret=secret or "") as first:
            d.open(P, "127.0.0.1", first.port)
            assert answers(d, P, b"1")
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait()
            for _ in range(50):
                d.send(P, b"into the void")
        with echo("P", first.port, secret=secret or ""):
            assert answers(d, P, b"2")
        assert d.replaced() == []  # the same engine: the protocol sees by the incarnation that it is another process


def test_restarted_at_another_address() -> None:
    with channel(D) as d:
        with echo("P") as first:
            d.open(P, "127.0.0.1", first.port)
            assert answers(d, P, b"1")
        with echo("P") as second:
            d.open(P, "127.0.0.1", second.port)
            assert answers(d, P, b"2")
        assert len(d.sockets()) == 4


def test_another_engine_in_its_place_is_told_and_not_heard() -> None:
    with channel(D) as d:
        with echo("P") as first:
            d.open(P, "127.0.0.1", first.port)
            assert answers(d, P, b"1")
        with echo("Q", first.port):
            assert not answers(d, P, b"2", patience_s=1.0)
            assert d.counters["stranger"] >= 1
            assert d.replaced() == [P] and d.replaced() == []
            d.open(("Q", 0), "127.0.0.1", first.port)
            assert answers(d, ("Q", 0), b"3")
            for n in range(100):  # neither link to the one endpoint drives the other out
                assert d.send(P, b"x") and d.send(("Q", 0), b"%d" % n)
            assert gather(d, 100) == [(("Q", 0), b"%d" % n) for n in range(100)]


def test_a_wrong_address_proves_nothing() -> None:
    """P was never heard at this endpoint: that Q answers there says nothing about P."""
    with channel(D) as d, echo("Q") as q:
        d.open(P, "127.0.0.1", q.port)
        assert not answers(d, P, b"1", patience_s=1.0)
        assert d.counters["stranger"] >= 1
        assert d.replaced() == []


def test_the_last_to_be_admitted_is_answered() -> None:
    """D is killed and comes back: P's answers go to the new process, over the new connection."""
    with channel(P) as p, channel(D) as old:
        old.open(P, "127.0.0.1", p.port)
        old.send(P, b"old")
        assert gather(p, 1, [old]) == [(D, b"old")]
        with channel(D) as new:
            new.open(P, "127.0.0.1", p.port)
            new.send(P, b"new")
            assert gather(p, 1, [new]) == [(D, b"new")]
            assert p.send(D, b"answer")
            assert gather(new, 1, [p]) == [(P, b"answer")]
            assert old.receive() == []


def test_stopped_and_continued() -> None:
    with channel(D) as d, echo("P") as p:
        d.open(P, "127.0.0.1", p.port)
        assert answers(d, P, b"1")
        os.kill(p.process.pid, signal.SIGSTOP)
        big = b"x" * (1 << 19)
        sent = sum(d.send(P, big) for _ in range(1000)) + sum(d.send(P, b"small") for _ in range(5000))
        assert sent < side_channel.WINDOW_BYTES // len(big) + 5000
        assert d.counters["full"] > 900
        os.kill(p.process.pid, signal.SIGCONT)
        assert answers(d, P, b"2")
        assert d.send(P, big)


def test_a_stopped_peer_is_let_go_and_found_again() -> None:
    with channel(D, silent_s=0.6) as d, echo("P") as p:
        d.open(P, "127.0.0.1", p.port)
        assert answers(d, P, b"1")
        os.kill(p.process.pid, signal.SIGSTOP)
        time.sleep(1.5)  # longer than silent_s: the connection is given up
        os.kill(p.process.pid, signal.SIGCONT)
        assert answers(d, P, b"2")


def test_a_dead_peer_costs_bounded_memory() -> None:
    with socket.socket() as taken:  # nobody ever listens there
        taken.bind(("127.0.0.1", 0))
        with channel(D) as d:
            d.open(P, "127.0.0.1", taken.getsockname()[1])
            before = _resident_bytes()
            sent = sum(d.send(P, bytes(side_channel.SMALL_BYTES)) for _ in range(4000))
            sent += sum(d.send(P, bytes(MAX_FRAME_BYTES)) for _ in range(400))
            assert sent <= side_channel.HIGH_WATER + side_channel.WINDOW_BYTES // MAX_FRAME_BYTES
            assert _resident_bytes() - before < 100 << 20
            d.close_link(P)
            assert len(d.sockets()) == 3


def test_closing_and_opening_again() -> None:
    with channel(P) as p, channel(D) as d:
        for n in range(20):
            d.open(P, "127.0.0.1", p.port)
            assert answers_once(p, d, b"%d" % n)
            d.close_link(P)
            d.close_link(P)
        assert len(d.sockets()) == 3


@pytest.mark.parametrize("wanted", [False, True], ids=["idle", "open"])
def test_names_without_number_take_a_bounded_number_of_sockets(wanted: bool) -> None:
    """Whoever sends a request may name any engine at any address: nobody listens at one, somebody else at another."""
    first, later = ("first", 0), ("later", 0)
    known = len(os.listdir("/proc/self/fd"))
    with channel(D) as d, echo("first") as one, echo("later") as two, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        own = len(d.sockets())
        assert d.open(first, "127.0.0.1", one.port) == "" and answers(d, first, b"1")
        for n in range(3000):
            port = taken.getsockname()[1] if n % 2 else one.port
            assert d.open((f"any {n}", n % 8), "127.0.0.1", port) == ""
            d.send((f"any {n}", n % 8), b"hello")
            if n % 100 == 0:
                d.trim(lambda link: wanted)
                assert len(d.sockets()) <= own + side_channel.SILENT + 1
        for n in range(0, 3000, 10):  # the machines ask those again that have not answered
            d.send((f"any {n}", n % 8), b"hello")
        assert len(d.sockets()) <= own + side_channel.SILENT + 1
        assert until(lambda: len(os.listdir("/proc/self/fd")) < known + 2 * side_channel.SILENT + 50)
        assert answers(d, first, b"2")
        assert d.open(later, "127.0.0.1", two.port) == "" and answers(d, later, b"3")
        d.trim(lambda link: link == later)
        assert len(d.sockets()) == own + 2
        assert d.replaced() == []


def test_peers_with_whom_nothing_is_open_keep_some_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were named last; the others are connected anew when there is something to say, and are still heard."""
    monkeypatch.setattr(side_channel, "IDLE", 2)
    links = [(name, 0) for name in "ABCD"]
    with (
        channel(links[0]) as a,
        channel(links[1]) as b,
        channel(links[2]) as c,
        channel(links[3]) as e,
        channel(D) as d,
    ):
        peers = [a, b, c, e]
        own = len(d.sockets())
        for link, peer in zip(links, peers, strict=True):
            d.open(link, "127.0.0.1", peer.port)
            assert d.send(link, b"x") and gather(peer, 1, [d]) == [(D, b"x")]
            assert peer.send(D, b"y") and gather(d, 1) == [(link, b"y")]
        d.open(links[0], "127.0.0.1", a.port)
        d.trim(lambda link: link == links[1])
        assert len(d.sockets()) == own + 3
        d.trim(lambda link: False)
        assert len(d.sockets()) == own + 2
        assert not b.send(D, b"z") or until(lambda: not b.send(D, b"z"), [b])
        for link, peer in zip(links, peers, strict=True):
            assert d.send(link, b"again") and (D, b"again") in gather(peer, 1, [d])


def test_addresses_of_nobody_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "ADDRESSES", 8)
    with channel(P) as p, channel(D) as d:
        d.open(P, "127.0.0.1", p.port)
        assert answers_once(p, d, b"1")
        p.send(D, b"2")
        assert gather(d, 1) == [(P, b"2")]
        for n in range(100):
            d.open((f"any {n}", 0), "127.0.0.1", 9)
            d.close_link((f"any {n}", 0))
        assert not d.send(("any 0", 0), b"x") and d.counters == {"nobody": 1}
        assert answers_once(p, d, b"3")


def answers_once(p: SideChannel, d: SideChannel, word: bytes) -> bool:
    d.send(P, word)
    return (D, word) in gather(p, 1, [d])


def test_churn_leaves_nothing_behind() -> None:
    """Short-lived peers that are answered: neither descriptors nor memory grow with their number."""
    with channel(P) as p:
        levels = []
        for round_ in range(5):
            for n in range(200):
                context = zmq.Context()
                one = context.socket(zmq.DEALER)
                link = (f"E{round_}.{n}", 0)
                keys = derive(SECRET)
                one.curve_serverkey = keys.server.public
                one.curve_publickey, one.curve_secretkey = keys.client.public, keys.client.secret
                one.setsockopt(zmq.ROUTING_ID, envelope.routing_id(P, link))
                one.connect(f"tcp://127.0.0.1:{p.port}")
                one.send_multipart((envelope.head(P, link), b"x"))
                assert gather(p, 1) == [(link, b"x")]
                assert p.send(link, bytes(100_000))
                context.destroy(linger=0)
            gc.collect()
            levels.append((_resident_bytes(), len(os.listdir("/proc/self/fd"))))
        assert levels[-1][1] <= levels[0][1] + 10
        assert levels[-1][0] - levels[1][0] < 32 << 20
        assert until(lambda: not p.send(("E0.0", 0), b"x"), [p])


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
