// out = x @ W^T over panels.
//
// Weights are widened to float32 in registers; quantised ones, for many rows, in a buffer. Groups of panels are read
// one after the other, a stretch of K at a time, and used by all row tiles while they lie in the cache; meanwhile the
// next stretch is fetched from memory: without that the hardware's prefetchers stumble at every page, and a step at
// batch 8 takes more than twice as long.
#pragma once
#include "forward.h"
#include "tile.h"

namespace {

enum Epilogue { STORE, ADD, SILU_MUL };

struct Output {
    Epilogue epilogue;
    float *out;
    int64_t stride;
    const float *bias;
};

// Writes `panels` panels of finished sums of one row, the first being panel `first` of the matrix.
HW_INLINE void finish_row(const Output &o, const float *acc, int64_t row, int64_t first, int64_t panels) {
    float *out = o.out + row * o.stride;
    for (int64_t p = 0; p < panels; p++) {
        int64_t column = (first + p) * 16;
        vec sum = load(acc + p * 16);
        if (o.bias) sum = add(sum, load(o.bias + column));
        if (o.epilogue == SILU_MUL) {
            p++;
            vec up = load(acc + p * 16);
            if (o.bias) up = add(up, load(o.bias + column + 16));
            vec gate = div(sum, add(broadcast(1.0f), exp(sub(zero(), sum))));
            store(out + column / 2, mul(gate, up));
        } else if (o.epilogue == ADD) {
            store(out + column, add(load(out + column), sum));
        } else {
            store(out + column, sum);
        }
    }
}

constexpr int64_t group_panels = 4;
constexpr int64_t stretch_k = 2048;  // a stretch of one group fits the second-level cache

constexpr int64_t widened_k = 64;     // widened panels of one group fit the first-level cache
constexpr int64_t narrow_tiles = 2;   // quantised weights are widened once for more row tiles than this

struct LinearBuffers {
    alignas(64) float acc[hw_row_block * group_panels * 16];
    alignas(64) float widened[group_panels * widened_k * 16];
};

template <class W> void widen(const char *panel, int64_t k, float *out, int64_t ahead) {
    for (int64_t group = 0; group < k / W::group; group++) {
        const vec scale = load((const float *)panel), offset = load((const float *)panel + 16);
        for (int64_t line = 0; line < W::group_bytes; line += 64) __builtin_prefetch(panel + ahead + line);
        panel += 128;
        for (int64_t step = 0; step < W::group / W::step; step++, panel += W::step_bytes) {
            const typename W::Raw raw = W::raw(panel);
            HW_UNROLL for (int j = 0; j < W::step; j++, out += 16) store(out, fma(scale, W::code(raw, j), offset));
        }
    }
}

// Panels [first, first + panels) of a matrix for `m` rows: panels <= group_panels, m <= hw_row_block.
template <class W> struct Group {
    const HwMatrix &w;
    const int64_t first, panels;
    const float *x;
    const int64_t x_stride, m;
    LinearBuffers &b;

    int64_t row_tiles() const { return (m + max_rows - 1) / max_rows; }

    // All row tiles over [k0, k0 + k) of `source`.
    template <class S> void multiply(const char *const *source, int64_t k0, int64_t k, int64_t ahead) {
        const int64_t tiles = row_tiles(), stride = group_panels * 16;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t begin = m * t / tiles, rows = m * (t + 1) / tiles - begin;
            tile_rows<S>({x + begin * x_stride + k0, x_stride, source, 1, 0, k, k, b.acc + begin * stride, stride,
                          k0 > 0, ahead, source}, rows, panels);
        }
    }

    void run() {
        const bool widens = W::quantised && row_tiles() > narrow_tiles;
        const int64_t stretch = widens ? widened_k : stretch_k, panel_bytes = bytes_of<W>(w.k);
        for (int64_t k0 = 0; k0 < w.k; k0 += stretch) {
            const int64_t k = w.k - k0 < stretch ? w.k - k0 : stretch, skipped = bytes_of<W>(k0);
            // The next stretch of the same panel, or of the next group's.
            const int64_t ahead = k0 + k == w.k ? group_panels * panel_bytes - skipped : bytes_of<W>(k);
            const char *source[group_panels];
            for (int64_t p = 0; p < panels; p++)
                source[p] = (const char *)w.data + (first + p) * panel_bytes + skipped;
            if (!widens) {
                multiply<W>(source, k0, k, ahead);
                continue;
            }
            if constexpr (W::quantised) {
                for (int64_t p = 0; p < panels; p++) {
                    float *out = b.widened + p * widened_k * 16;
                    widen<W>(source[p], k, out, ahead);
                    source[p] = (const char *)out;
                }
                multiply<Cached>(source, k0, k, 0);
            }
        }
    }
};

template <class W>
void linear_group(const HwMatrix &w, int64_t first, int64_t panels, const float *x, int64_t x_stride, int64_t m,
                  const Output &o, LinearBuffers &b) {
    Group<W>{w, first, panels, x, x_stride, m, b}.run();
    for (int64_t r = 0; r < m; r++) finish_row(o, b.acc + r * group_panels * 16, r, first, panels);
}

// The share of thread `thread` of `threads`: whole groups of panels.
void linear(const HwMatrix &w, const float *x, int64_t x_stride, int64_t m, const Output &o, int64_t thread,
            int64_t threads, LinearBuffers &b) {
    int64_t panels = w.n / 16, groups = (panels + group_panels - 1) / group_panels;
    for (int64_t g = groups * thread / threads; g < groups * (thread + 1) / threads; g++) {
        int64_t first = g * group_panels, count = panels - first < group_panels ? panels - first : group_panels;
        switch (w.kind) {
            case HW_BF16: linear_group<Bf16>(w, first, count, x, x_stride, m, o, b); break;
            case HW_F16: linear_group<F16>(w, first, count, x, x_stride, m, o, b); break;
            case HW_F32: linear_group<F32>(w, first, count, x, x_stride, m, o, b); break;
            case HW_Q4: linear_group<Q4>(w, first, count, x, x_stride, m, o, b); break;
            case HW_Q8: linear_group<Q8<32>>(w, first, count, x, x_stride, m, o, b); break;
            case HW_Q8_16: linear_group<Q8<16>>(w, first, count, x, x_stride, m, o, b); break;
        }
    }
}

}  // namespace
