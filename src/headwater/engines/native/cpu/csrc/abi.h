// The C interface of the kernels: plain structs of 64-bit fields and pointers, mirrored by ctypes in ../binding.py.
//
// All arithmetic is float32. "Panel" layout of a [N, K] matrix: groups of 16 output rows, each stored K-major, so that
// one vector load gives 16 outputs of one k; tile.h has the order inside a panel for each kind of weight. Every output
// sums over K in ascending order with fused multiply-adds, whatever the batch, the tile or the number of threads:
// results depend on the row and the weights alone.
//
// Activations are rows of floats whose stride is a multiple of 16; columns beyond the width are zero.
#pragma once
#include <stdint.h>

enum HwKind : int64_t { HW_BF16 = 0, HW_F16 = 1, HW_F32 = 2, HW_Q4 = 3, HW_Q8 = 4, HW_Q8_16 = 5 };

struct HwMatrix {
    int64_t kind;
    int64_t n;          // outputs, a multiple of 16
    int64_t k;          // inputs, a multiple of 16
    const void *data;   // n / 16 panels
    const float *bias;  // n values or null
};

struct HwLayer {
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm;  // head_dim values or null
    int64_t window;                // 0: full attention
    HwMatrix qkv, output, gate_up, down;  // gate_up: panels alternate gate, up
};

struct HwModel {
    int64_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim;
    float rms_eps, softmax_scale;
    const float *cos, *sin;  // [positions, head_dim / 2]
    const HwLayer *layers;
    const float *final_norm;
    HwMatrix head;
    HwMatrix embedding;  // in panels too: gathering one column of a panel costs little beside the step
};

struct HwBatch {
    int64_t num_tokens, num_seqs, num_logit_rows;
    const int32_t *token_ids, *positions, *query_starts, *context_lens, *block_tables, *logit_rows;
    int64_t table_stride;
    float *kv;
    int64_t block_size, block_floats;  // tokens and floats of one block over all layers
    float *logits;
    int64_t logits_stride;
};

// One attention call, for tests and for the forward pass.
struct HwAttention {
    const float *query;  // [T, query_stride]
    float *out;          // may be `query`
    int64_t query_stride, layer, window;
};

#pragma GCC visibility push(default)
extern "C" {
int64_t hw_struct_bytes(const char *name);  // for the mirrors to be checked against; -1: no such struct
const char *hw_best_isa();               // best variant this machine runs
int64_t hw_runs_isa(const char *isa);
void *hw_open(const char *isa, int64_t num_threads);  // null: unknown or not supported here
void hw_close(void *kernels);
int64_t hw_scratch_floats(const HwModel *model, int64_t num_tokens, int64_t num_logit_rows);
void hw_forward(void *kernels, const HwModel *model, const HwBatch *batch, float *scratch);
// out[m, n] = x[m, k] @ matrix^T + bias; strides in floats.
void hw_linear(void *kernels, const HwMatrix *matrix, const float *x, int64_t x_stride, int64_t m, float *out,
               int64_t out_stride);
void hw_attend(void *kernels, const HwModel *model, const HwBatch *batch, const HwAttention *call);
}
#pragma GCC visibility pop
