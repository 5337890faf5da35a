// The C interface: picks the variant, owns the threads.
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "forward.h"

namespace {

const HwVariant *const variants[] = {  // best first
#if defined(__x86_64__)
    &hw_avx512, &hw_avx2,
#endif
    &hw_portable,
};

bool runs_here(const HwVariant *variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (variant == &hw_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
    if (variant == &hw_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
               __builtin_cpu_supports("bmi2");
#endif
    return variant != nullptr;
}

const HwVariant *find(const char *isa) {
    for (const HwVariant *v : variants)
        if (!strcmp(v->isa, isa)) return v;
    return nullptr;
}

enum Call { FORWARD, LINEAR, ATTEND, STOP };

struct Work {
    Call call;
    const HwModel *model;
    const HwBatch *batch;
    float *scratch;
    const HwMatrix *matrix;
    const float *x;
    int64_t x_stride, m;
    float *out;
    int64_t out_stride;
    const HwAttention *attention;
};

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

const int spins_before_yield = 4000;

struct Kernels {
    HwTeam team;  // first: `wait` gets its address
    const HwVariant *variant;
    char *buffers;
    int64_t buffer_bytes;
    int64_t arrived, phase;  // barrier
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int64_t generation;  // of `work`
    Work work;
    pthread_t *helpers;
    int64_t num_helpers;
};

void barrier(HwTeam *team) {
    if (team->threads == 1) return;
    Kernels *k = (Kernels *)team;
    int64_t phase = __atomic_load_n(&k->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&k->arrived, 1, __ATOMIC_ACQ_REL) == team->threads) {
        __atomic_store_n(&k->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&k->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spin = 0; __atomic_load_n(&k->phase, __ATOMIC_ACQUIRE) == phase; spin++) {
        if (spin < spins_before_yield) pause_cpu();
        else sched_yield();
    }
}

void perform(Kernels *k, int64_t thread) {
    const Work &w = k->work;
    void *buffer = k->buffers + thread * k->buffer_bytes;
    switch (w.call) {
        case FORWARD: k->variant->forward(&k->team, thread, buffer, w.model, w.batch, w.scratch); break;
        case LINEAR:
            k->variant->linear(&k->team, thread, buffer, w.matrix, w.x, w.x_stride, w.m, w.out, w.out_stride);
            break;
        case ATTEND: k->variant->attend(&k->team, thread, buffer, w.model, w.batch, w.attention); break;
        case STOP: return;
    }
    barrier(&k->team);
}

struct Helper {
    Kernels *kernels;
    int64_t thread;
};

void *help(void *argument) {
    Helper helper = *(Helper *)argument;
    free(argument);
    Kernels *k = helper.kernels;
    int64_t seen = 0;
    for (;;) {
        pthread_mutex_lock(&k->mutex);
        while (k->generation == seen) pthread_cond_wait(&k->wake, &k->mutex);
        seen = k->generation;
        pthread_mutex_unlock(&k->mutex);
        if (k->work.call == STOP) return nullptr;
        perform(k, helper.thread);
    }
}

void publish(Kernels *k, const Work &work) {
    pthread_mutex_lock(&k->mutex);
    k->work = work;
    k->team.counter = 0;
    k->generation++;
    pthread_cond_broadcast(&k->wake);
    pthread_mutex_unlock(&k->mutex);
}

void run(void *kernels, const Work &work) {
    Kernels *k = (Kernels *)kernels;
    publish(k, work);
    perform(k, 0);
}

bool start_helpers(Kernels *k, int64_t count) {
    for (; k->num_helpers < count; k->num_helpers++) {
        Helper *helper = (Helper *)malloc(sizeof(Helper));
        if (!helper) return false;
        *helper = {k, k->num_helpers + 1};
        if (pthread_create(&k->helpers[k->num_helpers], nullptr, help, helper)) {
            free(helper);
            return false;
        }
    }
    return true;
}

}  // namespace

extern "C" {

int64_t hw_struct_bytes(const char *name) {
    if (!strcmp(name, "HwMatrix")) return sizeof(HwMatrix);
    if (!strcmp(name, "HwLayer")) return sizeof(HwLayer);
    if (!strcmp(name, "HwModel")) return sizeof(HwModel);
    if (!strcmp(name, "HwBatch")) return sizeof(HwBatch);
    if (!strcmp(name, "HwAttention")) return sizeof(HwAttention);
    return -1;
}

const char *hw_best_isa() {
    for (const HwVariant *v : variants)
        if (runs_here(v)) return v->isa;
    return nullptr;
}

int64_t hw_runs_isa(const char *isa) {
    const HwVariant *v = find(isa);
    return runs_here(v);
}

void *hw_open(const char *isa, int64_t num_threads) {
    const HwVariant *v = find(isa);
    if (!runs_here(v) || num_threads < 1) return nullptr;
    Kernels *k = (Kernels *)calloc(1, sizeof(Kernels));
    if (!k) return nullptr;
    pthread_mutex_init(&k->mutex, nullptr);
    pthread_cond_init(&k->wake, nullptr);
    k->team = {num_threads, barrier, 0};
    k->variant = v;
    k->buffer_bytes = (v->buffer_bytes() + 4095) / 4096 * 4096;
    k->buffers = (char *)aligned_alloc(4096, size_t(k->buffer_bytes * num_threads));
    k->helpers = (pthread_t *)calloc(size_t(num_threads), sizeof(pthread_t));
    if (!k->buffers || !k->helpers || !start_helpers(k, num_threads - 1)) {
        hw_close(k);
        return nullptr;
    }
    return k;
}

void hw_close(void *kernels) {
    Kernels *k = (Kernels *)kernels;
    Work stop = {};
    stop.call = STOP;
    publish(k, stop);
    for (int64_t i = 0; i < k->num_helpers; i++) pthread_join(k->helpers[i], nullptr);
    pthread_cond_destroy(&k->wake);
    pthread_mutex_destroy(&k->mutex);
    free(k->helpers);
    free(k->buffers);
    free(k);
}

int64_t hw_scratch_floats(const HwModel *m, int64_t num_tokens, int64_t num_logit_rows) {
    return HwScratch(*m, num_tokens, num_logit_rows).end;
}

void hw_forward(void *kernels, const HwModel *model, const HwBatch *batch, float *scratch) {
    Work work = {};
    work.call = FORWARD, work.model = model, work.batch = batch, work.scratch = scratch;
    run(kernels, work);
}

void hw_linear(void *kernels, const HwMatrix *matrix, const float *x, int64_t x_stride, int64_t m, float *out,
               int64_t out_stride) {
    Work work = {};
    work.call = LINEAR, work.matrix = matrix, work.x = x, work.x_stride = x_stride, work.m = m;
    work.out = out, work.out_stride = out_stride;
    run(kernels, work);
}

void hw_attend(void *kernels, const HwModel *model, const HwBatch *batch, const HwAttention *call) {
    Work work = {};
    work.call = ATTEND, work.model = model, work.batch = batch, work.attention = call;
    run(kernels, work);
}
}
