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

// Scratch layout, shared by the variants and `hw_scratch_floats`.
static inline int64_t hw_round16(int64_t n) { return (n + 15) / 16 * 16; }
// An odd multiple of 16 floats: rows never fall on the same cache sets.
static inline int64_t hw_stride(int64_t n) { return (n + 15) / 16 % 2 ? hw_round16(n) : hw_round16(n) + 16; }
static const int64_t hw_row_block = 256;
