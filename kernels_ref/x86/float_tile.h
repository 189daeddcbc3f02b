// The product of float32 that all sources share: a tile of sums stays in registers, and each step adds to it some
// numbers, each in all lanes, times two vectors.

#pragma once

#include <cstdint>
#include <type_traits>

#include "lanes.h"

namespace hpu_duo {
namespace {

constexpr int kWide = 2;                                     // vectors of a tile side by side
constexpr int kTileColumns = kWide * kLanes;
constexpr int kTileRows = Lanes::kRegisters == 32 ? 12 : 6;  // 24 or 12 sums, two vectors and a number stay in registers

// sum[m] += left[m * row + k * step] * right[k], for k below `depth`; vectors of `right` lie `right_step` items apart.
template <int ROWS>
inline __attribute__((always_inline)) void add_products(const float *left, int64_t row, int64_t step,
                                                        const float *right, int64_t right_step, int depth,
                                                        F (&sum)[ROWS][kWide]) {
  for (int k = 0; k < depth; ++k, left += step, right += right_step) {
    F part[kWide];
#pragma GCC unroll 2
    for (int n = 0; n < kWide; ++n) part[n] = Lanes::load(right + n * kLanes);
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; ++m) {
      const F factor = Lanes::set(left[m * row]);
#pragma GCC unroll 2
      for (int n = 0; n < kWide; ++n) sum[m][n] = Lanes::fma(factor, part[n], sum[m][n]);
    }
  }
}

// Calls `function` with the number of rows as a constant.
template <int MOST, class Function>
inline void with_rows(int rows, const Function &function) {
  if constexpr (MOST > 1) {
    if (rows < MOST) return with_rows<MOST - 1>(rows, function);
  }
  function(std::integral_constant<int, MOST>());
}

}  // namespace
}  // namespace hpu_duo
