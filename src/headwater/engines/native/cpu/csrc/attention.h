// Attention over block tables, and the writes that feed it.
//
// A block holds, for each layer and KV head, first K as panels of 16 tokens [block_size / 16][head_dim][16], then V as
// panels of 16 dimensions [padded head_dim / 16][block_size][16]; so scores and sums are both panel products.
//
// Each (row, head) scans its context in tiles of `tile_tokens` at absolute positions with a running maximum; what else
// is in the batch, how a prompt was cut and where blocks lie cannot change a bit. Slots beyond a row's context are
// never multiplied, so stale or non-finite contents of a reused block cannot reach a result.
#pragma once
#include "tile.h"

namespace {

constexpr int64_t tile_tokens = 128;
constexpr int64_t max_head_dim = 512;

struct AttentionBuffers {
    alignas(64) float query[max_rows * (max_head_dim + 16)];
    alignas(64) float scores[max_rows * tile_tokens];
    alignas(64) float sums[max_rows * max_head_dim];
};

struct KvShape {
    int64_t head_dim, padded_dim, block_size, head_floats, layer_floats;
    KvShape(const HwModel &m, const HwBatch &b)
        : head_dim(m.head_dim), padded_dim((m.head_dim + 15) / 16 * 16), block_size(b.block_size),
          head_floats((head_dim + padded_dim) * block_size), layer_floats(head_floats * m.num_kv_heads) {}
};

HW_INLINE float *kv_head(const HwBatch &b, const KvShape &s, int64_t block, int64_t layer, int64_t head) {
    return b.kv + block * b.block_floats + layer * s.layer_floats + head * s.head_floats;
}

void write_kv(const HwBatch &b, const KvShape &s, int64_t seq, int64_t position, int64_t layer, int64_t head,
              const float *k, const float *v) {
    int64_t block = b.block_tables[seq * b.table_stride + position / s.block_size], slot = position % s.block_size;
    float *base = kv_head(b, s, block, layer, head);
    float *keys = base + slot / 16 * 16 * s.head_dim + slot % 16;
    for (int64_t d = 0; d < s.head_dim; d++) keys[d * 16] = k[d];
    float *values = base + s.head_dim * s.block_size + slot * 16;
    int64_t d = 0;
    for (; d + 16 <= s.head_dim; d += 16) store(values + d * s.block_size, load(v + d));
    if (d < s.head_dim) store(values + d * s.block_size, load_partial(v + d, s.head_dim - d));
}

// Rows [row, row + rows) of one sequence times `group` query heads that share one KV head.
struct AttentionTask {
    int64_t seq, row, rows, kv_head, first_head, heads;
};

struct RowState {
    float highest;
    vec sum;
};

// Turns the scores of one query into weights, in place; returns the factor for what was summed before.
HW_INLINE float soften(float *scores, int64_t tokens, float first, float lowest_seen, float end, RowState &state) {
    vec highest = broadcast(state.highest);
    const vec masked = broadcast(-__builtin_inff());
    const vec index = lane_index(), low = broadcast(lowest_seen), high = broadcast(end);
    for (int64_t t = 0; t < tokens; t += 16) {
        vec position = add(index, broadcast(first + float(t)));
        vec s = select_less(position, low, masked, select_less(position, high, load(scores + t), masked));
        store(scores + t, s);
        highest = max(highest, s);
    }
    float top = max_of(highest);
    float factor = first_lane(exp(broadcast(state.highest - top)));
    state.sum = mul(state.sum, broadcast(factor));
    for (int64_t t = 0; t < tokens; t += 16) {
        vec p = exp(sub(load(scores + t), broadcast(top)));
        store(scores + t, p);
        state.sum = add(state.sum, p);
    }
    state.highest = top;
    return factor;
}

void attend(const HwModel &m, const HwBatch &b, const KvShape &s, const HwAttention &call, const AttentionTask &task,
            AttentionBuffers &buffers) {
    const int64_t queries = task.rows * task.heads, query_stride = s.padded_dim + 16;
    const int32_t *table = b.block_tables + task.seq * b.table_stride;
    RowState state[max_rows];
    float ends[max_rows], lows[max_rows];
    for (int64_t i = 0; i < queries; i++) {
        int64_t row = task.row + i / task.heads, head = task.first_head + i % task.heads;
        const float *q = call.query + row * call.query_stride + head * s.head_dim;
        for (int64_t d = 0; d < s.head_dim; d++) buffers.query[i * query_stride + d] = q[d] * m.softmax_scale;
        ends[i] = float(b.positions[row] + 1);
        lows[i] = call.window ? ends[i] - float(call.window) : 0.0f;
        state[i] = {-1e30f, zero()};
    }
    memset(buffers.sums, 0, size_t(queries * s.padded_dim) * sizeof(float));
    const int64_t end = int64_t(ends[queries - 1]);  // rows ascend
    int64_t begin = lows[0] > 0 ? int64_t(lows[0]) / tile_tokens * tile_tokens : 0;
    for (int64_t t0 = begin; t0 < end; t0 += tile_tokens) {
        const int64_t tokens = end - t0 < tile_tokens ? end - t0 : tile_tokens, key_panels = (tokens + 15) / 16;
        const char *keys[tile_tokens / 16];
        for (int64_t p = 0; p < key_panels; p++) {
            int64_t position = t0 + p * 16;
            keys[p] = (const char *)(kv_head(b, s, table[position / s.block_size], call.layer, task.kv_head) +
                                     position % s.block_size * s.head_dim);
        }
        tile_rows<Cached>({buffers.query, query_stride, keys, 1, 0, s.head_dim, s.head_dim, buffers.scores, tile_tokens,
                        false}, queries, key_panels);
        for (int64_t i = 0; i < queries; i++) {
            float factor = soften(buffers.scores + i * tile_tokens, key_panels * 16, float(t0), lows[i], ends[i],
                                  state[i]);
            float *sums = buffers.sums + i * s.padded_dim;
            for (int64_t d = 0; d < s.padded_dim; d += 16) store(sums + d, mul(load(sums + d), broadcast(factor)));
        }
        // Values: 16 dimensions per panel, stretches of 16 tokens, one stretch after the other.
        const int64_t dims = s.padded_dim / 16;
        const char *values[tile_tokens / 16 * (max_head_dim / 16)];
        for (int64_t p = 0; p < key_panels; p++) {
            int64_t position = t0 + p * 16;
            const float *base = kv_head(b, s, table[position / s.block_size], call.layer, task.kv_head) +
                                s.head_dim * s.block_size + position % s.block_size * 16;
            for (int64_t d = 0; d < dims; d++) values[p * dims + d] = (const char *)(base + d * s.block_size * 16);
        }
        tile_rows<Cached>({buffers.scores, tile_tokens, values, key_panels, dims, 16, tokens - (key_panels - 1) * 16,
                        buffers.sums, s.padded_dim, true}, queries, dims);
    }
    for (int64_t i = 0; i < queries; i++) {
        int64_t row = task.row + i / task.heads, head = task.first_head + i % task.heads;
        float *out = call.out + row * call.query_stride + head * s.head_dim;
        vec total = broadcast(sum(state[i].sum));
        for (int64_t d = 0; d < s.head_dim; d += 16) {
            vec result = div(load(buffers.sums + i * s.padded_dim + d), total);
            if (d + 16 <= s.head_dim) store(out + d, result);
            else store_partial(out + d, result, s.head_dim - d);
        }
    }
}

}  // namespace
