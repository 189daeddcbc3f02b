// The kernels of this folder as operators.cpp calls them; each source says more.

#pragma once

#include <cstdint>

namespace hpu_duo {

using bf16 = uint16_t;

// What multiplies: the best for the work at hand, vectors (AVX512-BF16), tiles (AMX), or the model of tiles.
enum class Instructions { kBest, kVectors, kTiles, kModel };

// Whether this process may use AMX.
bool have_tiles();

void linear(const bf16 *x, const bf16 *packed, const float *bias, const int *live, bf16 *y, int64_t rows,
            int64_t outputs, int64_t inputs, Instructions instructions, int num_threads);

void attend_rows(const bf16 *q, const bf16 *k, const bf16 *v, const int *owner, const int *last,
                 const int *last_visible, float *attn, float *largest, float *total, const int64_t *strides,
                 const int *sizes, int num_threads);

int64_t attend_workspace(int num_keys, int dim);

void attend(const bf16 *q, const bf16 *k, const bf16 *v, float *attn, float *largest, float *total, bf16 *workspace,
            const int64_t *strides, const int *sizes, int num_threads);

}  // namespace hpu_duo
