// The place of the largest item of each row, in hardly more than one pass.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "vectors.h"

namespace hpu_duo {
namespace {

constexpr int64_t kBlock = 1024;  // items that are looked through again for the place

// The items of a block, side by side in pairs: float32 is bfloat16 with more bits behind.
class Block {
 public:
  Block(const bf16 *items, int64_t count) : items_(items), count_(count) {}

  float largest() const {
    __m512 most = _mm512_set1_ps(-INFINITY);
    __mmask16 has_nan = 0;
    for (int64_t i = 0; i < count_; i += 2 * kLanes) {
      const __m512i pairs = at(i);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000)));
      most = _mm512_max_ps(most, _mm512_max_ps(even, odd));
      has_nan |= _mm512_cmp_ps_mask(even, odd, _CMP_UNORD_Q);
    }
    return has_nan ? NAN : _mm512_reduce_max_ps(most);
  }

  // The first item that is equal, or not a number if `value` is none.
  int64_t place_of(float value) const {
    for (int64_t i = 0; i < count_; ++i) {
      const float item = _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32((int)((uint32_t)items_[i] << 16))));
      if (item == value || (std::isnan(item) && std::isnan(value))) return i;
    }
    return 0;
  }

 private:
  // Pairs of items; behind the last one, minus infinity.
  __m512i at(int64_t i) const {
    const int64_t left = count_ - i;
    const __mmask32 there = left >= 2 * kLanes ? 0xFFFFFFFF : (1u << left) - 1;
    return _mm512_mask_loadu_epi16(_mm512_set1_epi16((short)0xFF80), there, items_ + i);
  }

  const bf16 *items_;
  int64_t count_;
};

}  // namespace

// Of equal items the first one, and the first one that is not a number where there is one, as argmax of torch has it.
void place_of_largest(const bf16 *rows, int *place, int64_t num_rows, int64_t width, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    const bf16 *items = rows + row * width;
    const auto block_at = [&](int64_t first) { return Block(items + first, std::min(kBlock, width - first)); };
    float most = -INFINITY;
    int64_t best = 0;
    for (int64_t first = 0; first < width && !std::isnan(most); first += kBlock) {
      const float largest = block_at(first).largest();
      if (largest > most || std::isnan(largest)) most = largest, best = first;
    }
    place[row] = (int)(best + block_at(best).place_of(most));
  }
}

}  // namespace hpu_duo
