"""Records what a real vLLM pair answers, byte for byte: ``PYTHONPATH=.typing python tests/router/record.py``.

Needs the environment of ``make e2e``. Writes ``recordings/NAME.http``: the raw response, head and body, of one request.
The mock servers of these tests answer with these files, so that the router is tested against vLLM's own wire format.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from e2e.dispatch import for_decode, for_prefill, fresh, words  # noqa: E402
from e2e.kinds import KINDS, Knobs  # noqa: E402
from e2e.model import make_model  # noqa: E402
from e2e.servers import HOST, NAME, NURSERY, Server, start_all  # noqa: E402


def raw(server: Server, method: str, path: str, body: bytes, request_id: str) -> bytes:
    """The whole response as it came over the wire."""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Request-Id: {request_id}\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection((HOST, server.port), timeout=90.0) as connection:
        connection.sendall(head.encode() + body)
        got = b""
        while part := connection.recv(1 << 16):
            got += part
    return got


def placed(got: bytes, model: str, place: str = "/models/tiny") -> bytes:
    """The answer as it would be with the model at ``place``: no file says where it was recorded."""
    head, _, body = got.partition(b"\r\n\r\n")
    moved = body.replace(model.encode(), place.encode())
    length = b"content-length: %d"
    return head.replace(length % len(body), length % len(moved)) + b"\r\n\r\n" + moved


def keep(name: str, got: bytes) -> None:
    (HERE / "recordings" / f"{name}.http").write_bytes(got)
    print(name, got.split(b"\r\n", 1)[0].decode(), len(got), flush=True)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pushkv-record-"))
    knobs = Knobs(path="packed", orphan_s=6.0, dead_peer_s=4.0)
    model = make_model()
    prefill, decode = (Server(KINDS["pushkv"].spec(name, model, folder, knobs)) for name in ("P0", "D0"))
    completion = {"model": NAME, "prompt": words(40, 1), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    chat = {"model": NAME, "messages": [{"role": "user", "content": "w1 w2 w3"}], "max_tokens": 4, "ignore_eos": True}

    def ask(name: str, server: Server, path: str, body: Any, tid: str = "") -> None:
        keep(name, raw(server, "POST", path, json.dumps(body).encode(), tid or fresh()))

    try:
        start_all(prefill, decode)
        path, chats = "/v1/completions", "/v1/chat/completions"
        ask("completion", decode, path, completion)
        ask("completion_stream", decode, path, completion | {"stream": True, "stream_options": {"include_usage": True}})
        ask("completion_n2_stream", decode, path, completion | {"stream": True, "n": 2, "temperature": 1.0})
        ask("completion_n2_two_prompts", decode, path, completion | {"prompt": [words(9, 1), words(9, 2)], "n": 2})
        ask("chat", decode, chats, chat)
        ask("chat_stream", decode, chats, chat | {"stream": True})
        tid = fresh()
        ask("prefill_leg", prefill, path, completion | {"max_tokens": 1, "kv_transfer_params": for_prefill(tid)}, tid)
        ask("decode_leg", decode, path, completion | {"kv_transfer_params": for_decode(prefill, tid)}, tid)
        tid = fresh()
        ask("prefill_leg_chat", prefill, chats, chat | {"max_tokens": 1, "kv_transfer_params": for_prefill(tid)}, tid)
        ask("decode_leg_chat", decode, chats, chat | {"kv_transfer_params": for_decode(prefill, tid)}, tid)
        stale = for_decode(prefill, fresh(), remote_engine_id="P-of-yesterday")
        ask("decode_leg_refused", decode, path, completion | {"kv_transfer_params": stale})
        stale = for_decode(prefill, fresh(), remote_engine_id="P-of-yesterday")
        ask("decode_leg_refused_stream", decode, path, completion | {"stream": True, "kv_transfer_params": stale})
        ask("too_long", decode, path, completion | {"prompt": words(5000, 3)})
        ask("no_such_model", decode, path, completion | {"model": "other"})
        ask("wrong_type", decode, path, completion | {"max_tokens": "many"})
        keep("not_json", raw(decode, "POST", path, b'{"model": ', fresh()))
        keep("models", placed(raw(decode, "GET", "/v1/models", b"", fresh()), str(model)))
        keep("health", raw(decode, "GET", "/health", b"", fresh()))
        names = raw(prefill, "GET", "/metrics", b"", fresh()).decode()
        kept = [line for line in names.splitlines() if line.startswith("# TYPE pushkv")]
        (HERE / "recordings" / "metrics_types.txt").write_text("\n".join(kept) + "\n", encoding="utf-8")
        print(f"{len(kept)} metrics of the connector")
    finally:
        for server in (prefill, decode):
            server.stop()
        NURSERY.close()


if __name__ == "__main__":
    main()
