"""What happens in the main stories is what ``tests/transcripts`` says. Renew: ``python -m tests.protocol.transcripts
--write``.
"""

from __future__ import annotations

import pytest

from tests.protocol.transcripts import FOLDER, STORIES, tell


@pytest.mark.parametrize("name", STORIES)
def test_transcript(name: str) -> None:
    assert tell(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_no_transcript_without_a_story() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(STORIES)


@pytest.mark.parametrize("name", STORIES)
def test_transcripts_are_readable(name: str) -> None:
    lines = tell(name).splitlines()
    assert len(lines) < 150
    assert max(len(line) for line in lines) <= 100
