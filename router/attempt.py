"""One request on one pair: both legs, from their start to the first bytes of the answer, or to what failed.

Decides when the legs leave (both at once, or one after the other), what ends the other leg, and whether a failure may
be tried again. Does not decide on which pair, nor write to the client.

| what happens before the first bytes of the answer | what becomes of it |
|---|---|
| P answers 4xx (not 429) | D's leg is ended; P's answer is the client's |
| P cannot be reached, breaks off, 5xx, 429 | D's leg is ended; another pair |
| P turns out to be another engine than D was told | D's leg is ended; again, with the new name |
| D answers 4xx (not 429) | P's leg is ended; D's answer is the client's |
| D cannot be reached, breaks off, 5xx, 429, or streams an error of 5xx first | P's leg is ended; another pair |
| D's whole answer, not streamed, is not there in `answer_s` | both legs are ended, 504: another would take as long |
| the client leaves | both legs are ended |
| D answers first | P's leg goes on, in the request's place at the gate: its cache may serve the next request |
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec

from pushkv.router.exchange import Exchange, Held, UpstreamError
from pushkv.router.headers import Headers
from pushkv.router.identity import Identity, identity_of, prefill_params
from pushkv.router.metrics import RouterMetrics
from pushkv.router.passing import EVENT_ENDS, HELD_BYTES
from pushkv.router.request import Ask
from pushkv.router.servers import Fleet, Server
from pushkv.router.settings import RouterSettings

_FOUND = (b'data: {"error"', b'data:{"error"')
_REFUSED = (408, 429)
"""4xx that another server may answer otherwise."""


class ClientGone(Exception):
    """Nobody waits for the answer."""


class PrefillFailed(Exception):
    """The decode leg has no use any more."""


class Failed(Exception):
    """The attempt came to nothing, and no byte has reached the client.

    leg: "prefill" or "decode"; reason: of a closed list. again: whether another attempt may help; same: whether the
    same servers may be tried. status, headers, body: a server's answer that says so, if there was one. handed_over: the
    decode leg was to take over a prompt's KV cache. transfer_id: of the attempt, as the engines' logs name it.
    """

    def __init__(self, leg: str, reason: str, *, again: bool = True, same: bool = False) -> None:
        super().__init__(f"{leg}: {reason}")
        self.leg, self.reason, self.again, self.same = leg, reason, again, same
        self.handed_over = False
        self.transfer_id = ""
        self.status = 0
        self.headers: Headers = []
        self.body = b""

    def answered(self, exchange: Exchange, body: bytes) -> Failed:
        self.status, self.headers, self.body = exchange.status, exchange.headers, body
        return self


class _Answer(msgspec.Struct):
    """What is read of a prefill leg's answer."""

    kv_transfer_params: dict[str, Any] | None = None


class _Who(msgspec.Struct):
    """Who P says it is: what nearly every answer is read for."""

    remote_engine_id: Any = None
    remote_host: Any = None
    remote_port: Any = None
    tp_size: Any = 1


class _Named(msgspec.Struct):
    kv_transfer_params: _Who


_answer, _named = msgspec.json.Decoder(_Answer), msgspec.json.Decoder(_Named)
_transfer_id = random.Random(os.urandom(32)).getrandbits


