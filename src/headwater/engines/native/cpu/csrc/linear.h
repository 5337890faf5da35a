// out = x @ W^T over panels. One register tile serves linear layers, attention scores and attention sums.
//
// Weights are widened to float32 in registers. Groups of panels are read one after the other, a stretch of K at a time,
// and used by all row tiles while they lie in the cache; meanwhile the next stretch is fetched from memory: without that
// the hardware's prefetchers stumble at every page and a step at batch 8 takes more than twice as long.
#pragma once
#include "forward.h"
#include "simd.h"

namespace {

// Weight types: `even(p)` and `odd(p)` give 16 outputs of k and k + 1, `pair_bytes` apart from the next pair.
struct Bf16 {
    static constexpr bool streamed = true;
    static constexpr int64_t pair_bytes = 64;
    HW_INLINE vec even(const char *p) { return bf16_even(p); }
    HW_INLINE vec odd(const char *p) { return bf16_odd(p); }
};
struct F16 {
    static constexpr bool streamed = true;
    static constexpr int64_t pair_bytes = 64;
    HW_INLINE vec even(const char *p) { return f16(p); }
    HW_INLINE vec odd(const char *p) { return f16(p + 32); }
};
struct F32 {
    static constexpr bool streamed = true;
    static constexpr int64_t pair_bytes = 128;
    HW_INLINE vec even(const char *p) { return load((const float *)p); }
    HW_INLINE vec odd(const char *p) { return load((const float *)p + 16); }
};
// Keys, values: short stretches at scattered places.
struct Cached : F32 {
    static constexpr bool streamed = false;
};

#if defined(HW_AVX512)
constexpr int max_rows = 12;
constexpr int panels_for(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int max_rows = 6;
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif
constexpr int max_panels = 4;

// acc[r][p] (+)= sum over k of a[r][k] * panel[p][k], for R rows and P panels of 16 outputs.
// `segments` stretches of `k` values follow each other: stretch s of panel p starts at panels[s * stride + p], and
// its activations at a + s * k; the last stretch has `last_k` values. What lies `ahead` bytes on is fetched meanwhile.
template <class W, int R, int P>
__attribute__((noinline)) void tile(const float *a, int64_t a_stride, const char *const *panels, int64_t segments,
                                    int64_t stride, int64_t k, int64_t last_k, float *acc, int64_t acc_stride,
                                    bool accumulate, int64_t ahead) {
    vec c[R][P];
    HW_UNROLL for (int r = 0; r < R; r++)
        HW_UNROLL for (int p = 0; p < P; p++)
            c[r][p] = accumulate ? load(acc + r * acc_stride + p * 16) : zero();
    // Rows in groups of three share a base register: base, base + stride, base + 2 * stride.
    const float *base[(R + 2) / 3];
    HW_UNROLL for (int g = 0; g < (R + 2) / 3; g++) base[g] = a + 3 * g * a_stride;
    for (int64_t s = 0; s < segments; s++) {
        const char *w[P];
        HW_UNROLL for (int p = 0; p < P; p++) w[p] = panels[s * stride + p];
        int64_t count = s + 1 < segments ? k : last_k, offset = 0;
        for (int64_t pair = 0; pair < count / 2; pair++) {
            vec even[P], odd[P];
            if constexpr (W::streamed)
                HW_UNROLL for (int p = 0; p < P; p++)
                    HW_UNROLL for (int64_t line = 0; line < W::pair_bytes; line += 64)
                        __builtin_prefetch(w[p] + offset + ahead + line);
            HW_UNROLL for (int p = 0; p < P; p++) even[p] = W::even(w[p] + offset);
            HW_UNROLL for (int r = 0; r < R; r++) {
                vec x = broadcast(base[r / 3][(r % 3) * a_stride]);
                HW_UNROLL for (int p = 0; p < P; p++) c[r][p] = fma(x, even[p], c[r][p]);
            }
            HW_UNROLL for (int p = 0; p < P; p++) odd[p] = W::odd(w[p] + offset);
            HW_UNROLL for (int r = 0; r < R; r++) {
                vec x = broadcast(base[r / 3][(r % 3) * a_stride + 1]);
                HW_UNROLL for (int p = 0; p < P; p++) c[r][p] = fma(x, odd[p], c[r][p]);
            }
            offset += W::pair_bytes;
            HW_UNROLL for (int g = 0; g < (R + 2) / 3; g++) base[g] += 2;
        }
        if (count % 2) {
            HW_UNROLL for (int r = 0; r < R; r++) {
                vec x = broadcast(base[r / 3][(r % 3) * a_stride]);
                HW_UNROLL for (int p = 0; p < P; p++) c[r][p] = fma(x, W::even(w[p] + offset), c[r][p]);
            }
            HW_UNROLL for (int g = 0; g < (R + 2) / 3; g++) base[g] += 1;
        }
    }
    HW_UNROLL for (int r = 0; r < R; r++)
        HW_UNROLL for (int p = 0; p < P; p++) store(acc + r * acc_stride + p * 16, c[r][p]);
}

struct TileCall {
    const float *a;
    int64_t a_stride;
    const char *const *panels;
    int64_t segments, stride, k, last_k;
    float *acc;
    int64_t acc_stride;
    bool accumulate;
    int64_t ahead = 0;
};

template <class W, int R, int P> HW_INLINE void run_tile(const TileCall &t) {
    tile<W, R, P>(t.a, t.a_stride, t.panels, t.segments, t.stride, t.k, t.last_k, t.acc, t.acc_stride, t.accumulate, t.ahead);
}

template <class W, int R> HW_INLINE void tile_panels(const TileCall &call, int64_t panels) {
    constexpr int wide = panels_for(R);
    TileCall t = call;
    for (; panels >= wide; panels -= wide, t.panels += wide, t.acc += 16 * wide) run_tile<W, R, wide>(t);
    if constexpr (wide > 2)
        for (; panels >= 2; panels -= 2, t.panels += 2, t.acc += 32) run_tile<W, R, 2>(t);
    if constexpr (wide > 1)
        for (; panels >= 1; panels -= 1, t.panels += 1, t.acc += 16) run_tile<W, R, 1>(t);
}

// `rows` <= max_rows and any number of panels.
template <class W> void tile_rows(const TileCall &t, int64_t rows, int64_t panels) {
    switch (rows) {
        case 1: return tile_panels<W, 1>(t, panels);
        case 2: return tile_panels<W, 2>(t, panels);
        case 3: return tile_panels<W, 3>(t, panels);
        case 4: return tile_panels<W, 4>(t, panels);
        case 5: return tile_panels<W, 5>(t, panels);
        case 6: return tile_panels<W, 6>(t, panels);
#if defined(HW_AVX512)
        case 7: return tile_panels<W, 7>(t, panels);
        case 8: return tile_panels<W, 8>(t, panels);
        case 9: return tile_panels<W, 9>(t, panels);
        case 10: return tile_panels<W, 10>(t, panels);
        case 11: return tile_panels<W, 11>(t, panels);
        case 12: return tile_panels<W, 12>(t, panels);
#endif
    }
}

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

struct LinearBuffers {
    alignas(64) float acc[hw_row_block * group_panels * 16];
};

// Panels [first, first + panels) of the matrix for all rows; panels <= group_panels, m <= hw_row_block.
template <class W>
void linear_group(const HwMatrix &w, int64_t first, int64_t panels, const float *x, int64_t x_stride, int64_t m,
                  const Output &o, LinearBuffers &b) {
    const int64_t panel_bytes = w.k / 2 * W::pair_bytes, acc_stride = group_panels * 16;
    const int64_t tiles = (m + max_rows - 1) / max_rows;
    for (int64_t k0 = 0; k0 < w.k; k0 += stretch_k) {
        const int64_t k = w.k - k0 < stretch_k ? w.k - k0 : stretch_k, skipped = k0 / 2 * W::pair_bytes;
        const char *source[group_panels];
        for (int64_t p = 0; p < panels; p++) source[p] = (const char *)w.data + (first + p) * panel_bytes + skipped;
        const bool last = k0 + k == w.k;
        const int64_t ahead = last ? group_panels * panel_bytes - skipped : k / 2 * W::pair_bytes;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t begin = m * t / tiles, rows = m * (t + 1) / tiles - begin;
            tile_rows<W>({x + begin * x_stride + k0, x_stride, source, 1, 0, k, k, b.acc + begin * acc_stride,
                          acc_stride, k0 > 0, ahead}, rows, panels);
        }
    }
    for (int64_t r = 0; r < m; r++) finish_row(o, b.acc + r * acc_stride, r, first, panels);
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
        }
    }
}

}  // namespace
