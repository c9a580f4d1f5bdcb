"""One prompt through two real vLLM servers, on a machine without a GPU: ``make serve-demo``.

Starts a prefill and a decode server with a tiny random model and ``pushkv router`` before them, sends one prompt to it,
checks the answer against that of one server alone, and prints what the connector wrote down about the hand-over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.answers import distance
from e2e.dispatch import Answer, Client, words
from e2e.front import front
from e2e.kinds import KINDS, Knobs
from e2e.model import make_model
from e2e.servers import NURSERY, Server, ServerDied, start_all

WIDTH = 80
PROMPT = 1000
TOKENS = 16


def say(text: str = "") -> None:
    print(text, flush=True)


def row(name: str, value: str) -> None:
    """One line of a two-column table, cut to the page."""
    line = f"  {name:<26} {value}"
    say(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…")


def text(tokens: list[int]) -> str:
    """The model's tokens are words that are called by their number."""
    return " ".join(f"w{token - 4}" for token in tokens)


async def serve(prefill: Server, decode: Server, log: Path) -> tuple[Answer, Answer]:
    """A first request, by which all get to know each other, the one to be shown, and the same prompt answered by the
    prefill server alone."""
    async with front(prefill, decode, log) as router, Client() as client:
        row("router", f"pushkv router, {router.url}")
        server: Any = router
        await client.complete(server, words(64, 1), 2)
        prompt = words(PROMPT, 2)
        return await client.complete(server, prompt, TOKENS, stream=True), await client.complete(
            prefill, prompt, TOKENS
        )


SHOWN = {
    "send": ("tokens", "packed", "bytes", "descriptors", "gather_s", "post_s", "wire_s", "handover_s"),
    "receive": ("registered_to_granted_s", "granted_to_landed_s"),
    "load": ("scatter_s",),
}
"""What is shown of the records of one hand-over; the traces hold more."""


def show_record(folder: Path) -> None:
    """The last hand-over in the connectors' traces: as P sent it, as it landed at D, and as it got into D's cache."""
    for name in ("P", "D"):
        trace = folder / f"{name}.trace.jsonl"
        lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()] if trace.is_file() else []
        last = {line[1]["side"]: line[1] for line in lines if line[0] == "record"}
        for side, fields in SHOWN.items():
            for field in fields if side in last else ():
                value = last[side][field]
                if isinstance(value, float):
                    field, value = field.removesuffix("_s"), f"{1e3 * value:.2f} ms"
                row(f"{name} {field.replace('_', ' ')}", str(value))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", choices=sorted(KINDS), default="pushkv")
    kind = KINDS[parser.parse_args().connector]
    folder = Path(tempfile.mkdtemp(prefix="pushkv-demo-"))
    say(f"Prefill and decode on two real vLLM servers, connector: {kind.name}")
    say("-" * WIDTH)
    servers: list[Server] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with it
    try:
        model = make_model()
        row("model", "random Qwen3, 4 layers, 2 KV heads of 32, float32")
        knobs = Knobs(path=kind.paths[0], trace=True)
        servers = [Server(kind.spec(name, model, folder, knobs)) for name in ("P", "D")]
        row("servers", "starting; takes a minute or two the first time")
        began = time.monotonic()
        start_all(*servers)
        row("servers", f"P {servers[0].url}, D {servers[1].url}")
        row("", f"up after {time.monotonic() - began:.0f} s, logs in {folder}")
        got, own = asyncio.run(serve(servers[0], servers[1], folder / "router.log"))
        if not got.ok:
            say(f"The request failed: {got.error or got.finish}")
            return 1
        say()
        say(f"One prompt of {PROMPT} tokens, sent to the router")
        say("-" * WIDTH)
        row("answer", text(got.tokens[:9]) + " …")
        row(
            "first token after",
            f"{1000 * (got.first_s or 0):.0f} ms, the whole answer after {1000 * got.seconds:.0f} ms",
        )
        off = distance(got, own)
        row("against one server alone", f"log-probabilities differ by at most {off:.6f}")
        say()
        say("What the connector wrote down")
        say("-" * WIDTH)
        show_record(folder)
        return 0 if off < 0.01 else 1
    except ServerDied as error:
        say(str(error))
        return 1
    finally:
        for server in servers:
            server.stop()
        NURSERY.close()


if __name__ == "__main__":
    sys.exit(main())
