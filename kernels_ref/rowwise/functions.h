// Functions of lanes, and of whole rows.

#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace hpu_duo {
namespace {

using Vec = at::vec::Vectorized<float>;

#if defined(CPU_CAPABILITY_AVX512)

// x / (1 + exp(-x)), to 20 bits.
inline Lanes quick_silu(Lanes x) {
  const __m512 limit = _mm512_set1_ps(200), one = _mm512_set1_ps(1);
  // A bound comes first: where the other operand is not a number, that one is taken.
  const __m512 bounded = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit), _mm512_min_ps(limit, x));
  const __m512 scale = _mm512_set1_ps(-1.44269504f);
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(bounded, scale), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_fmsub_ps(bounded, scale, whole);
  __m512 power = _mm512_set1_ps(1.54035304e-4f);
  for (float next : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.f})
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(next));
  const __m512 sum = _mm512_add_ps(one, _mm512_scalef_ps(power, whole));
  const __m512 guess = _mm512_rcp14_ps(sum);
  const __mmask16 is_finite = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(INFINITY), _CMP_NEQ_UQ);
  const __m512 twice = _mm512_fnmadd_ps(sum, guess, _mm512_set1_ps(2));
  return _mm512_mul_ps(x, _mm512_mask_mul_ps(guess, is_finite, guess, twice));
}

#endif

// As a bfloat16 would have it.
inline float rounded(float x) {
  Half half;
  put_one(&half, x);
  return get_one(&half);
}

inline void round_items(float *x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = rounded(x[i]);
}

inline Vec gelu(Vec x) { return x * Vec(0.5f) * (Vec(1) + (x * Vec((float)M_SQRT1_2)).erf()); }
inline Vec gelu_tanh(Vec x) {
  const Vec inner = Vec((float)(M_SQRT2 * M_2_SQRTPI * 0.5)) * (x + Vec(0.044715f) * x * x * x);
  return Vec(0.5f) * x * (Vec(1) + inner.tanh());
}

// The sum of f of all items, in four sums side by side.
template <class T, class F> float sum_with(F f, const T *a, int64_t count) {
  Lanes sums[4] = {every(0), every(0), every(0), every(0)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    for (int k = 0; k < 4; ++k) sums[k] = sums[k] + f(get(a + i + k * kLanes));
  float total = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; ++i) total += first_of(f(every(get_one(a + i))));
  return total;
}

template <class T> float sum(const T *a, int64_t count) {
  return sum_with([](Lanes x) { return x; }, a, count);
}

template <class T> float sum_of_squares(const T *a, int64_t count) {
  return sum_with([](Lanes x) { return x * x; }, a, count);
}

template <class T> float largest(const T *a, int64_t count) {
  float result = get_one(a);
  for (int64_t i = 1; i < count; ++i) {
    const float x = get_one(a + i);
    result = x > result || std::isnan(x) ? x : result;
  }
  return result;
}

}  // namespace
}  // namespace hpu_duo
