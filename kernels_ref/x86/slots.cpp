// Which slot of a budget is given up: one pass over scores, positions and what is protected.

#include <immintrin.h>

#include <climits>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "vectors.h"

namespace hpu_duo {
namespace {

// The lowest of sixteen columns of slots each, and the lowest of these.
class Lowest {
 public:
  void add(__m512 score, __m512i position, __mmask16 may_go, int first) {
    const __mmask16 is_equal = _mm512_mask_cmp_ps_mask(may_go, score, score_, _CMP_EQ_OQ);
    const __mmask16 is_lower = _mm512_mask_cmp_ps_mask(may_go, score, score_, _CMP_LT_OQ) |
                               _mm512_mask_cmplt_epi32_mask(is_equal, position, position_);
    score_ = _mm512_mask_mov_ps(score_, is_lower, score);
    position_ = _mm512_mask_mov_epi32(position_, is_lower, position);
    first_ = _mm512_mask_mov_epi32(first_, is_lower, _mm512_set1_epi32(first));
  }

  int slot() const {
    alignas(64) float score[kLanes];
    alignas(64) int position[kLanes], first[kLanes];
    _mm512_store_ps(score, score_);
    _mm512_store_si512(position, position_);
    _mm512_store_si512(first, first_);
    int best = 0;
    for (int lane = 1; lane < kLanes; ++lane)
      if (score[lane] < score[best] || (score[lane] == score[best] && position[lane] < position[best])) best = lane;
    return first[best] + best;
  }

 private:
  __m512 score_ = _mm512_set1_ps(__builtin_inff());
  __m512i position_ = _mm512_set1_epi32(INT_MAX), first_ = _mm512_setzero_si512();
};

}  // namespace

// For each line of slots the unprotected one with the lowest score, of equal ones that with the lowest position; 0 where
// none may go. `score` is null if all are equal, `is_protected` if all may go.
void eviction_victims(const float *score, const int *position, const bool *is_protected, int *slot, int64_t num_lines,
                 int num_slots, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t line = 0; line < num_lines; ++line) {
    Lowest lowest;
    for (int first = 0; first < num_slots; first += kLanes) {
      const int64_t place = line * num_slots + first;
      const int left = num_slots - first;
      const __mmask16 there = left >= kLanes ? 0xFFFF : (__mmask16)((1u << left) - 1);
      __mmask16 may_go = there;
      if (is_protected) {
        const __m128i bytes = _mm_maskz_loadu_epi8(there, is_protected + place);
        may_go &= ~_mm_test_epi8_mask(bytes, bytes);
      }
      const __m512 scores = score ? _mm512_maskz_loadu_ps(there, score + place) : _mm512_setzero_ps();
      lowest.add(scores, _mm512_maskz_loadu_epi32(there, position + place), may_go, first);
    }
    slot[line] = lowest.slot();
  }
}

}  // namespace hpu_duo
