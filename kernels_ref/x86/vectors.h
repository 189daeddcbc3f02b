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

}  // namespace
}  // namespace hpu_duo
