"""The transport over NIXL's LIBFABRIC backend, without EFA."""

from __future__ import annotations

import pytest

from .nixl_env import needs_libfabric, run_case

CASES = (
    "bytes_are_there_when_the_notice_comes",
    "stopped_target_is_waited_for",
    "killed_target_breaks_its_own_writes_only",
)


@needs_libfabric
@pytest.mark.parametrize("case", CASES)
def test_over_libfabric(case: str) -> None:
    run_case("LIBFABRIC", "libfabric_cases", case)
