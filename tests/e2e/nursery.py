"""A process that has imported vLLM once and forks a server whenever it is asked to.

Importing vLLM takes longer than all the rest of a server's start, and vLLM does it twice, for the HTTP process and for
the engine. Tests that kill servers for a living start dozens. Nothing else differs from ``python -m
vllm.entrypoints.openai.api_server``: every server is a process group of its own with vLLM's own main function, and
NIXL and the connector are imported after the fork.

As a script it is the process itself: a line of JSON in (``argv``, ``env``, ``log``), a line with the pid out.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
PRELOAD = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.v1.attention.backends.cpu_attn",
    "transformers.models.qwen3.configuration_qwen3",
    "transformers.models.auto.tokenization_auto",
)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the sampler would ask for a C++ compiler at the first request
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # compiling vLLM and torch anew for every run takes longer than importing them
}
"""What every server runs with."""


class Nursery:
    """The one nursery of this process, started at the first fork; ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[bytes]
        self._lock = threading.Lock()

    def fork(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> int:
        """Start a server; its pid, which is its process group too."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
                self._process = subprocess.Popen(
                    [sys.executable, str(Path(__file__))],
                    env={**os.environ, **ENVIRONMENT},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._said,
                    text=True,
                    start_new_session=True,
                )
            assert self._process.stdin is not None and self._process.stdout is not None
            print(
                json.dumps({"argv": list(argv), "env": dict(env), "log": str(log)}),
                file=self._process.stdin,
                flush=True,
            )
            line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")
            raise RuntimeError(f"the process that starts servers has ended:\n{said[-3000:]}")
        return int(line)

    def close(self) -> None:
        """End it. Servers that still run are killed with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def die_with_parent() -> None:
    """Have this process killed when its parent ends, in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(argv: Sequence[str]) -> int:
    """vLLM's main, in the child."""
    import multiprocessing

    # vLLM asks for spawn on CPUs, which would import everything again; one OpenMP thread makes forking safe.
    original = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: original("fork" if method == "spawn" else method)  # type: ignore[assignment]
    # vLLM's own NIXL worker pins itself to the last core: two engines that poll would share one.
    os.sched_setaffinity = lambda *_: None  # type: ignore[assignment]
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv = ["api_server", *argv]
    try:
        main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _become_server(order: Mapping[str, object]) -> int:
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    faulthandler.register(signal.SIGUSR1, file=2)  # a server that hangs can be asked where
    env = dict(order["env"])  # type: ignore[call-overload]
    os.environ.update(env)
    sys.path[:0] = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    return _serve(order["argv"])  # type: ignore[arg-type]


def main() -> None:
    """Import, then fork for every line, until the other end of stdin closes.

    That it closes is how it learns of its parent's end: a death signal would come with the end of the *thread* that
    started it, which may be one of a test's.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # dead servers leave no zombies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import importlib

    for name in PRELOAD:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                answers.close()
                code = _become_server(json.loads(line))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(pid, file=answers, flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules must not hide others
    main()
