"""Paged attention in Triton: block tables, grouped queries, sliding window, any strides.

One program computes a tile of query rows of one sequence for one KV head, with all query heads of that KV head as
rows of the same tile, and walks the keys in tiles of `KEYS` in ascending order with a running softmax.

- `attend_whole` walks the whole context and writes the output: prefill.
- `attend_split` walks one stretch of `SPLIT` keys, cut at absolute positions, and writes a partial result;
  `join_splits` adds the stretches up in ascending order: decode, where few sequences must fill a GPU. Cuts depend on
  positions alone, so the sum of a row has one order whatever the batch or the launch grid.

Sums and softmax are float32; products of float32 inputs are IEEE (no TF32).
"""

# Kernels are Triton's language, not Python: compile-time values are upper case by custom, arguments have no types.
# ruff: noqa: N803, PLR0913
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def _attend_tile(
    query, keys, values, table, row0, num_rows, context, key_from, key_to, scale, window, kv_head,
    query_stride, block_stride, token_stride, head_stride,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Running softmax of tile rows over keys [key_from, key_to): accumulator, maximum and sum per row."""
    tile = tl.arange(0, ROWS)
    row = row0 + tile // GROUP_PAD
    member = tile % GROUP_PAD
    dim = tl.arange(0, DIM_PAD)
    row_used = (row < num_rows) & (member < GROUP)
    query_offsets = row[:, None].to(tl.int64) * query_stride + (kv_head * GROUP + member[:, None]) * DIM + dim[None, :]
    q = tl.load(query + query_offsets, mask=row_used[:, None] & (dim[None, :] < DIM), other=0.0)
    position = context - num_rows + row
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for start in range(key_from, key_to, KEYS):
        key = start + tl.arange(0, KEYS)
        key_used = key < key_to
        block = tl.load(table + key // BLOCK, mask=key_used, other=0).to(tl.int64)
        key_offsets = block * block_stride + (key % BLOCK) * token_stride + kv_head * head_stride
        in_reach = key_used[:, None] & (dim[None, :] < DIM)
        k = tl.load(keys + key_offsets[:, None] + dim[None, :], mask=in_reach, other=0.0)
        v = tl.load(values + key_offsets[:, None] + dim[None, :], mask=in_reach, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = key_used[None, :] & (key[None, :] <= position[:, None])
        seen = seen & ((window == 0) | (key[None, :] > position[:, None] - window))
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        floor = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp(scores - floor[:, None])
        shrink = tl.exp(best - floor)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    return sums, best, total


@triton.jit
def attend_whole(
    out, query, keys, values, tile_sequences, tile_rows, query_starts, context_lens, tables, scale, window,
    out_stride, query_stride, table_stride, block_stride, token_stride, head_stride,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv_heads). Tile i covers rows from `tile_rows[i]` of sequence `tile_sequences[i]`."""
    sequence = tl.load(tile_sequences + tl.program_id(0))
    row0 = tl.load(tile_rows + tl.program_id(0))
    kv_head = tl.program_id(1)
    first_row = tl.load(query_starts + sequence)
    num_rows = tl.load(query_starts + sequence + 1) - first_row
    context = tl.load(context_lens + sequence)
    first_position = context - num_rows + row0
    key_from = tl.where(window > 0, tl.maximum(first_position - window + 1, 0), 0) // KEYS * KEYS
    key_to = tl.minimum(context, first_position + ROWS // GROUP_PAD)
    sums, _, total = _attend_tile(
        query + first_row.to(tl.int64) * query_stride, keys, values, tables + sequence.to(tl.int64) * table_stride,
        row0, num_rows, context, key_from, key_to, scale, window, kv_head,
        query_stride, block_stride, token_stride, head_stride,
        GROUP, GROUP_PAD, ROWS, KEYS, DIM, DIM_PAD, BLOCK,
    )  # fmt: skip
    tile = tl.arange(0, ROWS)
    row = row0 + tile // GROUP_PAD
    member = tile % GROUP_PAD
    dim = tl.arange(0, DIM_PAD)
    offsets = (first_row + row[:, None]).to(tl.int64) * out_stride + (kv_head * GROUP + member[:, None]) * DIM
    used = ((row < num_rows) & (member < GROUP))[:, None] & (dim[None, :] < DIM)
    mean = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + offsets + dim[None, :], mean.to(out.dtype.element_ty), mask=used)


@triton.jit
def attend_split(
    partial, stats, query, keys, values, context_lens, tables, scale, window,
    query_stride, table_stride, block_stride, token_stride, head_stride, num_splits,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, kv_heads, splits); one row per sequence. Writes sums, and maximum and total, of its stretch."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + sequence)
    first_seen = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    key_from = tl.maximum(split * SPLIT, first_seen // KEYS * KEYS)
    key_to = tl.minimum(context, (split + 1) * SPLIT)
    if key_from < key_to:
        sums, best, total = _attend_tile(
            query + sequence.to(tl.int64) * query_stride, keys, values, tables + sequence.to(tl.int64) * table_stride,
            0, 1, context, key_from, key_to, scale, window, kv_head,
            query_stride, block_stride, token_stride, head_stride,
            GROUP, GROUP_PAD, ROWS, KEYS, DIM, DIM_PAD, BLOCK,
        )  # fmt: skip
        member = tl.arange(0, ROWS)
        dim = tl.arange(0, DIM_PAD)
        slot = ((sequence * tl.num_programs(1) + kv_head) * GROUP + member) * num_splits + split
        used = member < GROUP
        tl.store(partial + slot[:, None].to(tl.int64) * DIM_PAD + dim[None, :], sums, mask=used[:, None])
        tl.store(stats + slot * 2, best, mask=used)
        tl.store(stats + slot * 2 + 1, total, mask=used)


@triton.jit
def join_splits(
    out, partial, stats, context_lens, window, out_stride, num_splits, num_heads,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, heads). Adds the stretches in ascending order."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + sequence)
    first_seen = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    dim = tl.arange(0, DIM_PAD)
    best = float("-inf")
    total = 0.0
    sums = tl.zeros([DIM_PAD], tl.float32)
    for split in range(first_seen // KEYS * KEYS // SPLIT, (context + SPLIT - 1) // SPLIT):
        slot = (sequence * num_heads + head) * num_splits + split
        split_best = tl.load(stats + slot * 2)
        new_best = tl.maximum(best, split_best)
        floor = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, weight = tl.exp(best - floor), tl.exp(split_best - floor)
        total = total * shrink + tl.load(stats + slot * 2 + 1) * weight
        sums = sums * shrink + tl.load(partial + slot.to(tl.int64) * DIM_PAD + dim) * weight
        best = new_best
    mean = sums / tl.where(total == 0.0, 1.0, total)
    offsets = sequence.to(tl.int64) * out_stride + head * DIM + dim
    tl.store(out + offsets, mean.to(out.dtype.element_ty), mask=dim < DIM)
