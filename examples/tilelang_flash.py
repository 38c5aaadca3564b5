"""Dense attention, forward, in TileLang: the walk of docs/methods/dense.md in a second language, beside `tilewise.attend`.

    python examples/tilelang_flash.py --causal --head-dim 128 --length 16384

Both are held to float64 on a small ragged shape; then both are timed on the large one. Needs a CUDA device and the package
tilelang (written for 0.1.15), which compiles with nvcc. Exit codes: 0 both agree, 1 they do not, 2 it cannot run here.

Symbols are those of docs/methods/dense.md: a row's running maximum m, running sum l and accumulator A, the logits s and
weights P of one tile. m stays in units of q . k; the scale and log2(e) are one factor inside exp2.
Source: online softmax, Milakov and Gimelshein, arXiv:1805.02867; tiling, arXiv:2205.14135.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 128)
DISAGREE, CANNOT_RUN = 1, 2
Result = tuple[Tensor, Tensor]  # out and lse


@dataclass(frozen=True)
class Tiles:
    """Sizes of the kernel: query rows and keys of one tile, and how many key tiles are in flight."""

    rows: int = 128
    keys: int = 128
    stages: int = 2

    def __post_init__(self) -> None:
        if self.rows < 64 or self.rows % 64 or self.keys < 16 or self.keys % 16 or self.stages < 1:
            raise ValueError(f"tiles: expected rows in 64s, keys in 16s and stages of at least 1, got {self}")


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise where the kernel cannot take q `[B, T, H_q, D]` and k, v `[B, T, H_kv, D]`; tilewise.attend takes more."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape or x.numel() >= 2**31:
            raise ValueError(f"{name}: expected [B, T, H, D], none 0, under 2**31 elements, got {list(x.shape)}")
        if x.dtype not in DTYPES.values():
            raise TypeError(f"{name}: expected bfloat16 or float16, got {x.dtype}; tilewise.attend takes it")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name}: expected {q.dtype} on {q.device} as q, got {x.dtype} on {x.device}")
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}; call .contiguous()")
    if k.shape != v.shape:
        raise ValueError(f"v: expected the shape of k, {list(k.shape)}, got {list(v.shape)}")
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"k: expected B, T, D of q and a divisor of H_q, {list(q.shape)}, got {list(k.shape)}")
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"q: expected D in {HEAD_DIMS}, got {q.shape[3]}; tilewise.attend takes any")


def flash_program(shape: tuple[int, ...], kv_heads: int, causal: bool, dtype: str, tiles: Tiles) -> Any:
    """The kernel for q of `shape` as a program of (q, k, v, out, lse): a block of threads owns one query tile of a head.

    Key tiles are walked in ascending order, so that every row sees key 0 in its first tile: m is finite from then on, and
    no -inf - -inf arises. Only tiles that some row sees in part are masked.
    """
    import tilelang.language as T

    batch, length, query_heads, dim = shape
    rows, keys, group, accumulate = tiles.rows, tiles.keys, query_heads // kv_heads, "float32"
    query_tiles, key_tiles, whole_tiles = -(-length // rows), -(-length // keys), length // keys
    factor = dim**-0.5 * math.log2(math.e)
    key_shape = (batch, length, kv_heads, dim)

    @T.prim_func
    def flash_forward(
        q: T.Tensor(shape, dtype),
        k: T.Tensor(key_shape, dtype),
        v: T.Tensor(key_shape, dtype),
        out: T.Tensor(shape, dtype),
        lse: T.Tensor(shape[:3], accumulate),
    ):
        # one warpgroup of 128 threads computes 64 rows; the loads get threads of their own from the compiler
        with T.Kernel(query_tiles, query_heads, batch, threads=2 * rows) as (program, head, b):
            q_tile = T.alloc_shared((rows, dim), dtype)
            k_tile = T.alloc_shared((keys, dim), dtype)
            v_tile = T.alloc_shared((keys, dim), dtype)
            o_tile = T.alloc_shared((rows, dim), dtype)
            s = T.alloc_fragment((rows, keys), accumulate)
            P = T.alloc_fragment((rows, keys), dtype)
            A = T.alloc_fragment((rows, dim), accumulate)
            m = T.alloc_fragment((rows,), accumulate)
            m_before = T.alloc_fragment((rows,), accumulate)
            rescale = T.alloc_fragment((rows,), accumulate)
            l = T.alloc_fragment((rows,), accumulate)
            l_tile = T.alloc_fragment((rows,), accumulate)

            # longest first: the short tiles of a causal call fill the end
            start = (query_tiles - 1 - program if causal else program) * rows
            masked_from = T.min((start + 1) // keys, whole_tiles) if causal else whole_tiles
            end = T.min(T.ceildiv(start + rows, keys), key_tiles) if causal else key_tiles

            T.copy(q[b, start : start + rows, head, :], q_tile)
            T.fill(A, 0)
            T.fill(l, 0)
            T.fill(m, -T.infinity(accumulate))
            for n in T.Pipelined(end, num_stages=tiles.stages):
                # rows past T are read as zero
                T.copy(k[b, n * keys : (n + 1) * keys, head // group, :], k_tile)
                T.gemm(q_tile, k_tile, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                if n >= masked_from:
                    for i, j in T.Parallel(rows, keys):
                        last = T.min(start + i, length - 1) if causal else length - 1
                        s[i, j] = T.if_then_else(n * keys + j <= last, s[i, j], -T.infinity(accumulate))
                T.copy(m, m_before)
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(rows):
                    rescale[i] = T.exp2((m_before[i] - m[i]) * factor)
                for i, j in T.Parallel(rows, keys):
                    s[i, j] = T.exp2(s[i, j] * factor - m[i] * factor)
                T.reduce_sum(s, l_tile, dim=1)
                for i in T.Parallel(rows):
                    l[i] = l[i] * rescale[i] + l_tile[i]
                T.copy(s, P)
                for i, j in T.Parallel(rows, dim):
                    A[i, j] *= rescale[i]
                T.copy(v[b, n * keys : (n + 1) * keys, head // group, :], v_tile)
                T.gemm(P, v_tile, A, policy=T.GemmWarpPolicy.FullRow)

            for i, j in T.Parallel(rows, dim):
                A[i, j] /= l[i]
            T.copy(A, o_tile)
            T.copy(o_tile, out[b, start : start + rows, head, :])
            for i in T.Parallel(rows):
                if start + i < length:
                    lse[b, start + i, head] = (m[i] * factor + T.log2(l[i])) * math.log(2)

    return flash_forward


@functools.lru_cache(maxsize=16)
def compiled(shape: tuple[int, ...], kv_heads: int, causal: bool, dtype: str, tiles: Tiles) -> Callable[..., Result]:
    """The kernel for the GPU of this machine; it allocates out and lse."""
    import tilelang

    # fast math: exp2 as one instruction, without the scaling that keeps subnormal results
    options = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
    return tilelang.compile(flash_program(shape, kv_heads, causal, dtype, tiles), out_idx=[3, 4], pass_configs=options)


def flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, tiles: Tiles | None = None) -> Result:
    """Dense attention by the TileLang kernel: out `[B, T, H_q, D]` in q's dtype and lse `[B, T, H_q]`, fp32, natural log.

    q is `[B, T, H_q, D]` and k, v are `[B, T, H_kv, D]`, bf16 or fp16, contiguous, on a CUDA device; D is 64 or 128. Query
    head h reads KV head `h // (H_q / H_kv)`; with `causal` row t sees keys `0 .. t`.

    Raises:
        ValueError, TypeError: what does not fit (`check_inputs`).
        ModuleNotFoundError: tilelang is not installed.
    """
    check_inputs(q, k, v)
    if not q.is_cuda:
        raise ValueError(f"q: expected a CUDA tensor, got {q.device}; tilewise.attend takes CPU tensors")
    dtype = str(q.dtype).removeprefix("torch.")
    out, lse = compiled(tuple(q.shape), k.shape[2], causal, dtype, tiles or Tiles())(q, k, v)
    return out, lse


def random_inputs(batch: int, length: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(batch, length, number, dim) for number in (heads[0], heads[1], heads[1])]
    return tuple(torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes)


def differences(x: Result, y: Result) -> tuple[float, ...]:
    """Largest absolute difference of two (out, lse)."""
    return tuple((a.double() - b.double()).abs().max().item() for a, b in zip(x, y, strict=True))


def compare(inputs: tuple[Tensor, ...], causal: bool, kernels: dict[str, Callable[..., Result]]) -> bool:
    """Print the errors of both against float64; whether TileLang's are at most twice tilewise's and a few roundings."""
    doubles = (x.double() for x in inputs)
    exact = tilewise.attend(*doubles, causal=causal, return_lse=True, impl="reference")
    errors = {name: differences(kernel(*inputs), exact) for name, kernel in kernels.items()}
    print(f"against float64, q {list(inputs[0].shape)}")
    for name, (out, lse) in errors.items():
        print(f"  {name:9} max |out error| {out:.2e}   max |lse error| {lse:.2e}")
    # the results' own rounding; for lse, whose terms are fp32, also those of exp2, log2 and the factor
    roundings = (torch.finfo(inputs[0].dtype).eps, 4 * torch.finfo(torch.float32).eps)
    allowed = [rounding * x.abs().max().item() for rounding, x in zip(roundings, exact, strict=True)]
    # a NaN is not within its limit
    return all(t <= 2 * w + a for t, w, a in zip(errors["tilelang"], errors["tilewise"], allowed, strict=True))


def measure(inputs: tuple[Tensor, ...], causal: bool, kernels: dict[str, Callable[..., Result]]) -> None:
    """Print median times, and how far the two results lie apart."""
    from triton.testing import do_bench

    batch, length, heads, dim = inputs[0].shape
    # a multiply and an add count as two, visible pairs only: 2 (d_k + d_v) a pair and query head
    operations = 4 * dim * batch * heads * (length * (length + 1) // 2 if causal else length**2)
    print(f"median time, q {list(inputs[0].shape)}")
    for name, kernel in kernels.items():
        milliseconds = do_bench(functools.partial(kernel, *inputs), return_mode="median")
        print(f"  {name:9} {milliseconds:8.3f} ms   {operations / milliseconds * 1e-9:6.0f} TFLOP/s")
    out, lse = differences(*(kernel(*inputs) for kernel in kernels.values()))
    print(f"  apart     max |out| {out:.2e}   max |lse| {lse:.2e}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Dense attention in TileLang beside tilewise.attend.")
    for name, default in dict(batch=1, length=16384, heads=16, kv_heads=16, rows=128, keys=128, stages=2).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, default=128)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--impl", default="auto", help="path of tilewise.attend")
    args = parser.parse_args(arguments)
    if min(args.batch, args.length, args.heads, args.kv_heads) < 1 or args.heads % args.kv_heads:
        parser.error(f"sizes of at least 1 and --kv-heads that divide --heads, got {args.heads} and {args.kv_heads}")
    try:
        tiles = Tiles(args.rows, args.keys, args.stages)
        import tilelang  # noqa: F401
    except ValueError as error:
        parser.error(str(error))
    except ModuleNotFoundError as error:
        print(f"this example needs the package tilelang: pip install tilelang ({error})", file=sys.stderr)
        return CANNOT_RUN
    if not torch.cuda.is_available():
        print("this example needs a CUDA device; none is visible", file=sys.stderr)
        return CANNOT_RUN
    kernels = {
        "tilewise": functools.partial(tilewise.attend, causal=args.causal, return_lse=True, impl=args.impl),
        "tilelang": functools.partial(flash, causal=args.causal, tiles=tiles),
    }
    heads, dtype = (args.heads, args.kv_heads), DTYPES[args.dtype]
    # a length that no tile divides
    if not compare(random_inputs(2, 333, heads, args.head_dim, dtype), args.causal, kernels):
        print("the two differ by more than rounding; no times are taken", file=sys.stderr)
        return DISAGREE
    measure(random_inputs(args.batch, args.length, heads, args.head_dim, dtype), args.causal, kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
