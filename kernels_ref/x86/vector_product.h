// Products of rows with packed panels by vectors: AVX512-BF16.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "panels.h"

namespace hpu_duo {
namespace {

class VectorProduct {
 public:
  static constexpr int kRowStep = 6;  // rows of a pass: 24 sums stay in registers
  static constexpr int64_t kMaxRows = 240;
  static constexpr int64_t kBlockItems = 1 << 18;  // inputs that stay in the second-level cache while panels go by

  void lay_out(const bf16 *x, int64_t stride, int rows, int inputs) {
    x_ = x, stride_ = stride, rows_ = rows, inputs_ = inputs;
  }

  // Panels lie `panel_items` apart.
  void multiply(const bf16 *weight, int64_t panel_items, int panels, const Outputs &out) const {
    // One row is bound by memory, and four streams are read faster than one.
    const int together = rows_ <= 2 ? 4 : 2;
    int panel = 0;
    for (; panel + together <= panels; panel += together)
      if (together == 4)
        multiply_rows<4>(weight + panel * panel_items, panel_items, panel, out);
      else
        multiply_rows<2>(weight + panel * panel_items, panel_items, panel, out);
    for (; panel < panels; ++panel) multiply_rows<1>(weight + panel * panel_items, panel_items, panel, out);
  }

 private:
  // All rows, in passes of nearly equal size.
  template <int NP>
  void multiply_rows(const bf16 *weight, int64_t panel_items, int panel, const Outputs &out) const {
    int row = 0;
    for (int passes = (rows_ + kRowStep - 1) / kRowStep; passes > 0; --passes) {
      const int count = (rows_ - row + passes - 1) / passes;
      switch (count) {
        case 1: pass<1, NP>(row, weight, panel_items, panel, out); break;
        case 2: pass<2, NP>(row, weight, panel_items, panel, out); break;
        case 3: pass<3, std::min(NP, 2)>(row, weight, panel_items, panel, out); break;
        case 4: pass<4, std::min(NP, 2)>(row, weight, panel_items, panel, out); break;
        case 5: pass<5, std::min(NP, 2)>(row, weight, panel_items, panel, out); break;
        default: pass<6, std::min(NP, 2)>(row, weight, panel_items, panel, out);
      }
      row += count;
    }
  }

  template <int MR, int NP>
  inline __attribute__((always_inline)) void pass(int row, const bf16 *weight, int64_t panel_items, int panel,
                                                  const Outputs &out) const {
    constexpr int kVectors = 2 * NP;
    const bf16 *x = x_ + row * stride_;
    __m512 sum[MR][kVectors];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n)
        sum[m][n] = out.is_first ? _mm512_setzero_ps()
                                 : _mm512_loadu_ps(out.sums_at(row + m, panel + n / 2) + n % 2 * kLanes);
    for (int i = 0; i < inputs_; i += kDepth, weight += kStepItems)
      for (int pair = 0; pair < kDepth / 2; ++pair) {
        __m512bh part[kVectors];
#pragma GCC unroll 8
        for (int n = 0; n < kVectors; ++n) {
          const bf16 *from = weight + n / 2 * panel_items + n % 2 * (kStepItems / 2) + pair * 2 * kLanes;
          part[n] = (__m512bh)_mm512_loadu_si512(from);
        }
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
          uint32_t both;
          std::memcpy(&both, x + m * stride_ + i + 2 * pair, sizeof(both));
          const __m512bh left = (__m512bh)_mm512_set1_epi32((int)both);
#pragma GCC unroll 8
          for (int n = 0; n < kVectors; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], left, part[n]);
        }
      }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < NP; ++n)
        if (out.is_last) {
          out.finish(row + m, panel + n, sum[m][2 * n], sum[m][2 * n + 1]);
        } else {
          _mm512_storeu_ps(out.sums_at(row + m, panel + n), sum[m][2 * n]);
          _mm512_storeu_ps(out.sums_at(row + m, panel + n) + kLanes, sum[m][2 * n + 1]);
        }
  }

  const bf16 *x_ = nullptr;
  int64_t stride_ = 0;
  int rows_ = 0, inputs_ = 0;
};

}  // namespace
}  // namespace hpu_duo
