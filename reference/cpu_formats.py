"""How vLLM's CPU attention kernels store K and V inside a block. The tensor's shape does not say.

The cache of a layer has the shape (block, head, token, K then V), but the kernel views the bytes of one block and head
as (2 x tokens, head size), the first half K and the second half V. Within the halves, by instruction set (seen by
writing marked keys through the kernel, and checked so by a test where vLLM is installed):

* `vec`, `vec16`: V as rows, one per token. K **transposed**: (head size, tokens), so that one element of all tokens of
  a block lies side by side. Each head's K is a part of its own (`head_part`), whose "heads" are the elements.
* `amx` and others: packed for matrix units; tokens cannot be told apart. Only whole blocks can be moved, between
  engines with the same instruction set and block size.

Decides the views and the smallest unit of tokens that can be moved. Does not decide which instruction set is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pushkv.reference.specs import LayerSpec

TRANSPOSED_K = ("vec", "vec16")

_HEAD_PART = re.compile(r"([a-z]+)([0-9]{1,5})/([1-9][0-9]{0,4})", re.ASCII)

Piece = tuple[str, int, str, int, int, tuple[int, int, int], int, int, int, int]
"""name, offset, dtype, element bytes, elements, heads, block tokens, block stride, head stride, token stride."""


@dataclass(frozen=True, slots=True)
class CpuFormat:
    """isa: as vLLM names it; quantised caches and unknown names are opaque."""

    isa: str
    block_tokens: int
    plain: bool = True

    @property
    def opaque(self) -> bool:
        return not self.plain or self.isa not in TRANSPOSED_K

    @property
    def unit_tokens(self) -> int:
        """Tokens that move together, counted from the prompt's first."""
        return self.block_tokens if self.opaque else 1


def head_part(part: str, head: int, heads: int) -> str:
    """The name of a part that holds one of the `heads` KV heads that the layer has in the whole model."""
    return f"{part}{head}/{heads}"


def read_head_part(name: str) -> tuple[str, int, int] | None:
    """(part, head, heads) of a name that `head_part` has made; None for any other."""
    found = _HEAD_PART.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def cpu_parts(
    cpu: CpuFormat,
    spec: LayerSpec,
    held: tuple[int, int, int],
    tokens: int,
    strides: tuple[int, int],
    content: int,
) -> Iterator[Piece]:
    """The parts of a layer. held: first, stop, of all heads. strides: of block and head, in bytes. content: bytes per
    head and token.
    """
    block, head = strides
    first, stop, total = held
    if cpu.opaque:
        # A row is a slice of a block that means nothing by itself: whole blocks are copied, and the name of the type
        # keeps apart what is packed differently.
        dtype = f"{spec.dtype}/{cpu.isa or 'unknown'}/{tokens}"
        yield "kv", 0, dtype, 1, content, held, tokens, block, head, content
        return
    element = spec.element_bytes
    row = spec.k_elements * element
    for number in range(first, stop):
        # Transposed: every element of the head is a "head" of one element whose tokens lie side by side.
        offset = (number - first) * head
        pseudo = (0, spec.k_elements, spec.k_elements)
        name = head_part("k", number, total)
        yield name, offset, spec.dtype, element, 1, pseudo, tokens, block, tokens * element, element
    yield "v", tokens * row, spec.dtype, element, spec.v_elements, (first, stop, total), tokens, block, head, row
