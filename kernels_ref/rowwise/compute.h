// What the instructions of a row program compute.

#pragma once

#include <ATen/cpu/vec/vec.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstring>

#include "rows.h"

namespace hpu_duo {
namespace {

using Vec = at::vec::Vectorized<float>;

#if defined(CPU_CAPABILITY_AVX512)
// x / (1 + exp(-x)), to 20 bits.
Vec quick_silu(Vec v) {
  const __m512 x = v, limit = _mm512_set1_ps(200), one = _mm512_set1_ps(1);
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
#else
Vec quick_silu(Vec v) { return v / (Vec(1) + v.neg().exp_u20()); }
#endif

template <class F> void unary(F f, const float *a, float *to, int64_t count) {
  int64_t i = 0;
  for (; i + Vec::size() <= count; i += Vec::size()) f(Vec::loadu(a + i)).store(to + i);
  if (i < count) f(Vec::loadu(a + i, count - i)).store(to + i, count - i);
}

// A factor of width 1 counts for its whole row.
template <bool kRounds, class F> void binary(F f, const float *__restrict a, int64_t wa, const float *__restrict b,
                                             int64_t wb, float *__restrict to, int64_t width, int64_t rows) {
  auto finish = [](float x) { return kRounds ? rounded(x) : x; };
  if (wa == wb) {
    for (int64_t i = 0; i < rows * width; ++i) to[i] = finish(f(a[i], b[i]));
    return;
  }
  for (int64_t r = 0; r < rows; ++r, to += width) {
    if (wb == 1) {
      const float *left = a + r * wa, right = b[r];
      for (int64_t i = 0; i < width; ++i) to[i] = finish(f(left[i], right));
    } else {
      const float left = a[r], *right = b + r * wb;
      for (int64_t i = 0; i < width; ++i) to[i] = finish(f(left, right[i]));
    }
  }
}

template <class F> void binary(bool rounds, F f, const float *a, int64_t wa, const float *b, int64_t wb, float *to,
                               int64_t width, int64_t rows) {
  if (rounds)
    binary<true>(f, a, wa, b, wb, to, width, rows);
  else
    binary<false>(f, a, wa, b, wb, to, width, rows);
}

// Rows are short: calls of memcpy would cost more than they copy.
void copy_items(const float *__restrict from, float *__restrict to, int64_t count) {
  int64_t i = 0;
  for (; i + Vec::size() <= count; i += Vec::size()) Vec::loadu(from + i).store(to + i);
  for (; i < count; ++i) to[i] = from[i];
}

void copy_row(const float *from, int64_t width_of_source, float *to, int64_t width) {
  if (width_of_source == 1)
    std::fill(to, to + width, *from);
  else
    copy_items(from, to, width);
}

void where(const float *c, int64_t wc, const float *a, int64_t wa, const float *b, int64_t wb, float *to,
           int64_t width, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, to += width, a += wa, b += wb) {
    if (wc == 1) {
      if (c[r] != 0)
        copy_row(a, wa, to, width);
      else
        copy_row(b, wb, to, width);
      continue;
    }
    const float *seen = c + r * wc;
    for (int64_t i = 0; i < width; ++i) to[i] = seen[i] != 0 ? a[wa == 1 ? 0 : i] : b[wb == 1 ? 0 : i];
  }
}

float sum_row(const float *a, int64_t width) {
  Vec sums[4] = {Vec(0), Vec(0), Vec(0), Vec(0)};
  int64_t i = 0;
  for (; i + 4 * Vec::size() <= width; i += 4 * Vec::size())
    for (int k = 0; k < 4; ++k) sums[k] = sums[k] + Vec::loadu(a + i + k * Vec::size());
  float lanes[Vec::size()];
  ((sums[0] + sums[1]) + (sums[2] + sums[3])).store(lanes);
  float total = 0;
  for (float lane : lanes) total += lane;
  for (; i < width; ++i) total += a[i];
  return total;
}

float largest_of_row(const float *a, int64_t width) {
  float largest = a[0];
  for (int64_t i = 1; i < width; ++i) largest = a[i] > largest || std::isnan(a[i]) ? a[i] : largest;
  return largest;
}

Vec sigmoid(Vec x) { return Vec(1) / (Vec(1) + x.neg().exp()); }
Vec gelu(Vec x) { return x * Vec(0.5f) * (Vec(1) + (x * Vec((float)M_SQRT1_2)).erf()); }
Vec gelu_tanh(Vec x) {
  const Vec inner = Vec((float)(M_SQRT2 * M_2_SQRTPI * 0.5)) * (x + Vec(0.044715f) * x * x * x);
  return Vec(0.5f) * x * (Vec(1) + inner.tanh());
}

// One instruction on some rows of the slots that begin at `at`.
void compute(const Program &p, const Instruction &x, float *const *at, int64_t rows) {
  float *to = at[x.to];
  const float *a = at[x.a], *b = at[x.b];
  const int64_t width = p.widths[x.to], wa = p.widths[x.a], wb = p.widths[x.b], count = rows * width;
  auto pair = [&](auto f) { binary(x.rounds, f, a, wa, b, wb, to, width, rows); };
  const bool is_pair = x.code >= kAdd && x.code <= kNotEqual;
  switch (x.code) {
    case kConstant: std::fill(to, to + count, x.number); break;
    case kPlace:
      for (int64_t r = 0; r < rows; ++r) copy_items(a + r * wa, to + r * width + x.c, wa);
      break;
    case kCopy: std::memcpy(to, a, count * sizeof(float)); break;
    case kNeg: unary([](Vec v) { return v.neg(); }, a, to, count); break;
    case kAbs: unary([](Vec v) { return v.abs(); }, a, to, count); break;
    case kExp: unary([](Vec v) { return v.exp(); }, a, to, count); break;
    case kLog: unary([](Vec v) { return v.log(); }, a, to, count); break;
    case kSqrt: unary([](Vec v) { return v.sqrt(); }, a, to, count); break;
    case kRsqrt: unary([](Vec v) { return Vec(1) / v.sqrt(); }, a, to, count); break;
    case kReciprocal: unary([](Vec v) { return Vec(1) / v; }, a, to, count); break;
    case kSigmoid: unary(sigmoid, a, to, count); break;
    case kTanh: unary([](Vec v) { return v.tanh(); }, a, to, count); break;
    case kSilu:
      // What is rounded to 8 bits needs no more than 20.
      if (x.rounds)
        unary(quick_silu, a, to, count);
      else
        unary([](Vec v) { return v / (Vec(1) + v.neg().exp()); }, a, to, count);
      break;
    case kRelu: unary([](Vec v) { return at::vec::maximum(v, Vec(0)); }, a, to, count); break;
    case kGelu: unary(gelu, a, to, count); break;
    case kGeluTanh: unary(gelu_tanh, a, to, count); break;
    case kCos: unary([](Vec v) { return v.cos(); }, a, to, count); break;
    case kSin: unary([](Vec v) { return v.sin(); }, a, to, count); break;
    case kAdd: pair([](float u, float v) { return u + v; }); break;
    case kSub: pair([](float u, float v) { return u - v; }); break;
    case kMul: pair([](float u, float v) { return u * v; }); break;
    case kDiv: pair([](float u, float v) { return u / v; }); break;
    case kMax: pair([](float u, float v) { return u > v || u != u ? u : v; }); break;
    case kMin: pair([](float u, float v) { return u < v || u != u ? u : v; }); break;
    case kLess: pair([](float u, float v) { return u < v ? 1.f : 0.f; }); break;
    case kLessEqual: pair([](float u, float v) { return u <= v ? 1.f : 0.f; }); break;
    case kGreater: pair([](float u, float v) { return u > v ? 1.f : 0.f; }); break;
    case kGreaterEqual: pair([](float u, float v) { return u >= v ? 1.f : 0.f; }); break;
    case kEqual: pair([](float u, float v) { return u == v ? 1.f : 0.f; }); break;
    case kNotEqual: pair([](float u, float v) { return u != v ? 1.f : 0.f; }); break;
    case kWhere: where(a, wa, b, wb, at[x.c], p.widths[x.c], to, width, rows); break;
    case kSum:
      for (int64_t r = 0; r < rows; ++r) to[r] = sum_row(a + r * wa, wa);
      break;
    case kMean:
      for (int64_t r = 0; r < rows; ++r) to[r] = sum_row(a + r * wa, wa) / (float)wa;
      break;
    case kAmax:
      for (int64_t r = 0; r < rows; ++r) to[r] = largest_of_row(a + r * wa, wa);
      break;
    default: TORCH_CHECK(false, "expected an instruction, got ", x.code);
  }
  if (x.rounds && !is_pair) round_items(to, count);
}

}  // namespace
}  // namespace hpu_duo
