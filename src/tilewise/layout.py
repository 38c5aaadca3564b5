"""Which keys a query row may see: [B, T, H, D], GQA groups, bottom-right causal alignment, windows, packed sequences.

Every layout of this library gives a query row one contiguous range of keys, `[first, end)`; all paths are built on that.
All functions here are tensor expressions without host synchronisation, except where a docstring says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """Which keys each query row of one call may see.

    Row t of a sequence with L_q queries and L_k keys stands at position `p = t + L_k - L_q` (bottom-right). It sees keys
    `0 .. L_k-1`; with `causal` only those `<= p`; with `window` only the last `window` of these, itself included.
    """

    query_length: int  # T_q
    key_length: int  # T_k
    causal: bool = False
    window: int | None = None  # number of keys, self included; needs causal
    cu_seqlens_q: Tensor | None = None  # int32 [N+1], packed sequences
    cu_seqlens_k: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def boundaries(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """int64 `[N+1]` boundaries of the sequences on the query and on the key side, safe for indexing.

        Values outside `[0, T]` or that fall are clamped, so that a bad list on a GPU never reads out of range.
        """
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            # arange, not torch.tensor: no copy from the host
            unit = torch.arange(2, device=device, dtype=torch.int64)
            return unit * self.query_length, unit * self.key_length
        return (
            safe_boundaries(self.cu_seqlens_q.to(device), self.query_length),
            safe_boundaries(self.cu_seqlens_k.to(device), self.key_length),
        )

    def key_range(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """First visible key and end of the visible keys of each query row.

        Returns:
            `(first, end)`, int64 `[T_q]`, indices into the call's key axis; `first == end` for a row that sees nothing.
        """
        cu_q, cu_k = self.boundaries(device)
        row = torch.arange(self.query_length, device=device)
        sequence = sequence_of(row, cu_q)
        sequences = cu_q.shape[0] - 1
        inside = sequence < sequences  # rows past cu_seqlens[-1] belong to no sequence
        sequence = sequence.clamp(max=max(sequences - 1, 0))
        key_start, key_end = cu_k[sequence], cu_k[sequence + 1]
        position = (row - cu_q[sequence + 1]) + key_end  # absolute: bottom-right alignment in the call's key axis
        end = torch.minimum(position + 1, key_end) if self.causal else key_end
        first = key_start
        if self.window is not None:
            first = torch.maximum(key_start, position - (self.window - 1))
        end = torch.where(inside, torch.maximum(end, first), first)
        return first, end

    def to_mask(self, device: torch.device | str) -> Tensor:
        """bool `[T_q, T_k]`, True where the row sees the key. For references and tests: T_q x T_k memory."""
        first, end = self.key_range(device)
        key = torch.arange(self.key_length, device=device)
        return (key >= first[:, None]) & (key < end[:, None])


@dataclass(frozen=True)
class BlockTable:
    """How one axis of tokens falls into blocks that restart at each sequence. All tensors int64 `[M]` or `[T]`.

    M is exact for a single sequence and an upper bound, `T // block + N`, for N packed ones (no host synchronisation);
    the surplus blocks are empty (`start == end`) and have `sequence == N`.
    """

    start: Tensor  # first token of the block
    end: Tensor  # one past its last token
    sequence: Tensor  # the sequence it lies in
    local: Tensor  # its number within the sequence: what ids in a Selection mean
    offset: Tensor  # [N+1] number of blocks before each sequence
    of_token: Tensor  # [T] block that a token lies in; M for a token of no sequence
    block: int  # tokens in a full block

    @property
    def count(self) -> int:
        return self.start.shape[0]

    def slots(self) -> tuple[Tensor, Tensor]:
        """Token in each slot of each block, int64 `[M, block]`, safe to index with, and bool: False past its end."""
        token = self.start[:, None] + torch.arange(self.block, device=self.start.device)
        return token.clamp(max=max(self.of_token.shape[0] - 1, 0)), token < self.end[:, None]


def block_table(boundaries: Tensor, length: int, block: int) -> BlockTable:
    """Cut an axis of `length` tokens with sequence `boundaries` (int64 [N+1], safe) into blocks of `block` tokens."""
    device = boundaries.device
    sequences = boundaries.shape[0] - 1
    lengths = boundaries[1:] - boundaries[:-1]
    blocks = (lengths + block - 1) // block
    offset = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), blocks.cumsum(0)])
    count = -(-length // block) if sequences == 1 else length // block + sequences
    index = torch.arange(count, device=device)
    sequence = sequence_of(index, offset)
    inside = sequence < sequences
    safe = sequence.clamp(max=max(sequences - 1, 0))
    local = torch.where(inside, index - offset[safe], 0)
    start = torch.where(inside, boundaries[safe] + local * block, length)
    end = torch.where(inside, torch.minimum(start + block, boundaries[safe + 1]), length)
    token = torch.arange(length, device=device)
    token_sequence = sequence_of(token, boundaries)
    token_safe = token_sequence.clamp(max=max(sequences - 1, 0))
    of_token = offset[token_safe] + (token - boundaries[token_safe]) // block
    of_token = torch.where(token_sequence < sequences, of_token, count)
    return BlockTable(start, end, sequence, local, offset, of_token, block)


def safe_boundaries(cu_seqlens: Tensor, length: int) -> Tensor:
    """int64 copy of cu_seqlens with every value in `[0, length]` and none falling."""
    return cu_seqlens.to(torch.int64).clamp(0, length).cummax(0).values


def sequence_of(index: Tensor, boundaries: Tensor) -> Tensor:
    """Sequence in which each index lies (int64, `N` past the last boundary); empty sequences own nothing."""
    return torch.searchsorted(boundaries[1:].contiguous(), index, right=True)


def group_size(query_heads: int, kv_heads: int) -> int:
    """Query heads per KV head, G; query head h reads KV head h // G."""
    return query_heads // kv_heads
