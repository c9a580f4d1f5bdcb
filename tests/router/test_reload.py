"""The server list changes under way, the router is told to stop, and TLS is spoken on both sides."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from pushkv.router.command import Source
from pushkv.router.settings import RouterSettings, ServerSettings
from pushkv.sim.errors import BadInput

from .mock import Mock
from .stack import expected, play, stack, until


def test_a_server_that_leaves_the_list_finishes_what_it_has() -> None:
    async def go() -> None:
        async with stack(1, 2) as s:
            s.decode[0].token_s = 0.1
            running = asyncio.create_task(s.ask("long", stream=True, max_tokens=8))
            await until(lambda: s.decode[0].open == 1)
            settings = s.service.application.settings
            s.router.update(msgspec.structs.replace(settings, decode=(ServerSettings(s.decode[1].url),)))
            for n in range(4):
                assert (await s.ask(f"q{n}")).text == expected(f"q{n}")
            assert len(s.decode[1].seen) == 4 and len(s.decode[0].seen) == 1
            assert (await running).text == expected("long", 8)
            s.router.update(settings)  # and back again, as a new one
            for n in range(4):
                assert (await s.ask(f"r{n}")).text == expected(f"r{n}")
            assert len(list(s.router.decode)) == 2

    play(go())


def test_a_server_that_drains_gets_nothing_new() -> None:
    async def go() -> None:
        async with stack(1, 2, policy="round-robin") as s:
            settings = s.service.application.settings
            first, second = settings.decode
            drained = (msgspec.structs.replace(first, drain=True), second)
            s.router.update(msgspec.structs.replace(settings, decode=drained))
            for n in range(4):
                assert (await s.ask(f"q{n}")).text == expected(f"q{n}")
            assert not s.decode[0].seen
            s.router.update(settings)
            for n in range(4):
                assert (await s.ask(f"r{n}")).text == expected(f"r{n}")
            assert s.decode[0].seen

    play(go())


def test_a_router_that_stops_finishes_what_it_has_and_takes_nothing_new() -> None:
    async def go() -> None:
        async with stack(mock={"token_s": 0.1}) as s:
            assert (await s.ask("warm", max_tokens=1)).status == 200  # a kept connection of the client
            running = asyncio.create_task(s.ask("long", stream=True, max_tokens=6))
            await until(lambda: s.decode[0].open == 1)
            s.service.stop()
            await until(lambda: s.service.application.draining)
            reply = await s.ask("late")
            assert reply.status == 503 and reply.headers is not None and reply.headers["retry-after"] == "1"
            async with s.http.get(s.url + "/health") as response:
                assert response.status == 503
            assert (await running).text == expected("long", 6)

    play(go())


def test_a_session_keeps_its_servers() -> None:
    async def go() -> None:
        async with stack(3, 3, policy="session") as s:
            for n in range(12):
                assert (await s.ask(f"q{n}", headers={"x-session-id": "alice"})).status == 200
            assert sorted(len(mock.seen) for mock in s.prefill) == [0, 0, 12]
            assert sorted(len(mock.seen) for mock in s.decode) == [0, 0, 12]

    play(go())


def test_a_prefix_keeps_its_servers() -> None:
    async def go() -> None:
        async with stack(3, 1, policy="prefix") as s:

            def home(prompt: str) -> list[Mock]:
                return [mock for mock in s.prefill if any(seen.body["prompt"].startswith(prompt) for seen in mock.seen)]

            for turn in range(1, 6):
                for letter in "abc":
                    assert (await s.ask(letter * 1500 * turn, max_tokens=1)).status == 200
            assert all(len(home(letter * 1500)) == 1 for letter in "abc")

    play(go())


def test_the_engines_connections_are_let_go_when_idle() -> None:
    async def go() -> None:
        async with stack(upstream_idle_s=0.1, health_every_s=0.05) as s:
            await asyncio.gather(*(s.ask(f"q{n}") for n in range(20)))
            pool = next(iter(s.router.decode)).pool
            assert pool.connections > 2
            await until(lambda: pool.connections <= 2)
            with contextlib.suppress(TimeoutError):
                await until(lambda: pool.connections > 2, 0.3)
            assert (await s.ask("again")).text == expected("again")

    play(go())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_list_that_cannot_be_used_changes_nothing(tmp_path: Path, role: str) -> None:
    """Also where only one role's cannot: its certificates are gone since the start."""
    ca = tmp_path / "ca.pem"
    ca.write_text("none")

    async def go() -> None:
        async with stack(2, 2, policy="round-robin", upstream_ca=str(ca)) as s:
            settings = s.service.application.settings
            other, bad = ServerSettings("http://127.0.0.1:9"), ServerSettings("https://127.0.0.1:10")
            lists = {"prefill": (other,), "decode": (other,)} | {role: (*getattr(settings, role), other, bad)}
            before = s.service._lists()
            with pytest.raises(BadInput):
                s.router.update(msgspec.structs.replace(settings, **lists))
            assert s.service._lists() == before
            for n in range(6):
                assert (await s.ask(f"q{n}")).text == expected(f"q{n}")
            assert all(mock.seen for mock in s.mocks)

    play(go())


def test_a_reload_that_fails_in_any_way_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Source):
        def read(self) -> RouterSettings:
            raise IndexError("secret")

    async def go() -> None:
        async with stack() as s:
            s.service._source = Broken(None, {})
            for n in range(1, 3):
                s.service._reload.set()
                await until(lambda: not s.service._reload.is_set())
                assert await s.metric("reloads_total", result="refused") == n
            assert (await s.ask("x")).text == expected("x")

    play(go())
    assert "the server list stays as it was: IndexError" in caplog.text and "secret" not in caplog.text
