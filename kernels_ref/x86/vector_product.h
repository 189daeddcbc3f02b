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
        multiply_panels<4>(weight + panel * panel_items, panel_items, panel, out);
      else
        multiply_panels<2>(weight + panel * panel_items, panel_items, panel, out);
    for (; panel < panels; ++panel) multiply_panels<1>(weight + panel * panel_items, panel_items, panel, out);
  }

 private:
  static constexpr int kHeldRows = 64;   // most rows whose sums are held between parts of the inputs
  static constexpr int kPart = 1 << 10;  // inputs of a part: two panels of it stay in the second-level cache, and the
                                         // part that is fetched meanwhile beside it

  // What a pass multiplies, and what it fetches meanwhile.
  struct Part {
    const bf16 *x, *weight;
    int64_t panel_items, ahead;  // from a panel to the next one; from what is read to what is fetched
    int inputs, panel;
  };

  // Neighbouring panels. Few rows take the inputs in parts, so that passes behind the first one read the cache.
  template <int NP>
  void multiply_panels(const bf16 *weight, int64_t panel_items, int panel, Outputs out) const {
    const bool is_cut = !out.sums && rows_ <= kHeldRows && inputs_ > kPart;
    if (!is_cut) return multiply_rows<NP>({x_, weight, panel_items, NP * panel_items, inputs_, panel}, out);
    alignas(64) static thread_local float sums[kHeldRows * 4 * kPanel];
    out.sums = sums - panel * kPanel, out.sums_stride = NP * kPanel;
    const int step = (int)even_step(inputs_, kPart, kDepth);
    for (int input = 0; input < inputs_; input += step) {
      const int count = std::min(step, inputs_ - input);
      out.is_first = !input, out.is_last = input + count == inputs_;
      const int64_t ahead = out.is_last ? NP * panel_items - (int64_t)input * kPanel : (int64_t)step * kPanel;
      multiply_rows<NP>({x_ + input, weight + (int64_t)input * kPanel, panel_items, ahead, count, panel}, out);
    }
  }

  // All rows, in passes of nearly equal size.
  template <int NP>
  void multiply_rows(const Part &part, const Outputs &out) const {
    const int passes = (rows_ + kRowStep - 1) / kRowStep;
    int row = 0;
    for (int left = passes; left > 0; --left) {
      const int count = (rows_ - row + left - 1) / left;
      const unsigned fetched = share(2 * NP, passes, left);
      switch (count) {
        case 1: pass<1, NP>(row, part, fetched, out); break;
        case 2: pass<2, NP>(row, part, fetched, out); break;
        case 3: pass<3, std::min(NP, 2)>(row, part, fetched, out); break;
        case 4: pass<4, std::min(NP, 2)>(row, part, fetched, out); break;
        case 5: pass<5, std::min(NP, 2)>(row, part, fetched, out); break;
        default: pass<6, std::min(NP, 2)>(row, part, fetched, out);
      }
      row += count;
    }
  }

  // Which vectors of a pair of inputs a pass fetches for later, a bit for each: the last passes share them.
  static unsigned share(int vectors, int passes, int left) {
    int sharing = 1;
    while (2 * sharing <= std::min(passes, vectors)) sharing *= 2;
    if (left > sharing) return 0;
    const int count = vectors / sharing;
    return ((1u << count) - 1) << (left - 1) * count;
  }

  template <int MR, int NP>
  inline __attribute__((always_inline)) void pass(int row, const Part &part, unsigned fetched,
                                                  const Outputs &out) const {
    constexpr int kVectors = 2 * NP;
    const bf16 *x = part.x + row * stride_, *weight = part.weight;
    const int64_t panel_items = part.panel_items, ahead = part.ahead;
    const int panel = part.panel;
    __m512 sum[MR][kVectors];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n)
        sum[m][n] = out.is_first ? _mm512_setzero_ps()
                                 : _mm512_loadu_ps(out.sums_at(row + m, panel + n / 2) + n % 2 * kLanes);
    for (int i = 0; i < part.inputs; i += kDepth, weight += kStepItems)
      for (int pair = 0; pair < kDepth / 2; ++pair) {
        __m512bh right[kVectors];
#pragma GCC unroll 8
        for (int n = 0; n < kVectors; ++n) {
          const bf16 *from = weight + n / 2 * panel_items + n % 2 * (kStepItems / 2) + pair * 2 * kLanes;
          right[n] = (__m512bh)_mm512_loadu_si512(from);
          if (fetched >> n & 1) _mm_prefetch((const char *)(from + ahead), _MM_HINT_T1);
        }
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
          uint32_t both;
          std::memcpy(&both, x + m * stride_ + i + 2 * pair, sizeof(both));
          const __m512bh left = (__m512bh)_mm512_set1_epi32((int)both);
#pragma GCC unroll 8
          for (int n = 0; n < kVectors; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], left, right[n]);
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
