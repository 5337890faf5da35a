// One variant of the kernels: compiled once per instruction set with HW_VARIANT and the flags that belong to it.
// Uses nothing of the C++ library, so that no code of this instruction set is shared with other units.
#include "attention.h"
#include "linear.h"
#include "rows.h"

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

struct Step {
    HwTeam *team;
    int64_t thread;
    Buffers &buffers;
    const HwModel &m;
    const HwBatch &b;
    const KvShape kv;
    const HwScratch at;
    float *const x, *const query, *const tail_x, *const tail_query, *const normed, *const qkv, *const inner;

    Step(HwTeam *team, int64_t thread, void *buffer, const HwModel &m, const HwBatch &b, float *scratch)
        : team(team), thread(thread), buffers(*(Buffers *)buffer), m(m), b(b), kv(m, b),
          at(m, b.num_tokens, b.num_logit_rows), x(scratch + at.x), query(scratch + at.query),
          tail_x(scratch + at.tail_x), tail_query(scratch + at.tail_query), normed(scratch + at.normed),
          qkv(scratch + at.qkv), inner(scratch + at.inner) {}

    void wait() { team->wait(team); }
    Share mine(int64_t count) { return share(team, thread, count); }

    void norm_rows(const float *from, const float *weight, int64_t rows) {
        Share s = mine(rows);
        for (int64_t r = s.begin; r < s.end; r++)
            rms_norm(from + r * at.hidden_stride, weight, normed + r * at.hidden_stride, hw_round16(m.hidden), m.hidden,
                     m.rms_eps);
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
            rotate(q, cos, sin, query + token * at.query_stride + h * m.head_dim, half);
        }
        for (int64_t d = at.query_width; d < at.query_stride; d++) query[token * at.query_stride + d] = 0.0f;
        for (int64_t h = 0; h < m.num_kv_heads; h++) {
            float *k = row + at.query_width + h * m.head_dim, *v = k + m.num_kv_heads * m.head_dim;
            if (layer.k_norm) rms_norm(k, layer.k_norm, k, m.head_dim, m.head_dim, m.rms_eps);
            float turned[max_head_dim];
            rotate(k, cos, sin, turned, half);
            write_kv(b, kv, seq, position, index, h, turned, v);
        }
    }

    void project(const HwLayer &layer, int64_t index, int64_t start, int64_t rows) {
        norm_rows(x + start * at.hidden_stride, layer.attention_norm, rows);
        wait();
        product(layer.qkv, normed, at.hidden_stride, rows, {STORE, qkv, at.qkv_stride, layer.qkv.bias});
        wait();
        Share s = mine(rows);
        int64_t seq = 0;
        for (int64_t r = s.begin; r < s.end; r++) {
            seq = sequence_of(start + r, seq);
            place(layer, index, qkv + r * at.qkv_stride, start + r, seq);
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
                                       group - part < heads ? group - part : heads, nullptr};
                    Context next = {b, kv, s, call.layer, h / parts + 1};
                    if (next.head < m.num_kv_heads) t.next = &next;
                    Scan{m, b, kv, call, t, buffers.attention}.run();
                }
    }

    void mix(const HwLayer &layer, float *to, const float *from, int64_t rows) {
        product(layer.output, from, at.query_stride, rows, {ADD, to, at.hidden_stride, layer.output.bias});
        wait();
        norm_rows(to, layer.mlp_norm, rows);
        wait();
        product(layer.gate_up, normed, at.hidden_stride, rows, {SILU_MUL, inner, at.inner_stride, layer.gate_up.bias});
        wait();
        product(layer.down, inner, at.inner_stride, rows, {ADD, to, at.hidden_stride, layer.down.bias});
        wait();
    }

    template <class F> void row_blocks(int64_t rows, F &&each) {
        for (int64_t start = 0; start < rows; start += hw_row_block)
            each(start, hw_least(rows - start, hw_row_block));
    }

    // After the last attention only the rows that need logits go on.
    void keep_logit_rows() {
        Share s = mine(b.num_logit_rows);
        for (int64_t r = s.begin; r < s.end; r++) {
            int64_t row = b.logit_rows[r];
            memcpy(tail_x + r * at.hidden_stride, x + row * at.hidden_stride, size_t(at.hidden_stride) * 4);
            memcpy(tail_query + r * at.query_stride, query + row * at.query_stride, size_t(at.query_stride) * 4);
        }
        wait();
    }

    void run() {
        Share s = mine(b.num_tokens);
        for (int64_t t = s.begin; t < s.end; t++) embed(m, b.token_ids[t], x + t * at.hidden_stride);
        wait();
        float *to = x, *from = query;
        int64_t rows = b.num_tokens;
        for (int64_t l = 0; l < m.num_layers; l++) {
            const HwLayer &layer = m.layers[l];
            row_blocks(b.num_tokens, [&](int64_t start, int64_t count) { project(layer, l, start, count); });
            attention({query, query, at.query_stride, l, layer.window});
            wait();
            if (thread == 0) team->counter = 0;
            if (l + 1 == m.num_layers) {
                keep_logit_rows();
                to = tail_x, from = tail_query, rows = b.num_logit_rows;
            }
            row_blocks(rows, [&](int64_t start, int64_t count) {
                mix(layer, to + start * at.hidden_stride, from + start * at.query_stride, count);
            });
        }
        row_blocks(rows, [&](int64_t start, int64_t count) {
            norm_rows(to + start * at.hidden_stride, m.final_norm, count);
            wait();
            product(m.head, normed, at.hidden_stride, count,
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
        linear(*w, x + start * x_stride, x_stride, hw_least(m - start, hw_row_block),
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
extern const HwVariant HW_CONCAT(hw_, HW_VARIANT) = {HW_NAME(HW_VARIANT), buffer_bytes, forward, linear_call,
                                                     attend_call};