class Attempt:
    """Use: `start`, which sends at once what can leave at once. Then `await begin()`, or, where nothing is left to be
    sent (`sequential` is false), `when_settled`: most requests need no task of their own. `end` ends it early.

    answer: called with the first bytes of the answer (all of one that is not streamed) once they are known to be the
    client's, in the callback that brings them; and with whether that is all.
    """

    def __init__(
        self, ask: Ask, prefill: Server, decode: Server, fleets: tuple[Fleet, Fleet], settings: RouterSettings,
        metrics: RouterMetrics, held: Held, answer: Callable[[Attempt, bytes, bool], None],
    ) -> None:  # fmt: skip
        self.ask = ask
        self._held = held
        self.servers = prefill, decode
        self._fleets, self._settings, self._metrics, self._answer = fleets, settings, metrics, answer
        self.transfer_id = b"%032x" % _transfer_id(128)
        self.legs: dict[str, Exchange] = {}
        self._told: Identity | None = None  # who the decode leg was told that P is
        self._why = ""
        self._prefill_error: Failed | None = None
        self._parts: list[bytes] = []
        self._size = self._kept = 0
        self._useless: bytes | None = None
        self._answering = False
        self._settled: Callable[[], None] | None = None
        self._ended: BaseException | None = None
        self._began = time.perf_counter()

    @property
    def decode(self) -> Exchange:
        return self.legs["decode"]

    def start(self) -> None:
        """Both legs, unless D's must wait for P's answer."""
        prefill, _ = self.servers
        if self.ask.plain:
            self._metrics.count("dispatches", "plain", self.ask.plain)
            self._start_decode(None)
            return
        self._why = self._why_sequential(prefill)
        if self._why:
            self._metrics.count("dispatches", "sequential", self._why)
            return
        assert prefill.identity is not None
        self._told = prefill.identity
        leg = self._start_prefill(self._prefill_ended)
        self._start_decode(prefill.identity.params(self.transfer_id, chat=b"chat" in self.ask.path))
        leg.hold(self._settings.max_answer_bytes, self._held)
        self._metrics.count("dispatches", "parallel", "push")
        self._metrics.observe("dispatch_seconds", self.ask.own_s + time.perf_counter() - self._began)

    @property
    def sequential(self) -> bool:
        """Whether D's leg has to wait for P's answer."""
        return bool(self._why)

    @property
    def answered(self) -> bool:
        """Whether all of D's answer is here, and was the client's."""
        leg = self.legs["decode"]
        return self._answering and leg.complete and leg.error is None

    def when_settled(self, then: Callable[[], None]) -> None:
        """Call `then` once, when D's leg has ended or is useless: unless it is `answered`, `begin` is to be awaited."""
        if self._useless is not None or self.decode.ended:
            then()
        else:
            self._settled = then

    async def begin(self) -> None:
        """Returns when `answer` has been called. Raises `Failed`, or what `end` was given; then it never will be."""
        try:
            if self._why:
                said = await self._prefill_first()
                if self._settings.mode == "push" and said is not None:
                    said["transfer_id"] = self.transfer_id.decode()
                self._start_decode(said)
            await self._first()
        except PrefillFailed:
            assert self._prefill_error is not None
            self._prefill_error.transfer_id = self.transfer_id.decode()
            raise self._prefill_error from None
        except Failed as failed:
            failed.transfer_id, failed.handed_over = self.transfer_id.decode(), not self.ask.plain
            raise
        finally:
            self.release()

    def end(self, error: BaseException | None = None) -> None:
        """End the legs that have not ended."""
        self._ended = error
        for leg in list(self.legs.values()):
            leg.abort(error)

    def when_over(self, then: Callable[[], None]) -> None:
        """Call `then` when P's leg has ended too."""
        leg = self.legs.get("prefill")
        if leg is None or leg.ended:
            then()
            return
        before = leg.on_end

        def ended(leg: Exchange) -> None:
            try:
                if before is not None:
                    before(leg)
            finally:
                then()

        leg.on_end = ended

    def let_go(self) -> None:
        """Of the errors that ended it, when they have been dealt with."""
        self._prefill_error = self._ended = None
        for leg in self.legs.values():
            leg.let_go()

    def release(self) -> None:
        """The policies gave tokens to both servers; a leg gives them back when it ends, so do legs that never began."""
        if "prefill" not in self.legs:
            self._fleets[0].finished(self.servers[0], self.ask.prompt_tokens)
        if "decode" not in self.legs:
            self._fleets[1].finished(self.servers[1], self.ask.prompt_tokens + self.ask.answer_tokens)

    # ------------------------------------------------------------ the prefill leg

    def _why_sequential(self, prefill: Server) -> str:
        if self._settings.mode == "pull":
            return "pull"
        if self._settings.dispatch == "sequential":
            return "as set"
        if prefill.identity is None:
            return "identity unknown"
        if prefill.unsettled(time.monotonic()):
            return "identity changes"
        return "identity in doubt" if prefill.doubtful else ""

    def _start_prefill(self, then: Callable[[Exchange], None]) -> Exchange:
        fleet, server, tokens = self._fleets[0], self.servers[0], self.ask.prompt_tokens

        def ended(leg: Exchange) -> None:
            fleet.finished(server, tokens)
            then(leg)

        body = self.ask.prefill_body(prefill_params(self.transfer_id))
        leg = self.legs["prefill"] = self._start(server, body, ended, self._settings.prefill_s)
        return leg

    async def _prefill_first(self) -> dict[str, Any] | None:
        """Sequential: what P's answer says that D must be told, None for nothing."""
        leg = self._start_prefill(lambda _: None)
        try:
            await leg.head()
            body = await leg.whole(self._settings.max_answer_bytes, self._held)
        except UpstreamError as error:
            raise self._broken("prefill", error) from None
        self._judge(leg, body)
        if self._prefill_error is not None:
            raise self._prefill_error
        return self._params(body)

    def _prefill_ended(self, leg: Exchange) -> None:
        """Parallel: P's leg has ended, while D's is under way or over."""
        if isinstance(leg.error, UpstreamError):
            if leg.error.reason != "cancelled":
                self._prefill_error = self._broken("prefill", leg.error)
        elif leg.error is None:
            self._judge(leg, leg.body())
        decode = self.legs.get("decode")
        if self._prefill_error is not None and not self._answering and decode is not None:
            decode.abort(PrefillFailed())

    def _judge(self, leg: Exchange, body: bytes) -> None:
        """Sets `_prefill_error` where P's answer means that D need not wait; learns who P is."""
        prefill = self.servers[0]
        if self._told is not None and leg.status == 200 and _says(body, self._told) and prefill.identity is self._told:
            prefill.doubtful = False
            return
        if leg.status != 200:
            again = leg.status >= 500 or leg.status in _REFUSED
            self._metrics.count("legs_failed", "prefill", prefill.name, f"status {leg.status // 100}xx")
            self._prefill_error = Failed("prefill", "status", again=again).answered(leg, body)
            return
        said = identity_of(self._params(body))
        if said is None:
            if not self.ask.plain:
                self._metrics.count("prefills_without_transfer", prefill.name)
            return
        if said != prefill.identity:
            self._metrics.count("identities_learnt", prefill.name)
        prefill.learn(said, time.monotonic())
        if self._told is not None and said != self._told:
            self._metrics.count("identity_mismatches", prefill.name)
            self._prefill_error = Failed("prefill", "identity mismatch", same=True)

    def _params(self, body: bytes) -> dict[str, Any] | None:
        try:
            return _answer.decode(body).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    # ------------------------------------------------------------ the decode leg

    def _start_decode(self, params: dict[str, Any] | msgspec.Raw | None) -> None:
        if self._ended is not None:  # P's leg had just ended, so there was none that this could have ended
            raise self._ended
        fleet, server = self._fleets[1], self.servers[1]
        tokens = self.ask.prompt_tokens + self.ask.answer_tokens

        def ended(_: Exchange) -> None:
            self._let_go()
            fleet.finished(server, tokens)
            self._settle()

        limit_s = self._settings.first_token_s if self.ask.stream else self._settings.answer_s
        leg = self.legs["decode"] = self._start(server, self.ask.decode_body(params), ended, limit_s)
        leg.flow(self._hear, None)
        if self._prefill_error is not None:  # P's leg failed at once
            leg.abort(PrefillFailed())

    def _hear(self, data: bytes, last: bool) -> None:
        """The sink of D's leg until so much is here that it can be judged: a stream's first event, or all."""
        if self._useless is not None:
            return
        leg = self.decode
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._settings.max_answer_bytes:
            raise UpstreamError("too large")
        stream = self.ask.stream and leg.status == 200
        if not last and not stream:
            self._keep(len(data))
            return
        first = data if len(self._parts) == 1 else b"".join(self._parts)
        if not last and self._size < HELD_BYTES and EVENT_ENDS[0] not in first and EVENT_ENDS[1] not in first:
            self._keep(len(data))
            return
        self._parts = []
        if self._kept:
            self._let_go()
        if self._is_useless(leg.status, first, stream):
            self._useless = first
            leg.wake()
            self._settle()
            return
        self._answering = True
        if leg.status != 200 and "prefill" in self.legs:  # the client's mistake: nobody needs the prompt
            self.legs["prefill"].abort()
        self._answer(self, first, last)
        leg.wake()

    def _keep(self, more: int) -> None:
        self._kept += more
        self._held.bytes += more

    def _let_go(self) -> None:
        self._held.bytes -= self._kept
        self._kept = 0

    def _settle(self) -> None:
        then, self._settled = self._settled, None
        if then is not None:
            then()

    def _is_useless(self, status: int, first: bytes, stream: bool) -> bool:
        """Whether another server should be asked."""
        if status >= 500 or status in _REFUSED or (stream and not first):
            return True
        return first.startswith(_FOUND) and _is_ours_to_retry(first)

    async def _first(self) -> None:
        leg = self.decode
        while not self._answering and self._useless is None and leg.error is None:
            await leg.stirs()
        if self._answering:
            return
        if self._useless is None:
            assert leg.error is not None
            if not isinstance(leg.error, UpstreamError):
                raise leg.error
            self._cast_doubt(leg.error.reason)
            raise self._broken("decode", leg.error)
        if self.ask.stream and leg.status == 200 and not self._useless:
            raise self._broken("decode", UpstreamError("closed"))
        self._cast_doubt("status")
        self._metrics.count("legs_failed", "decode", self.servers[1].name, f"status {max(5, leg.status // 100)}xx")
        raise Failed("decode", "status").answered(leg, self._useless)

    def _cast_doubt(self, reason: str) -> None:
        """D may have failed because P is not who we said, and P has not answered yet: the next attempt asks P first."""
        prefill = self.legs.get("prefill")
        if self._told is not None and prefill is not None and not prefill.ended and reason == "status":
            self.servers[0].doubtful = True

    # ------------------------------------------------------------ both

    def _start(self, server: Server, body: bytes, ended: Callable[[Exchange], None], limit_s: float) -> Exchange:
        head = b"POST %b HTTP/1.1\r\n%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            self.ask.path,
            server.pool.host_header,
            self.ask.forwarded,
            self.transfer_id,
            len(body),
        )
        return server.pool.start(head, body, ended, limit_s)

    def _broken(self, leg: str, error: UpstreamError) -> Failed:
        number = 0 if leg == "prefill" else 1
        server = self.servers[number]
        if error.reason != "stale":
            self._metrics.count("legs_failed", leg, server.name, error.reason)
        if error.reason in ("connect", "closed"):
            self._fleets[number].lost(server)
        same = error.reason in ("stale", "no descriptors")
        again = error.reason != "too large" and not (
            error.reason == "timeout" and leg == "decode" and not self.ask.stream
        )
        return Failed(leg, error.reason, again=again, same=same)


def _says(body: bytes, who: Identity) -> bool:
    """Whether P's answer plainly names `who`."""
    try:
        said = _named.decode(body).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    told = who.engine_id, who.host, who.port, who.tp_size
    return (said.remote_engine_id, said.remote_host, said.remote_port, said.tp_size) == told


def _is_ours_to_retry(first: bytes) -> bool:
    """Whether the error that a stream begins with is the server's fault."""
    line = first.split(b"\n", 1)[0].partition(b":")[2]
    try:
        code = msgspec.json.decode(line)["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        return True
    return not isinstance(code, int) or code >= 500 or code in _REFUSED
