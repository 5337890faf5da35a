// Register tiles: R rows of activations times P panels of weights. They serve linear layers, attention scores and
// attention sums. Every output sums over K in ascending order, one fused multiply-add per k.
#pragma once
#include "abi.h"
#include "simd.h"

namespace {

// Weight types: `even(p)` and `odd(p)` give 16 outputs of k and k + 1, `pair_bytes` apart from the next pair.
struct Bf16 {
    static constexpr bool quantised = false;
    static constexpr bool streamed = true;
    static constexpr int64_t pair_bytes = 64;
    HW_INLINE vec even(const char *p) { return bf16_even(p); }
    HW_INLINE vec odd(const char *p) { return bf16_odd(p); }
};
struct F16 {
    static constexpr bool quantised = false;
    static constexpr bool streamed = true;
    static constexpr int64_t pair_bytes = 64;
    HW_INLINE vec even(const char *p) { return f16(p); }
    HW_INLINE vec odd(const char *p) { return f16(p + 32); }
};
struct F32 {
    static constexpr bool quantised = false;
    static constexpr bool streamed = true;
    static constexpr int64_t pair_bytes = 128;
    HW_INLINE vec even(const char *p) { return load((const float *)p); }
    HW_INLINE vec odd(const char *p) { return load((const float *)p + 16); }
};
// Keys, values: short stretches at scattered places.
struct Cached : F32 {
    static constexpr bool streamed = false;
};

// Quantised: groups along K with a scale and an offset per output, weight = scale * code + offset, rounded once.
// A group is [scale 16][offset 16][codes]; 4-bit codes: eight successive k in each output's word, 8-bit: [k][16].
struct Q4 {
    static constexpr bool quantised = true;
    static constexpr int64_t group = 32, step = 8, step_bytes = 64, group_bytes = 384;
    typedef words Raw;
    HW_INLINE Raw raw(const char *p) { return load_words(p); }
    HW_INLINE vec code(Raw raw, int j) { return nibble(raw, j); }
};
template <int G> struct Q8 {
    static constexpr bool quantised = true;
    static constexpr int64_t group = G, step = 4, step_bytes = 64, group_bytes = 128 + G * 16;
    typedef const char *Raw;
    HW_INLINE Raw raw(const char *p) { return p; }
    HW_INLINE vec code(Raw raw, int j) { return bytes(raw + j * 16); }
};

#if defined(HW_AVX512)
constexpr int max_rows = 12;
constexpr int panels_for(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int max_rows = 6;
constexpr int panels_for(int rows) { return rows <= 2 ? 2 : 1; }
#endif

// acc[r][p] (+)= sum over k of a[r][k] * panel[p][k].
struct TileCall {
    const float *a;
    int64_t a_stride;
    // `segments` stretches of `k` values follow each other, the last has `last_k`: stretch s of panel p starts at
    // panels[s * stride + p], its activations at a + s * k. Quantised panels come in one stretch.
    const char *const *panels;
    int64_t segments, stride, k, last_k;
    float *acc;
    int64_t acc_stride;
    bool accumulate;
    int64_t ahead;              // streamed weights: what lies this many bytes on is fetched meanwhile
    const char *const *fetch;   // cached ones: what is fetched meanwhile, as much and as laid out as `panels`

    void skip(int64_t count) { panels += count, fetch += count, acc += 16 * count; }
};

template <int R, int P> struct Sums {
    vec c[R][P];
    const float *base[(R + 2) / 3];  // rows in groups of three share a register: base, + stride, + 2 * stride
    const int64_t stride;

    HW_MEMBER explicit Sums(const TileCall &t) : stride(t.a_stride) {
        HW_UNROLL for (int r = 0; r < R; r++)
            HW_UNROLL for (int p = 0; p < P; p++)
                c[r][p] = t.accumulate ? load(t.acc + r * t.acc_stride + p * 16) : zero();
        HW_UNROLL for (int g = 0; g < (R + 2) / 3; g++) base[g] = t.a + 3 * g * stride;
    }
    // The products of value `j` from where the rows stand.
    HW_MEMBER void add(int j, const vec *weight) {
        HW_UNROLL for (int r = 0; r < R; r++) {
            const vec x = broadcast(base[r / 3][(r % 3) * stride + j]);
            HW_UNROLL for (int p = 0; p < P; p++) c[r][p] = fma(x, weight[p], c[r][p]);
        }
    }
    HW_MEMBER void advance(int64_t count) {
        HW_UNROLL for (int g = 0; g < (R + 2) / 3; g++) base[g] += count;
    }
    HW_MEMBER void save(const TileCall &t) const {
        HW_UNROLL for (int r = 0; r < R; r++)
            HW_UNROLL for (int p = 0; p < P; p++) store(t.acc + r * t.acc_stride + p * 16, c[r][p]);
    }
};

template <class W, int R, int P> __attribute__((noinline)) void tile(const TileCall &t) {
    Sums<R, P> sums(t);
    const int64_t ahead = t.ahead;
    for (int64_t s = 0; s < t.segments; s++) {
        const char *w[P], *next[P];
        HW_UNROLL for (int p = 0; p < P; p++) w[p] = t.panels[s * t.stride + p], next[p] = t.fetch[s * t.stride + p];
        const int64_t count = s + 1 < t.segments ? t.k : t.last_k;
        int64_t offset = 0;
        vec weight[P];
        for (int64_t pair = 0; pair < count / 2; pair++, offset += W::pair_bytes) {
            HW_UNROLL for (int p = 0; p < P; p++)
                HW_UNROLL for (int64_t line = 0; line < W::pair_bytes; line += 64)
                    __builtin_prefetch(W::streamed ? w[p] + offset + ahead + line : next[p] + offset + line);
            HW_UNROLL for (int p = 0; p < P; p++) weight[p] = W::even(w[p] + offset);
            sums.add(0, weight);
            HW_UNROLL for (int p = 0; p < P; p++) weight[p] = W::odd(w[p] + offset);
            sums.add(1, weight);
            sums.advance(2);
        }
        if (count % 2) {
            HW_UNROLL for (int p = 0; p < P; p++) weight[p] = W::even(w[p] + offset);
            sums.add(0, weight);
            sums.advance(1);
        }
    }
    sums.save(t);
}

template <class W, int R, int P> __attribute__((noinline)) void quantised_tile(const TileCall &t) {
    Sums<R, P> sums(t);
    const int64_t ahead = t.ahead, groups = t.k / W::group;
    const char *w[P];
    HW_UNROLL for (int p = 0; p < P; p++) w[p] = t.panels[p];
    for (int64_t group = 0; group < groups; group++) {
        vec scale[P], offset[P], weight[P];
        HW_UNROLL for (int p = 0; p < P; p++) {
            scale[p] = load((const float *)w[p]), offset[p] = load((const float *)w[p] + 16);
            __builtin_prefetch(w[p] + ahead), __builtin_prefetch(w[p] + ahead + 64);
            w[p] += 128;
        }
        for (int64_t step = 0; step < W::group / W::step; step++) {
            typename W::Raw raw[P];
            HW_UNROLL for (int p = 0; p < P; p++) raw[p] = W::raw(w[p]), __builtin_prefetch(w[p] + ahead);
            HW_UNROLL for (int j = 0; j < W::step; j++) {
                HW_UNROLL for (int p = 0; p < P; p++) weight[p] = fma(scale[p], W::code(raw[p], j), offset[p]);
                sums.add(j, weight);
            }
            HW_UNROLL for (int p = 0; p < P; p++) w[p] += W::step_bytes;
            sums.advance(W::step);
        }
    }
    sums.save(t);
}

template <class W> int64_t bytes_of(int64_t k) {
    if constexpr (W::quantised) return k / W::group * W::group_bytes;
    else return k / 2 * W::pair_bytes;
}

template <class W, int R, int P> HW_INLINE void run_tile(const TileCall &t) {
    if constexpr (W::quantised) quantised_tile<W, R, P>(t);
    else tile<W, R, P>(t);
}

template <class W, int R> HW_INLINE void tile_panels(const TileCall &call, int64_t panels) {
    constexpr int wide = panels_for(R);
    TileCall t = call;
    for (; panels >= wide; panels -= wide, t.skip(wide)) run_tile<W, R, wide>(t);
    if constexpr (wide > 2)
        for (; panels >= 2; panels -= 2, t.skip(2)) run_tile<W, R, 2>(t);
    if constexpr (wide > 1)
        for (; panels >= 1; panels -= 1, t.skip(1)) run_tile<W, R, 1>(t);
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

}  // namespace
