// What the attention kernels share.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace hpu_duo {
namespace {

constexpr int kLanes = 16;
constexpr float kFloor = -1.0e30f;  // score of a hidden key; kernels_ref/partial.py says the same
constexpr float kLog2e = 1.44269504f;

inline int round_up(int value, int step) { return (value + step - 1) / step * step; }

// 2^x for x <= 0: polynomial of the fraction (relative error below 5e-6), exponent by scaling.
inline __m512 exp2_of(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(9.6183774e-3f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5503324e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

// For each item of the indices 0 to 127 an entry of 16 bits; other bits of an index do not matter.
inline __m512i look_up(const uint16_t *table, __m512i index) {
#ifdef __AVX512VBMI__
  // Entries are below 256: as bytes they take two registers.
  const __m512i low = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_load_si512(table))),
                                         _mm512_cvtepi16_epi8(_mm512_load_si512(table + 32)), 1);
  const __m512i high = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_load_si512(table + 64))),
                                          _mm512_cvtepi16_epi8(_mm512_load_si512(table + 96)), 1);
  return _mm512_permutex2var_epi8(low, index, high);
#else
  const __m512i low = _mm512_permutex2var_epi16(_mm512_load_si512(table), index, _mm512_load_si512(table + 32));
  const __m512i high = _mm512_permutex2var_epi16(_mm512_load_si512(table + 64), index, _mm512_load_si512(table + 96));
  return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(index, _mm512_set1_epi16(64)), low, high);
#endif
}

// e^x / 2^exponent in bfloat16, of scores hardly above the one that gives 1; the exponent is a whole number.
//
// The power of 2 in steps of 1 / 128 is a number whose last seven bits are a fraction and whose others are the exponent
// of the result; the fraction is looked up. Together with rounding, results are within 0.65 % of the power, and
// 0.2 % off on average, where bfloat16 alone rounds by up to 0.4 %.
class Exponential {
 public:
  explicit Exponential(__m512 exponent)
      : shift_(_mm512_fnmadd_ps(exponent, _mm512_set1_ps(kSteps), _mm512_set1_ps(kMagic + 127 * kSteps))),
        least_(_mm512_mul_ps(_mm512_sub_ps(exponent, _mm512_set1_ps(126)), _mm512_set1_ps(1 / kLog2e))) {}

  // Pairs of results, item by item, and 0 for the items that are not seen; nothing else is smaller than 2^-126.
  __m512i operator()(__m512 even, __m512 odd, __mmask16 even_seen = 0xFFFF, __mmask16 odd_seen = 0xFFFF) const {
    const __m512i high = _mm512_slli_epi32(steps(odd, odd_seen), 16);
    const __m512i both = _mm512_mask_blend_epi16(0xAAAAAAAA, steps(even, even_seen), high);
    // Of each result the last seven bits from the table.
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(127), look_up(kFractions, both), both, 0xCA);
  }

 private:
  static constexpr int kSteps = 128;
  static constexpr float kMagic = 12582912;  // 1.5 * 2^23: whole numbers added to it are in its last bits
  alignas(64) static constexpr uint16_t kFractions[kSteps] = {
      0, 1, 1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11, 12, 12, 13, 14, 15, 15,
      16, 17, 18, 19, 19, 20, 21, 22, 23, 23, 24, 25, 26, 27, 28, 28, 29, 30, 31, 32, 33, 34,
      34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54,
      55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 72, 73, 74, 75, 76, 77,
      78, 79, 80, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 96, 97, 98, 99, 100, 102, 103,
      104, 105, 107, 108, 109, 111, 112, 113, 115, 116, 117, 118, 120, 121, 123, 124, 125, 127};

  __m512i steps(__m512 x, __mmask16 seen) const {
    const __m512 sum = _mm512_fmadd_ps(_mm512_max_ps(x, least_), _mm512_set1_ps(kSteps * kLog2e), shift_);
    return _mm512_maskz_mov_epi32(seen, _mm512_castps_si512(sum));
  }

  __m512 shift_, least_;
};

// Sixteen rows of sixteen numbers to columns.
inline void transpose(__m512i (&x)[kLanes]) {
  __m512i y[kLanes];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
      y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
    x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
  }
}

}  // namespace
}  // namespace hpu_duo
