// Products of bfloat16 rows with a weight that is packed once, for CPUs with AVX512-BF16.
//
// The weight lies in panels of 64 outputs, [panel][input / 2][64][2]: one 512-bit load holds sixteen
// outputs with a pair of inputs each, which is what vdpbf16ps multiplies, and a panel is read from front to
// end. So one row runs at the speed of memory, and many rows at that of the instruction.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace hpu_duo {
namespace {

constexpr int kPanel = 64;   // outputs of one pass: four vectors
constexpr int kLanes = 16;
constexpr int kStep = 6;     // rows of one pass: 24 sums stay in registers
constexpr int64_t kTileItems = 1 << 18;  // inputs that stay in the second-level cache while panels go by
constexpr int64_t kMaxTileRows = 240;

// y[MR, columns] = x[MR, inputs] * panel + bias, sums in float32.
template <int MR>
inline __attribute__((always_inline)) void multiply(const bf16 *x, int64_t inputs, const bf16 *panel,
                                                    const float *bias, bf16 *y, int64_t stride, int columns) {
  __m512 sum[MR][4];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) sum[m][n] = bias ? _mm512_loadu_ps(bias + n * kLanes) : _mm512_setzero_ps();
  for (int64_t i = 0; i < inputs; i += 2) {
    __m512bh weight[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n)
      weight[n] = (__m512bh)_mm512_loadu_si512(panel + i * kPanel + n * 2 * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      uint32_t pair;
      std::memcpy(&pair, x + m * inputs + i, 4);
      const __m512bh left = (__m512bh)_mm512_set1_epi32((int)pair);
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], left, weight[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const int left = columns - n * kLanes;
      if (left <= 0) break;
      const __mmask16 mask = left >= kLanes ? 0xFFFF : (1 << left) - 1;
      _mm256_mask_storeu_epi16(y + m * stride + n * kLanes, mask, (__m256i)_mm512_cvtneps_pbh(sum[m][n]));
    }
}

// Rows against one panel, in passes of nearly equal size.
void multiply_rows(int rows, const bf16 *x, int64_t inputs, const bf16 *panel, const float *bias, bf16 *y,
                   int64_t stride, int columns) {
  for (int passes = (rows + kStep - 1) / kStep; passes > 0; --passes) {
    const int count = (rows + passes - 1) / passes;
    switch (count) {
      case 1: multiply<1>(x, inputs, panel, bias, y, stride, columns); break;
      case 2: multiply<2>(x, inputs, panel, bias, y, stride, columns); break;
      case 3: multiply<3>(x, inputs, panel, bias, y, stride, columns); break;
      case 4: multiply<4>(x, inputs, panel, bias, y, stride, columns); break;
      case 5: multiply<5>(x, inputs, panel, bias, y, stride, columns); break;
      default: multiply<6>(x, inputs, panel, bias, y, stride, columns);
    }
    x += count * inputs;
    y += count * stride;
    rows -= count;
  }
}

}  // namespace

// y[rows, outputs] = x[rows, inputs] * weight^T + bias. `bias` is null or padded to whole panels. `live` is null
// or two numbers: if `rows` is the first one, only as many rows as the second says are computed, the others are 0.
void linear(const bf16 *x, const bf16 *packed, const float *bias, const int *live, bf16 *y, int64_t rows,
            int64_t outputs, int64_t inputs, int num_threads) {
  if (live && rows == live[0] && live[1] < rows) {
    std::fill(y + live[1] * outputs, y + rows * outputs, (bf16)0);
    rows = live[1];
  }
  const int64_t tile_rows = std::clamp(kTileItems / inputs / kStep * kStep, (int64_t)kStep, kMaxTileRows);
#pragma omp parallel for collapse(2) schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t row = 0; row < rows; row += tile_rows)
    for (int64_t column = 0; column < outputs; column += kPanel)
      multiply_rows((int)std::min(tile_rows, rows - row), x + row * inputs, inputs, packed + column * inputs,
                    bias ? bias + column : nullptr, y + row * outputs + column, outputs,
                    (int)std::min<int64_t>(kPanel, outputs - column));
}

}  // namespace hpu_duo
