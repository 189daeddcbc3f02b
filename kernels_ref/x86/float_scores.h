// Scores of stored keys with float32 queries, as attention of prompts and sums of weights by key need them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "float_tile.h"

namespace hpu_duo {
namespace {

constexpr int kRows = kTileColumns;  // query heads of queries, side by side in two vectors
constexpr int kMaxDim = 256;

// `count` keys or values that lie a stride apart, as [count][dim].
template <class Stored>
void widen(const typename Stored::Item *from, int64_t stride, int count, int dim, float *to) {
  for (int key = 0; key < count; ++key, from += stride, to += dim)
    for (int d = 0; d < dim; d += kLanes) Lanes::store(to + d, Stored::load(from + d));
}

// sums[m * sums_row][kRows] = or += left[m * row + k * step] * right[k][kRows], for m below `count` and k below `depth`.
template <bool ADDS>
void multiply(const float *left, int64_t row, int64_t step, int count, const float *right, int depth, float *sums) {
  for (; count > 0; count -= kTileRows, left += kTileRows * row, sums += kTileRows * kRows)
    with_rows<kTileRows>(std::min(count, kTileRows), [&](auto number) {
      constexpr int kCount = decltype(number)::value;
      F sum[kCount][kWide];
#pragma GCC unroll 12
      for (int m = 0; m < kCount; ++m)
#pragma GCC unroll 2
        for (int n = 0; n < kWide; ++n)
          sum[m][n] = ADDS ? Lanes::load(sums + m * kRows + n * kLanes) : Lanes::set(0.0f);
      add_products<kCount>(left, row, step, right, kRows, depth, sum);
#pragma GCC unroll 12
      for (int m = 0; m < kCount; ++m)
#pragma GCC unroll 2
        for (int n = 0; n < kWide; ++n) Lanes::store(sums + m * kRows + n * kLanes, sum[m][n]);
    });
}

// Queries of some rows, [dim][kRows].
struct Queries {
  const float *q;
  int64_t token, head, member;  // strides, in items
  int group, dim, num_rows;

  // Row r is member r % group of query r / group; rows behind the last one repeat it.
  void load(int its_head, int first_row, float *to) const {
    for (int r = 0; r < kRows; ++r) {
      const int row = std::min(first_row + r, num_rows - 1);
      const float *from = q + row / group * token + its_head * head + row % group * member;
      for (int d = 0; d < dim; ++d) to[d * kRows + r] = from[d];
    }
  }
};

}  // namespace
}  // namespace hpu_duo
