// What is done to one row at a time: norm, rotation, embedding.
#pragma once
#include "tile.h"

namespace {

// out = x / rms(x) * weight over `n` values; reads and writes whole vectors when `n` is padded with zeros.
void rms_norm(const float *x, const float *weight, float *out, int64_t n, int64_t width, float eps) {
    vec squares = zero();
    int64_t d = 0;
    for (; d + 16 <= n; d += 16) { vec v = load(x + d); squares = fma(v, v, squares); }
    if (d < n) { vec v = load_partial(x + d, n - d); squares = fma(v, v, squares); }
    vec scale = broadcast(1.0f / __builtin_sqrtf(sum(squares) / float(width) + eps));
    for (d = 0; d + 16 <= n; d += 16) store(out + d, mul(mul(load(x + d), scale), load(weight + d)));
    if (d < n) {
        vec rest = mul(mul(load_partial(x + d, n - d), scale), load_partial(weight + d, n - d));
        store_partial(out + d, rest, n - d);
    }
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

}  // namespace
