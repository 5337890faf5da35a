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
constexpr int64_t scan_panels = tile_tokens / 16;
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

// The cache of one sequence, layer and KV head.
struct Context {
    const HwBatch &b;
    const KvShape &s;
    int64_t seq, layer, head;

    const float *block(int64_t position) const {
        return kv_head(b, s, b.block_tables[seq * b.table_stride + position / s.block_size], layer, head);
    }
    const char *keys(int64_t position) const {
        return (const char *)(block(position) + position % s.block_size * s.head_dim);
    }
    const char *values(int64_t position) const {
        return (const char *)(block(position) + s.head_dim * s.block_size + position % s.block_size * 16);
    }
};

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

// Rows [row, row + rows) of one sequence times `heads` query heads that share one KV head.
struct AttentionTask {
    int64_t seq, row, rows, kv_head, first_head, heads;
    const Context *next;  // what is likely scanned after this, or null
};

// Where a scan begins: tiles lie at absolute positions.
HW_INLINE int64_t first_tile(float lowest_seen) {
    return lowest_seen > 0 ? int64_t(lowest_seen) / tile_tokens * tile_tokens : 0;
}

// One query's softmax so far. It sees positions [low, end).
struct RowState {
    float low, end, highest;
    vec sum;
};

// Turns the scores of one query, of positions `first` on, into weights in place; returns the factor for what was
// summed before.
HW_INLINE float soften(float *scores, int64_t tokens, float first, RowState &state) {
    vec highest = broadcast(state.highest);
    const vec masked = broadcast(-__builtin_inff());
    const vec index = lane_index(), low = broadcast(state.low), end = broadcast(state.end);
    for (int64_t t = 0; t < tokens; t += 16) {
        vec position = add(index, broadcast(first + float(t)));
        vec s = select_less(position, low, masked, select_less(position, end, load(scores + t), masked));
        store(scores + t, s);
        highest = max(highest, s);
    }
    const float top = max_of(highest), factor = first_lane(exp(broadcast(state.highest - top)));
    state.sum = mul(state.sum, broadcast(factor));
    for (int64_t t = 0; t < tokens; t += 16) {
        vec p = exp(sub(load(scores + t), broadcast(top)));
        store(scores + t, p);
        state.sum = add(state.sum, p);
    }
    state.highest = top;
    return factor;
}

struct Scan {
    const HwModel &m;
    const HwBatch &b;
    const KvShape &s;
    const HwAttention &call;
    const AttentionTask &task;
    AttentionBuffers &buffers;
    const Context context{b, s, task.seq, call.layer, task.kv_head};
    const int64_t queries = task.rows * task.heads, query_stride = s.padded_dim + 16, dims = s.padded_dim / 16;
    RowState state[max_rows] = {};

    int64_t place(int64_t i) const {
        return (task.row + i / task.heads) * call.query_stride + (task.first_head + i % task.heads) * s.head_dim;
    }

    void run() {
        for (int64_t i = 0; i < queries; i++) {
            const float *q = call.query + place(i);
            const float end = float(b.positions[task.row + i / task.heads] + 1);
            for (int64_t d = 0; d < s.head_dim; d++) buffers.query[i * query_stride + d] = q[d] * m.softmax_scale;
            state[i] = {call.window ? end - float(call.window) : 0.0f, end, -1e30f, zero()};
        }
        memset(buffers.sums, 0, size_t(queries * s.padded_dim) * sizeof(float));
        const int64_t begin = first_tile(state[0].low), end = int64_t(state[queries - 1].end);  // rows ascend
        for (int64_t t0 = begin; t0 < end; t0 += tile_tokens) {
            const int64_t tokens = end - t0 < tile_tokens ? end - t0 : tile_tokens;
            score(t0, tokens);
            for (int64_t i = 0; i < queries; i++) {
                float factor = soften(buffers.scores + i * tile_tokens, (tokens + 15) / 16 * 16, float(t0), state[i]);
                float *sums = buffers.sums + i * s.padded_dim;
                for (int64_t d = 0; d < s.padded_dim; d += 16) store(sums + d, mul(load(sums + d), broadcast(factor)));
            }
            const bool last = t0 + tile_tokens >= end;
            accumulate(t0, tokens, last ? task.next : &context, last ? begin : t0 + tile_tokens, end);
        }
        for (int64_t i = 0; i < queries; i++) finish(i);
    }

    // Keys: one panel per 16 tokens. The values that are needed next are fetched meanwhile.
    void score(int64_t t0, int64_t tokens) {
        const char *keys[scan_panels], *values[scan_panels];
        const int64_t panels = (tokens + 15) / 16;
        for (int64_t p = 0; p < panels; p++)
            keys[p] = context.keys(t0 + p * 16), values[p] = context.values(t0 + p * 16);
        tile_rows<Cached>({buffers.query, query_stride, keys, 1, 0, s.head_dim, s.head_dim, buffers.scores, tile_tokens,
                           false, 0, values}, queries, panels);
    }

    // Values: 16 dimensions per panel, stretches of 16 tokens, one stretch after the other. The keys of the next tile,
    // at `next_position` of `next`, are fetched meanwhile.
    void accumulate(int64_t t0, int64_t tokens, const Context *next, int64_t next_position, int64_t end) {
        const char *values[scan_panels * max_head_dim / 16], *fetch[scan_panels * max_head_dim / 16];
        const int64_t panels = (tokens + 15) / 16;
        for (int64_t p = 0; p < panels; p++) {
            const char *base = context.values(t0 + p * 16), *keys = base;
            if (next && next_position + p * 16 < end) keys = next->keys(next_position + p * 16);
            for (int64_t d = 0; d < dims; d++) {
                values[p * dims + d] = base + d * s.block_size * 16 * 4;
                fetch[p * dims + d] = keys + d * 16 * 16 * 4;
            }
        }
        tile_rows<Cached>({buffers.scores, tile_tokens, values, panels, dims, 16, tokens - (panels - 1) * 16,
                           buffers.sums, s.padded_dim, true, 0, fetch}, queries, dims);
    }

    void finish(int64_t i) {
        float *out = call.out + place(i);
        const vec total = broadcast(sum(state[i].sum));
        for (int64_t d = 0; d < s.head_dim; d += 16) {
            vec result = div(load(buffers.sums + i * s.padded_dim + d), total);
            if (d + 16 <= s.head_dim) store(out + d, result);
            else store_partial(out + d, result, s.head_dim - d);
        }
    }
};

}  // namespace
