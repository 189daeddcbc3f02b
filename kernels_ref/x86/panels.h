// The layout of packed weights, and where products of rows with them go.
//
// A weight [outputs, inputs] lies in panels of 32 outputs: [outputs / 32][inputs / 32][2][16][16][2], which is, for
// each 32 inputs, two tiles of 16 outputs whose rows are pairs of inputs. One vector of a tile's row holds sixteen
// outputs with a pair of inputs each, so vectors and tiles read the same weight, and both from front to end.

#pragma once

#include <immintrin.h>

#include <cstdint>

#include "blocks.h"
#include "kernels.h"
#include "vectors.h"

namespace hpu_duo {
namespace {

constexpr int kPanel = 32;  // outputs of a panel
constexpr int kDepth = 32;  // inputs of a tile
constexpr int kStepItems = kPanel * kDepth;  // of the weight, that one step over the inputs takes

// Products of some rows with neighbouring panels, in float32 while inputs are missing, then rounded.
struct Outputs {
  bf16 *y;            // of the first row and panel
  int64_t y_stride, columns;
  const float *bias;  // of the first panel, or null
  float *sums;        // [rows, in whole tiles][panels * 32]; not used where the first inputs are the last
  int64_t sums_stride;
  bool is_first, is_last;

  // One row of a panel: 32 sums to y.
  inline __attribute__((always_inline)) void finish(int64_t row, int64_t panel, __m512 low, __m512 high) const {
    const int64_t column = panel * kPanel;
    if (bias) {
      low = _mm512_add_ps(low, _mm512_loadu_ps(bias + column));
      high = _mm512_add_ps(high, _mm512_loadu_ps(bias + column + kLanes));
    }
    const int64_t left = columns - column;
    const __mmask32 mask = left >= kPanel ? 0xFFFFFFFF : (1u << left) - 1;
    _mm512_mask_storeu_epi16(y + row * y_stride + column, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  float *sums_at(int64_t row, int64_t panel) const { return sums + row * sums_stride + panel * kPanel; }
};

}  // namespace
}  // namespace hpu_duo
