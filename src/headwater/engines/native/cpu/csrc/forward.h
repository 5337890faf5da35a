// What every variant of the kernels offers to the dispatcher.
#pragma once
#include "abi.h"

// A team of threads inside one call. `wait` is a barrier; `next` hands out tasks and is reset between two barriers.
struct HwTeam {
    int64_t threads;
    void (*wait)(HwTeam *team);
    int64_t counter;
};

struct HwVariant {
    const char *isa;
    int64_t (*buffer_bytes)();  // per thread, 64-byte aligned
    void (*forward)(HwTeam *team, int64_t thread, void *buffer, const HwModel *model, const HwBatch *batch,
                    float *scratch);
    void (*linear)(HwTeam *team, int64_t thread, void *buffer, const HwMatrix *matrix, const float *x,
                   int64_t x_stride, int64_t m, float *out, int64_t out_stride);
    void (*attend)(HwTeam *team, int64_t thread, void *buffer, const HwModel *model, const HwBatch *batch,
                   const HwAttention *call);
};

extern const HwVariant hw_portable, hw_avx2, hw_avx512;

static inline int64_t hw_round16(int64_t n) { return (n + 15) / 16 * 16; }
static inline int64_t hw_least(int64_t a, int64_t b) { return a < b ? a : b; }
// An odd multiple of 16 floats: rows never fall on the same cache sets.
static inline int64_t hw_stride(int64_t n) { return (n + 15) / 16 % 2 ? hw_round16(n) : hw_round16(n) + 16; }

static const int64_t hw_row_block = 256;  // most rows that go through a layer's products at once

// Activations of one step, in floats from the start of the scratch memory.
struct HwScratch {
    int64_t query_width, hidden_stride, query_stride, qkv_stride, inner_stride;
    int64_t x, query, tail_x, tail_query, normed, qkv, inner, end;  // tail: the rows that need logits

    HwScratch(const HwModel &m, int64_t num_tokens, int64_t num_logit_rows)
        : query_width(m.num_heads * m.head_dim), hidden_stride(hw_stride(m.hidden)),
          query_stride(hw_stride(query_width)), qkv_stride(hw_stride(query_width + 2 * m.num_kv_heads * m.head_dim)),
          inner_stride(hw_stride(m.intermediate)) {
        const int64_t block = hw_least(num_tokens, hw_row_block);
        x = 0;
        query = x + num_tokens * hidden_stride;
        tail_x = query + num_tokens * query_stride;
        tail_query = tail_x + num_logit_rows * hidden_stride;
        normed = tail_query + num_logit_rows * query_stride;
        qkv = normed + block * hidden_stride;
        inner = qkv + block * qkv_stride;
        end = inner + block * inner_stride;
    }
};
