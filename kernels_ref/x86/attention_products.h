// The two products of attention over keys and values that lie as tiles, by vectors or by tiles.
//
// `score` gives scores [keys][kRows] of `width` keys, which lie as [width / 16][dim_steps][16][32], with queries
// [dim / 2][kRows][2]. `add_values` adds to attn [dim][kRows] values, which lie as [width / 32][dim / 16][16][32],
// times weights [width / 2][kRows][2].

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "panels.h"
#include "tiles.h"
#include "vectors.h"

namespace hpu_duo {
namespace {

// Sixteen keys as tiles [dim / 32][16][32], with zeros behind the last key and item.
inline void pack_keys(const bf16 *k, int64_t stride, int count, int dim, bf16 *out) {
  for (int d = 0; d < dim; d += kDepth, out += kTileItems) {
    const __mmask32 there = dim - d >= kDepth ? 0xFFFFFFFF : 0xFFFF;
    for (int key = 0; key < kLanes; ++key) {
      const __m512i row =
          key < count ? _mm512_maskz_loadu_epi16(there, k + key * stride + d) : _mm512_setzero_si512();
      _mm512_store_si512(out + key * kDepth, row);
    }
  }
}

class VectorAttention {
 public:
  static constexpr int kRows = 48;

  static void score(const bf16 *keys, int width, int dim_steps, const bf16 *q, float *scores) {
    for (int key = 0; key < width; key += kLanes, keys += (int64_t)dim_steps * kTileItems)
      for (int first = 0; first < kLanes; first += kLines) {
        __m512 sum[kLines][kVectors] = {};
        add_products(keys + first * kDepth, kTileItems, q, dim_steps, sum);
        store(sum, scores + (key + first) * kRows);
      }
  }

  static void add_values(const bf16 *values, int width, int dim, const bf16 *weights, float *attn) {
    for (int d = 0; d < dim; d += kLines) {
      __m512 sum[kLines][kVectors];
#pragma GCC unroll 8
      for (int m = 0; m < kLines; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) sum[m][n] = _mm512_load_ps(attn + (d + m) * kRows + n * kLanes);
      add_products(values + d / kLanes * kTileItems + d % kLanes * kDepth, dim * kDepth, weights, width / kDepth, sum);
      store(sum, attn + d * kRows);
    }
  }

 private:
  static constexpr int kLines = 8;  // of the left factor: 24 sums stay in registers
  static constexpr int kVectors = kRows / kLanes;

  // Lines of tiles that lie `step_items` apart times [steps * 16][kRows][2].
  static inline __attribute__((always_inline)) void add_products(const bf16 *left, int64_t step_items,
                                                                 const bf16 *right, int steps,
                                                                 __m512 (&sum)[kLines][kVectors]) {
    for (int step = 0; step < steps; ++step, left += step_items)
      for (int pair = 0; pair < kDepth / 2; ++pair, right += 2 * kRows) {
        __m512bh part[kVectors];
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) part[n] = (__m512bh)_mm512_load_si512(right + n * 2 * kLanes);
#pragma GCC unroll 8
        for (int m = 0; m < kLines; ++m) {
          uint32_t both;
          std::memcpy(&both, left + m * kDepth + 2 * pair, sizeof(both));
          const __m512bh factor = (__m512bh)_mm512_set1_epi32((int)both);
#pragma GCC unroll 4
          for (int n = 0; n < kVectors; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], factor, part[n]);
        }
      }
  }

  static inline __attribute__((always_inline)) void store(const __m512 (&sum)[kLines][kVectors], float *to) {
#pragma GCC unroll 8
    for (int m = 0; m < kLines; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) _mm512_store_ps(to + m * kRows + n * kLanes, sum[m][n]);
  }
};

template <class Tiles>
class TileAttention {
 public:
  static constexpr int kRows = 2 * kTileRows;

  static void score(const bf16 *keys, int width, int dim_steps, const bf16 *q, float *scores) {
    const int64_t tile = (int64_t)dim_steps * kTileItems;
    for (int key = 0; key < width; key += 2 * kTileRows, keys += 2 * tile) {
      Tiles::template zero<0>();
      Tiles::template zero<1>();
      Tiles::template zero<2>();
      Tiles::template zero<3>();
      add_products<2>(keys, keys + tile, kTileItems, q, dim_steps);
      store<2>(scores + key * kRows);
    }
  }

  static void add_values(const bf16 *values, int width, int dim, const bf16 *weights, float *attn) {
    int d = 0;
    for (; d + 2 * kTileRows <= dim; d += 2 * kTileRows) add_items<2>(values, width, dim, d, weights, attn);
    if (d < dim) add_items<1>(values, width, dim, d, weights, attn);
  }

 private:
  static constexpr int64_t kRowBytes = kRows * (int)sizeof(float);  // of two tiles side by side

  template <int M>
  static void add_items(const bf16 *values, int width, int dim, int d, const bf16 *weights, float *attn) {
    float *sums = attn + d * kRows;
    Tiles::template load<0>(sums, kRowBytes);
    Tiles::template load<1>(sums + kLanes, kRowBytes);
    if (M == 2) Tiles::template load<2>(sums + kTileRows * kRows, kRowBytes);
    if (M == 2) Tiles::template load<3>(sums + kTileRows * kRows + kLanes, kRowBytes);
    const bf16 *upper = values + d / kTileRows * kTileItems;
    add_products<M>(upper, upper + kTileItems, dim * kDepth, weights, width / kDepth);
    store<M>(sums);
  }

  // One or two tiles times two, for each step.
  template <int M>
  static void add_products(const bf16 *upper, const bf16 *lower, int64_t step_items, const bf16 *right, int steps) {
    for (int step = 0; step < steps; ++step) {
      Tiles::template load<6>(right, kRowBytes);
      Tiles::template load<4>(upper, kTileBytes);
      Tiles::template load<7>(right + 2 * kLanes, kRowBytes);
      if (M == 2) Tiles::template load<5>(lower, kTileBytes);
      Tiles::template multiply<0, 4, 6>();
      Tiles::template multiply<1, 4, 7>();
      if (M == 2) Tiles::template multiply<2, 5, 6>();
      if (M == 2) Tiles::template multiply<3, 5, 7>();
      upper += step_items, lower += step_items, right += kTileRows * 2 * kRows;
    }
  }

  template <int M>
  static void store(float *to) {
    Tiles::template store<0>(to, kRowBytes);
    Tiles::template store<1>(to + kLanes, kRowBytes);
    if (M == 2) Tiles::template store<2>(to + kTileRows * kRows, kRowBytes);
    if (M == 2) Tiles::template store<3>(to + kTileRows * kRows + kLanes, kRowBytes);
  }

  Tiles registers_;
};

}  // namespace
}  // namespace hpu_duo
