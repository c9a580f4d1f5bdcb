"""Two whole ranks over real NIXL, in two processes: over UCX, where done is arrived, and over LIBFABRIC, where a word
waits for the notice of its write.
"""

from __future__ import annotations

import pytest

from .nixl_env import needs_libfabric, needs_ucx, run_case

UCX, LIBFABRIC = pytest.param("UCX", marks=needs_ucx), pytest.param("LIBFABRIC", marks=needs_libfabric)
CASES = (
    "prompts_of_many_sizes",
    "what_is_aborted_leaves_nothing",
    "a_killed_sender_leaves_nothing",
    "a_killed_receiver_leaves_nothing",
)
PATHS = pytest.mark.parametrize("path", ["packed", "direct"])


@PATHS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", [UCX, LIBFABRIC])
def test_two_ranks(backend: str, case: str, path: str) -> None:
    run_case(backend, "rank_cases", case, backend, path)


@PATHS
@needs_libfabric
def test_words_that_come_before_the_bytes(path: str) -> None:
    run_case("LIBFABRIC", "rank_cases", "words_wait_for_the_notices", "LIBFABRIC", path)
