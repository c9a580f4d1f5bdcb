"""One prompt through two real vLLM servers, on a machine without a GPU: ``make serve-demo``.

Starts a prefill and a decode server with a tiny random model, sends both legs of one request as a router would, checks
the answer against that of one server alone, and prints what the connector wrote down about the hand-over.
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
from e2e.dispatch import Client, Handover, words
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


async def serve(prefill: Server, decode: Server) -> tuple[Handover, Any, float]:
    """A first request, by which the two get to know each other, the one to be shown, and the same prompt
    answered by the prefill server alone."""
    async with Client() as client:
        await client.push(prefill, decode, words(64, 1), 2)
        prompt = words(PROMPT, 2)
        began = time.monotonic()
        got = await client.push(prefill, decode, prompt, TOKENS, stream=True)
        took = time.monotonic() - began
        own = await client.complete(prefill, prompt, TOKENS)
    return got, own, took


def show_record(trace: Path) -> None:
    """The last hand-over in the connector's trace, field by field."""
    lines = trace.read_text(encoding="utf-8").splitlines() if trace.is_file() else []
    records = [line[1] for line in map(json.loads, lines) if line[0] == "record"]
    if not records:
        say("  (no record)")
        return
    for key, value in records[-1].items():
        row(key, f"{value:.6g}" if isinstance(value, float) else str(value))


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
        row("servers", "starting; the first start on a machine takes a minute or two")
        began = time.monotonic()
        start_all(*servers)
        row("servers", f"P {servers[0].url}, D {servers[1].url}")
        row("", f"up after {time.monotonic() - began:.0f} s, logs in {folder}")
        got, own, took = asyncio.run(serve(*servers))
        if not (got.prefill.ok and got.decode.ok):
            say(f"The request failed: P {got.prefill.error or 'ok'}, D {got.decode.error or 'ok'}")
            return 1
        say()
        say(f"One prompt of {PROMPT} tokens, both legs sent at once")
        say("-" * WIDTH)
        row("answer", text(got.decode.tokens[:9]) + " …")
        row(
            "first token after",
            f"{1000 * (got.decode.first_s or 0):.0f} ms, the whole answer after {1000 * took:.0f} ms",
        )
        off = distance(got.decode, own)
        row("against one server alone", f"log-probabilities differ by at most {off:.6f}")
        say()
        say("What the connector wrote down")
        say("-" * WIDTH)
        show_record(folder / "D.trace.jsonl")
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
