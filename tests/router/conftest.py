"""Without the extra ``router`` (part of ``dev``) nothing here can run."""

from __future__ import annotations

import importlib.util

collect_ignore_glob: list[str] = []
if any(importlib.util.find_spec(name) is None for name in ("aiohttp", "httptools", "prometheus_client", "uvloop")):
    collect_ignore_glob.append("test_*.py")
