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

// e^x / 2^exponent, of scores hardly above the one that gives 1 and within four million of 0; the exponent is a
// whole number.
class Exponential {
 public:
  explicit Exponential(__m512 exponent)
      : shift_(_mm512_sub_ps(_mm512_set1_ps(kMagic), exponent)),
        least_(_mm512_mul_ps(_mm512_sub_ps(exponent, _mm512_set1_ps(125)), _mm512_set1_ps(1 / kLog2e))) {}

  // The fraction by a polynomial (relative error below 8e-5, a small part of that of bfloat16), the exponent by
  // adding to its bits; nothing is smaller than 2^-125.
  __m512 operator()(__m512 x) const {
    const __m512 log2e = _mm512_set1_ps(kLog2e);
    x = _mm512_max_ps(x, least_);
    const __m512 rounded = _mm512_fmadd_ps(x, log2e, shift_);
    const __m512 f = _mm512_fmsub_ps(x, log2e, _mm512_sub_ps(rounded, shift_));
    __m512 y = _mm512_set1_ps(5.5171675e-2f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4261299e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9326097e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.9992812e-1f));
    const __m512i whole = _mm512_slli_epi32(_mm512_castps_si512(rounded), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), whole));
  }

 private:
  static constexpr float kMagic = 12582912;  // 1.5 * 2^23: whole numbers added to it are in its last bits
  __m512 shift_, least_;
};

// Pairs of bfloat16 of two vectors, item by item.
inline __m512i pairs_of(__m512 even, __m512 odd) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

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
