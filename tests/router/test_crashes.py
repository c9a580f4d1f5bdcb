"""Servers that crash under many legs, late, or in an unlucky moment."""

from __future__ import annotations

import asyncio
import resource

import pytest

from pushkv.model.routing import PrefixAffinity
from pushkv.router import upstream
from pushkv.router.attempt import Attempt, ClientGone
from pushkv.router.command import more_files
from pushkv.router.exchange import Exchange, UpstreamError
from pushkv.router.passing import Passing
from pushkv.router.upstream import Connection

from .stack import expected, play, stack, until
from .test_faults import idle


def test_a_crash_under_many_legs_is_told_to_the_policy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgetting what a server was given takes long."""
    forgotten: list[int] = []
    forget = PrefixAffinity._forget

    def counted(policy: PrefixAffinity, engine: int) -> None:
        forgotten.append(engine)
        forget(policy, engine)

    monkeypatch.setattr(PrefixAffinity, "_forget", counted)

    async def go() -> None:
        async with stack(1, 2, policy="prefix", health_every_s=60.0, mock={"prefill_s": 0.2}) as s:
            asking = [asyncio.create_task(s.ask(f"q{n}", max_tokens=100)) for n in range(40)]
            await until(lambda: s.decode[0].open > 10 and s.decode[1].open > 10)
            await s.decode[0].kill()
            replies = await asyncio.gather(*asking)
            assert [reply.text for reply in replies] == [expected(f"q{n}", 100) for n in range(40)]
            assert forgotten == [0]
            await idle(s)

    play(go())


@pytest.mark.parametrize("late", [True, False])
def test_a_kept_connection_that_closes_late_is_a_crash(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Late: longer after the request than a close and a request can cross. Then the server has failed."""
    monkeypatch.setattr(upstream, "STALE_S", 0.05 if late else 60.0)

    async def go() -> None:
        async with stack(2, 1, health_every_s=60.0) as s:
            for n in range(2):
                assert (await s.ask(f"q{n}")).text == expected(f"q{n}")
            mock = next(one for one in s.prefill if one.seen)
            mock.fault = lambda _: "hang"
            asking = asyncio.create_task(s.ask("x"))
            await until(lambda: mock.open == 1)
            await asyncio.sleep(0.1)
            await mock.kill()
            assert (await asking).text == expected("x")
            reason = "closed" if late else "stale"
            assert await s.metric("retries_total", reason=f"prefill {reason}") == 1
            assert await s.metric("legs_failed_total", reason="closed") == (1 if late else 0)
            await idle(s)

    play(go())


def test_stale_connections_are_believed_twice_and_then_another_server_is_asked() -> None:
    """A server that answers health checks and closes under every request."""

    async def go() -> None:
        async with stack(1, 2, health_every_s=60.0) as s:
            s.decode[0].fault = lambda _: "close"
            made = Connection.connection_made

            def used(connection: Connection, transport: asyncio.BaseTransport) -> None:
                made(connection, transport)
                connection.used = True

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Connection, "connection_made", used)
                assert (await s.ask("x")).text == expected("x")
            assert len(s.decode[0].seen) == 3 and len(s.decode[1].seen) == 1
            await idle(s)

    play(go())


def test_p_fails_in_the_moment_of_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is here, its reader has not run yet: it must not become the beginning of an answer."""
    on_body, done = Connection.on_body, []

    def body(connection: Connection, data: bytes) -> None:
        on_body(connection, data)
        if not done and b"data: " in data:
            done.append(connection)
            (attempt,) = attempts
            attempt.legs["prefill"].complete, attempt.legs["prefill"].error = False, UpstreamError("closed")
            attempt._prefill_ended(attempt.legs["prefill"])

    monkeypatch.setattr(Connection, "on_body", body)

    async def go() -> None:
        async with stack(2, 2) as s:
            reply = await s.ask("x", stream=True)
            assert done and (reply.status, reply.text, reply.error) == (200, expected("x"), None)
            assert await s.metric("retries_total") == 1
            await idle(s)

    attempts: list[Attempt] = []
    make = Attempt.__init__

    def made(attempt: Attempt, *arguments: object) -> None:
        make(attempt, *arguments)  # type: ignore[arg-type]
        attempts.append(attempt)

    monkeypatch.setattr(Attempt, "__init__", made)
    play(go())


def test_a_stream_that_breaks_in_any_way_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    take, parts = Passing.take, iter(range(10**6))

    def taken(passing: Passing, data: bytes, last: bool) -> None:
        if b"#" in data and next(parts) == 1:
            raise KeyError("ours")
        take(passing, data, last)

    monkeypatch.setattr(Passing, "take", taken)

    async def go() -> None:
        async with stack(mock={"token_s": 0.05}) as s:
            reply = await s.ask("x", stream=True)
            assert reply.text == expected("x", 1) and reply.error is not None and reply.done
            assert await s.metric("streams_broken_total", reason="internal") == 1
            await idle(s)

    play(go())


def test_a_client_that_leaves_between_the_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequential: P's leg has just ended, D's does not exist yet. D is not asked."""
    judge = Attempt._judge

    def judged(attempt: Attempt, leg: Exchange, body: bytes) -> None:
        judge(attempt, leg, body)
        attempt.end(ClientGone())

    monkeypatch.setattr(Attempt, "_judge", judged)

    async def go() -> None:
        async with stack(dispatch="sequential") as s:
            asking = asyncio.create_task(s.ask("x"))
            await until(lambda: bool(s.prefill[0].seen) and s.router.gate.active == 0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await idle(s)
            assert not s.decode[0].seen and await s.metric("clients_gone_total") == 1

    play(go())


def test_a_router_without_descriptors_blames_no_server() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def go() -> None:
        async with stack(health_every_s=60.0) as s:
            servers = [*s.router.prefill, *s.router.decode]
            async with s.http.get(s.url + "/health") as response:  # a kept connection of the client
                assert response.status == 200
            await until(lambda: all(server.pool.connections == 1 for server in servers))
            for server in servers:
                server.pool.retire()
                server.pool._keep = 1024
            await until(lambda: not any(mock._connections for mock in s.mocks))
            await asyncio.sleep(0.05)  # until all of them are closed
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (_lowest_free(), hard))
                reply = await s.ask("x")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert reply.status == 503 and reply.error is not None and "no descriptors" in reply.error["message"]
            assert all(server.up and not server.doubtful for server in servers)
            assert (await s.ask("y")).text == expected("y")
            await idle(s)

    play(go())


def _lowest_free() -> int:
    """No descriptor from here up is given out under such a limit; those below are taken."""
    with open("/dev/null", "rb") as file:
        return file.fileno()


def test_the_soft_limit_of_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        more_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
