// One variant of the kernels: compiled once per instruction set with HW_VARIANT and the flags that belong to it.
// Uses nothing of the C++ library, so that no code of this instruction set is shared with other units.
#include "attention.h"
#include "linear.h"

namespace {

struct Buffers {
    union {
        LinearBuffers linear;
        AttentionBuffers attention;
    };
};

struct Share {
    int64_t begin, end;
};
Share share(const HwTeam *team, int64_t thread, int64_t count) {
    return {count * thread / team->threads, count * (thread + 1) / team->threads};
}

// out = x / rms(x) * weight over `n` values; reads and writes whole vectors when `n` is padded with zeros.
void rms_norm(const float *x, const float *weight, float *out, int64_t n, int64_t width, float eps) {
    vec squares = zero();
    int64_t d = 0;
    for (; d + 16 <= n; d += 16) { vec v = load(x + d); squares = fma(v, v, squares); }
    if (d < n) { vec v = load_partial(x + d, n - d); squares = fma(v, v, squares); }
    vec scale = broadcast(1.0f / __builtin_sqrtf(sum(squares) / float(width) + eps));
    for (d = 0; d + 16 <= n; d += 16) store(out + d, mul(mul(load(x + d), scale), load(weight + d)));
    if (d < n) store_partial(out + d, mul(mul(load_partial(x + d, n - d), scale), load_partial(weight + d, n - d)), n - d);
}

void rotate(const float *x, const float *cos, const float *sin, float *out, int64_t half) {
    int64_t d = 0;
    for (; d + 16 <= half; d += 16) {
        vec a = load(x + d), b = load(x + half + d), c = load(cos + d), s = load(sin + d);
        store(out + d, sub(mul(a, c), mul(b, s)));
        store(out + half + d, add(mul(b, c), mul(a, s)));
    }
    for (; d < half; d++) {
        float a = x[d], b = x[half + d];
        out[d] = a * cos[d] - b * sin[d];
        out[half + d] = b * cos[d] + a * sin[d];
    }
}

float bf16_at(const void *data, int64_t i) {
    uint32_t bits = uint32_t(((const uint16_t *)data)[i]) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

float f16_at(const void *data, int64_t i) {
    uint16_t lanes[16] = {((const uint16_t *)data)[i]};
    float values[16];
    store(values, f16(lanes));
    return values[0];
}

float quantised_at(const char *group, int64_t lane, int code) {
    const float *parameters = (const float *)group;
    return first_lane(fma(broadcast(parameters[lane]), broadcast(float(code)), broadcast(parameters[16 + lane])));
}

// Weight k of output `lane` of a panel.
float element(const HwMatrix &m, const char *panel, int64_t lane, int64_t k) {
    const uint8_t *codes = (const uint8_t *)panel + 128;
    switch (m.kind) {
        case HW_BF16: return bf16_at(panel, k / 2 * 32 + lane * 2 + k % 2);
        case HW_F16: return f16_at(panel, k * 16 + lane);
        case HW_F32: return ((const float *)panel)[k * 16 + lane];
        case HW_Q4: {
            const int64_t group = k / 32 * Q4::group_bytes, word = k % 32 / 8 * 64 + lane * 4, byte = k % 8 / 2;
            return quantised_at(panel + group, lane, codes[group + word + byte] >> (k % 2 * 4) & 15);
        }
        default: {
            const int64_t size = m.kind == HW_Q8 ? 32 : 16, group = k / size * (128 + size * 16);
            return quantised_at(panel + group, lane, codes[group + k % size * 16 + lane]);
        }
    }
}

int64_t panel_bytes(const HwMatrix &m) {
    switch (m.kind) {
        case HW_BF16: case HW_F16: return m.k * 32;
        case HW_F32: return m.k * 64;
        case HW_Q4: return bytes_of<Q4>(m.k);
        case HW_Q8: return bytes_of<Q8<32>>(m.k);
        default: return bytes_of<Q8<16>>(m.k);
    }
}

// One token's column of a panel.
void embed(const HwModel &m, int64_t token, float *out) {
    const HwMatrix &e = m.embedding;
    const char *panel = (const char *)e.data + token / 16 * panel_bytes(e);
    for (int64_t k = 0; k < e.k; k++) out[k] = element(e, panel, token % 16, k);
}

struct Step {
    HwTeam *team;
    int64_t thread;
    Buffers &buffers;
    const HwModel &m;
    const HwBatch &b;
    KvShape kv;
    int64_t query_width, qkv_stride, hidden_stride, query_stride, inner_stride;
    float *x, *query, *tail_x, *tail_query, *normed, *qkv, *inner;

    Step(HwTeam *team, int64_t thread, void *buffer, const HwModel &m, const HwBatch &b, float *scratch)
        : team(team), thread(thread), buffers(*(Buffers *)buffer), m(m), b(b), kv(m, b),
          query_width(m.num_heads * m.head_dim), qkv_stride(hw_stride(query_width + 2 * m.num_kv_heads * m.head_dim)),
          hidden_stride(hw_stride(m.hidden)), query_stride(hw_stride(query_width)), inner_stride(hw_stride(m.intermediate)) {
        const int64_t block = b.num_tokens < hw_row_block ? b.num_tokens : hw_row_block;
        x = scratch;
        query = x + b.num_tokens * hidden_stride;
        tail_x = query + b.num_tokens * query_stride;
        tail_query = tail_x + b.num_logit_rows * hidden_stride;
        normed = tail_query + b.num_logit_rows * query_stride;
        qkv = normed + block * hidden_stride;
        inner = qkv + block * qkv_stride;
    }

    void wait() { team->wait(team); }
    Share mine(int64_t count) { return share(team, thread, count); }

    void norm_rows(const float *from, const float *weight, int64_t rows) {
        Share s = mine(rows);
        for (int64_t r = s.begin; r < s.end; r++)
            rms_norm(from + r * hidden_stride, weight, normed + r * hidden_stride, hw_round16(m.hidden), m.hidden, m.rms_eps);
    }

    void product(const HwMatrix &w, const float *from, int64_t stride, int64_t rows, Output o) {
        linear(w, from, stride, rows, o, thread, team->threads, buffers.linear);
    }

    int64_t sequence_of(int64_t row, int64_t from) {
        while (b.query_starts[from + 1] <= row) from++;
        return from;
    }

    // Norm, rotation, cache write: one row of `qkv`.
    void place(const HwLayer &layer, int64_t index, float *row, int64_t token, int64_t seq) {
        const int64_t half = m.head_dim / 2, position = b.positions[token];
        const float *cos = m.cos + position * half, *sin = m.sin + position * half;
        for (int64_t h = 0; h < m.num_heads; h++) {
            float *q = row + h * m.head_dim;
            if (layer.q_norm) rms_norm(q, layer.q_norm, q, m.head_dim, m.head_dim, m.rms_eps);
            rotate(q, cos, sin, query + token * query_stride + h * m.head_dim, half);
        }
        for (int64_t d = query_width; d < query_stride; d++) query[token * query_stride + d] = 0.0f;
        for (int64_t h = 0; h < m.num_kv_heads; h++) {
            float *k = row + query_width + h * m.head_dim, *v = k + m.num_kv_heads * m.head_dim;
            if (layer.k_norm) rms_norm(k, layer.k_norm, k, m.head_dim, m.head_dim, m.rms_eps);
            float turned[max_head_dim];
            rotate(k, cos, sin, turned, half);
            write_kv(b, kv, seq, position, index, h, turned, v);
        }
    }

    void project(const HwLayer &layer, int64_t index, int64_t start, int64_t rows) {
        norm_rows(x + start * hidden_stride, layer.attention_norm, rows);
        wait();
        product(layer.qkv, normed, hidden_stride, rows, {STORE, qkv, qkv_stride, layer.qkv.bias});
        wait();
        Share s = mine(rows);
        int64_t seq = 0;
        for (int64_t r = s.begin; r < s.end; r++) {
            seq = sequence_of(start + r, seq);
            place(layer, index, qkv + r * qkv_stride, start + r, seq);
        }
        wait();
    }

    void attention(const HwAttention &call) {
        const int64_t group = m.num_heads / m.num_kv_heads, heads = group < max_rows ? group : max_rows;
        const int64_t rows = max_rows / heads, parts = (group + heads - 1) / heads;
        int64_t task = 0;
        int64_t mine = __atomic_fetch_add(&team->counter, 1, __ATOMIC_RELAXED);
        for (int64_t s = 0; s < b.num_seqs; s++)
            for (int64_t row = b.query_starts[s]; row < b.query_starts[s + 1]; row += rows)
                for (int64_t h = 0; h < m.num_kv_heads * parts; h++, task++) {
                    if (task != mine) continue;
                    mine = __atomic_fetch_add(&team->counter, 1, __ATOMIC_RELAXED);
                    int64_t left = b.query_starts[s + 1] - row, part = h % parts * heads;
                    AttentionTask t = {s, row, left < rows ? left : rows, h / parts, h / parts * group + part,
                                       group - part < heads ? group - part : heads};
                    attend(m, b, kv, call, t, buffers.attention);
                }
    }

    void mix(const HwLayer &layer, float *to, const float *from, int64_t rows) {
        product(layer.output, from, query_stride, rows, {ADD, to, hidden_stride, layer.output.bias});
        wait();
        norm_rows(to, layer.mlp_norm, rows);
        wait();
        product(layer.gate_up, normed, hidden_stride, rows, {SILU_MUL, inner, inner_stride, layer.gate_up.bias});
        wait();
        product(layer.down, inner, inner_stride, rows, {ADD, to, hidden_stride, layer.down.bias});
        wait();
    }

    template <class F> void row_blocks(int64_t rows, F &&each) {
        for (int64_t start = 0; start < rows; start += hw_row_block)
            each(start, rows - start < hw_row_block ? rows - start : hw_row_block);
    }

    // After the last attention only the rows that need logits go on.
    void keep_logit_rows() {
        Share s = mine(b.num_logit_rows);
        for (int64_t r = s.begin; r < s.end; r++) {
            int64_t row = b.logit_rows[r];
            memcpy(tail_x + r * hidden_stride, x + row * hidden_stride, size_t(hidden_stride) * 4);
            memcpy(tail_query + r * query_stride, query + row * query_stride, size_t(query_stride) * 4);
        }
        wait();
    }

    void run() {
        Share s = mine(b.num_tokens);
        for (int64_t t = s.begin; t < s.end; t++) embed(m, b.token_ids[t], x + t * hidden_stride);
        wait();
        float *to = x, *from = query;
        int64_t rows = b.num_tokens;
        for (int64_t l = 0; l < m.num_layers; l++) {
            const HwLayer &layer = m.layers[l];
            row_blocks(b.num_tokens, [&](int64_t start, int64_t count) { project(layer, l, start, count); });
            attention({query, query, query_stride, l, layer.window});
            wait();
            if (thread == 0) team->counter = 0;
            if (l + 1 == m.num_layers) {
                keep_logit_rows();
                to = tail_x, from = tail_query, rows = b.num_logit_rows;
            }
            row_blocks(rows, [&](int64_t start, int64_t count) {
                mix(layer, to + start * hidden_stride, from + start * query_stride, count);
            });
        }
        row_blocks(rows, [&](int64_t start, int64_t count) {
            norm_rows(to + start * hidden_stride, m.final_norm, count);
            wait();
            product(m.head, normed, hidden_stride, count,
                    {STORE, b.logits + start * b.logits_stride, b.logits_stride, m.head.bias});
            wait();
        });
    }
};

void forward(HwTeam *team, int64_t thread, void *buffer, const HwModel *m, const HwBatch *b, float *scratch) {
    Step(team, thread, buffer, *m, *b, scratch).run();
}

void linear_call(HwTeam *team, int64_t thread, void *buffer, const HwMatrix *w, const float *x, int64_t x_stride,
                 int64_t m, float *out, int64_t out_stride) {
    for (int64_t start = 0; start < m; start += hw_row_block)
        linear(*w, x + start * x_stride, x_stride, m - start < hw_row_block ? m - start : hw_row_block,
               {STORE, out + start * out_stride, out_stride, w->bias}, thread, team->threads,
               ((Buffers *)buffer)->linear);
}

void attend_call(HwTeam *team, int64_t thread, void *buffer, const HwModel *m, const HwBatch *b,
                 const HwAttention *call) {
    Step(team, thread, buffer, *m, *b, nullptr).attention(*call);
}

int64_t buffer_bytes() { return sizeof(Buffers); }

}  // namespace

#define HW_CONCAT_(a, b) a##b
#define HW_CONCAT(a, b) HW_CONCAT_(a, b)
#define HW_NAME_(a) #a
#define HW_NAME(a) HW_NAME_(a)
extern const HwVariant HW_CONCAT(hw_, HW_VARIANT) = {HW_NAME(HW_VARIANT), buffer_bytes, forward, linear_call, attend_call};
