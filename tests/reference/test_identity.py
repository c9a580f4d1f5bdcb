"""Which transfer a request belongs to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pushkv.reference.identity import IdentityError, RequestName, address_of, identify, name_of


def request(name: str = "chatcmpl-a-00000001", tokens: Any = (1, 2, 3), **more: Any) -> Any:
    facts = {"kv_transfer_params": {}, "lora_request": None, "cache_salt": None, "mm_features": []}
    return SimpleNamespace(
        request_id=name, prompt_token_ids=None if tokens is None else list(tokens), **{**facts, **more}
    )


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("chatcmpl-abc-0123abcd", ("chatcmpl-abc", 0, 0)),
        ("3_chatcmpl-abc-0123abcd", ("chatcmpl-abc", 0, 3)),
        ("cmpl-abc-2-0123abcd", ("cmpl-abc", 2, 0)),
        ("1_cmpl-abc-2-0123abcd", ("cmpl-abc", 2, 1)),
        ("chatcmpl-order-7-0123abcd", ("chatcmpl-order-7", 0, 0)),
        ("cmpl-a-b-3-4-0123abcd", ("cmpl-a-b-3", 4, 0)),
        ("plain", ("plain", 0, 0)),
        ("7-0123abcd", ("7", 0, 0)),
    ],
)
def test_request_ids(name: str, parts: tuple[str, int, int]) -> None:
    assert name_of(name) == RequestName(*parts)


def test_without_random_suffix_nothing_is_cut() -> None:
    assert name_of("chatcmpl-abc-0123abcd", randomized=False).base == "chatcmpl-abc-0123abcd"


def test_the_digest_covers_what_decides_the_cache() -> None:
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=1))
    moved = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=2))
    different = [
        request(),
        request(tokens=(1, 2, 4)),
        request(tokens=(1, 2)),
        request(lora_request=SimpleNamespace(lora_name="x")),
        request(cache_salt="x"),
        request(mm_features=[image]),
        request(mm_features=[moved]),
        request(mm_features=[image, image]),
    ]
    assert len({identify(one).digest() for one in different}) == len(different)
    assert identify(request("one")).digest() == identify(request("another")).digest()


def test_keys_of_both_legs() -> None:
    p = request("0_cmpl-x-1-00000001", kv_transfer_params={"transfer_id": "t"})
    d = request("0_cmpl-y-1-0000000f", kv_transfer_params={"transfer_id": "t"})
    assert identify(p).key() == identify(d).key()
    assert identify(p).transfer_id == "t"
    assert identify(request("cmpl-x-0-00000001")).key() == identify(request("cmpl-x-0-00000002")).key()


def test_a_prompt_that_is_cut_afterwards_keeps_its_key() -> None:
    """Hybrid models: the prefill engine stops a token before the end."""
    whole, cut = request(tokens=range(9000)), request(tokens=range(9000))
    before = identify(cut, cut=2)
    del cut.prompt_token_ids[-2:]
    assert before.key() == identify(whole).key() != identify(cut).key()


@pytest.mark.parametrize(
    "bad", [request(tokens=None), request(tokens=("x",)), request(tokens=(1 << 70,)), request("x" * 300 + "-00000001")]
)
def test_no_identity(bad: Any) -> None:
    with pytest.raises(IdentityError) as refused:
        identify(bad).key()
    assert len(str(refused.value)) <= 64


def test_addresses() -> None:
    good = {"remote_engine_id": "e", "remote_host": "h", "remote_port": "5600", "tp_size": 2}
    assert address_of(good).port == 5600
    with pytest.raises(IdentityError, match="tp_size"):
        address_of({**good, "tp_size": None})
