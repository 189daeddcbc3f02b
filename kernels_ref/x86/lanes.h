// Vectors of float32 as the sources of float32 arithmetic take them: eight lanes (AVX2, FMA, F16C), sixteen (AVX512),
// or a model of eight in plain C++. A source is compiled once for each, with HPU_DUO_LANES as the number, 0 = model.
//
// All of them round alike: products are fused with sums, and sums over the lanes of a vector halve it until one lane is
// left. Where lanes are not summed, results do not depend on their number.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if HPU_DUO_LANES
#include <immintrin.h>
#endif

#include "floats.h"

namespace hpu_duo {
namespace {

#if HPU_DUO_LANES == 16

struct Lanes {
  static constexpr int kCount = 16, kRegisters = 32;
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;

  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float *from) { return _mm512_loadu_ps(from); }
  static void store(float *to, F x) { _mm512_storeu_ps(to, x); }
  static F load(const float *from, M m) { return _mm512_maskz_loadu_ps(m, from); }
  static void store(float *to, F x, M m) { _mm512_mask_storeu_ps(to, m, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // The second one if either is not a number.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F nearest(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // 2^x of whole numbers from -127, which gives 0, to 127.
  static F power(F x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(127)), 23));
  }

  static I set(int x) { return _mm512_set1_epi32(x); }
  static I load(const int *from, M m) { return _mm512_maskz_loadu_epi32(m, from); }
  static void store(int *to, I x) { _mm512_storeu_si512(to, x); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I times_power(I x, int power) { return _mm512_slli_epi32(x, power); }
  static I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
  // The low bits of each.
  static void store_low(uint8_t *to, I x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(x)); }
  static void store_low(int16_t *to, I x) { _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(x)); }
  // The first numbers as bfloat16, half a step to even.
  static void store_bfloat16(uint16_t *to, F x, int count) {
    const __m512i bits = _mm512_castps_si512(x), even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), set(1));
    const __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(even, set(0x7FFF)));
    _mm512_mask_cvtepi32_storeu_epi16(to, first(count), _mm512_srli_epi32(near, 16));
  }
  // Pairs of 16-bit words, one in each lane: as they lie, of bytes with their signs, of the N-th nibbles of words,
  // and one in all lanes.
  static I words(const int16_t *from) { return _mm512_loadu_si512(from); }
  static I wide_bytes(const uint8_t *from) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from)); }
  // Bytes of two vectors plus `kAdded`, in an order for products: `in_order` restores that of their sums.
  static constexpr int kAdded = 0;
  static void wide_bytes(const uint8_t *from, I (&to)[2]) {
    for (int n = 0; n < 2; ++n) to[n] = wide_bytes(from + 2 * kCount * n);
  }
  static void in_order(I (&)[2]) {}
  template <int N>
  static I nibbles(I words) {
    const __m512i moved = N ? _mm512_srli_epi16(words, 4 * N) : words;
    return N == 3 ? moved : _mm512_and_si512(moved, _mm512_set1_epi16(15));
  }
  static I pair(const int16_t *from) {
    int both;
    std::memcpy(&both, from, sizeof(both));
    return _mm512_set1_epi32(both);
  }
  // Products of words, those of a pair summed.
  static I dot(I a, I b) { return _mm512_madd_epi16(a, b); }
  static I mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I index() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

  static M first(int count) { return count >= 16 ? 0xFFFF : (M)((1u << (count < 0 ? 0 : count)) - 1); }
  static M less(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
  static M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static M equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static M is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
  static M both(M a, M b) { return a & b; }
  static M either(M a, M b) { return a | b; }
  static bool any(M m) { return m; }
  static F select(M m, F a, F b) { return _mm512_mask_mov_ps(b, m, a); }
  static I select(M m, I a, I b) { return _mm512_mask_mov_epi32(b, m, a); }

  static F even(const uint16_t *pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
  }
  static F odd(const uint16_t *pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32((int)0xFFFF0000)));
  }
  static F of_bfloat16(const uint16_t *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
  }
  static F of_float16(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }

  // Codes of a byte, with their signs.
  static I bytes(const uint8_t *from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)); }
  static F whole(I x) { return _mm512_cvtepi32_ps(x); }
  static I to_whole(F x) { return _mm512_cvtps_epi32(x); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  // The first or second fp8 numbers (e4m3, no NaN) of pairs, times 2^-kFp8Power: the sign goes to the front, the rest
  // to the end of the exponent. Each vector has every second pair; `interleaved` restores their order.
  static constexpr int kFp8Power = 120;
  template <int ODD>
  static void fp8(const uint8_t *from, F (&to)[2]) {
    const __m512i codes = _mm512_loadu_si512(from), mask = _mm512_set1_epi32((int)0x87F00000);
    const __m512i words = _mm512_srai_epi16(ODD ? codes : _mm512_slli_epi16(codes, 8), 4);
    to[0] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(words, 16), mask));
    to[1] = _mm512_castsi512_ps(_mm512_and_si512(words, mask));
  }
  static void interleaved(F (&both)[2]) {
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const F low = _mm512_permutex2var_ps(both[0], order, both[1]);
    both[1] = _mm512_permutex2var_ps(both[0], _mm512_add_epi32(order, _mm512_set1_epi32(8)), both[1]);
    both[0] = low;
  }

  static __m256 halved(F x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
  static float sum(F x) {
    const __m256 y = halved(x);
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
  }
  static float most(F x) { return _mm512_reduce_max_ps(x); }
  // `sum` of sixteen vectors, in order.
  static F sums(const F *x) {
    F y[4];
    for (int i = 0; i < 4; ++i) {
      const F a = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 4], 0xee));
      const F b = _mm512_add_ps(_mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x44),
                                _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xee));
      y[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    const F low = _mm512_add_ps(_mm512_shuffle_ps(y[0], y[1], 0x44), _mm512_shuffle_ps(y[0], y[1], 0xee));
    const F high = _mm512_add_ps(_mm512_shuffle_ps(y[2], y[3], 0x44), _mm512_shuffle_ps(y[2], y[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd));
  }
};

#elif HPU_DUO_LANES == 8

struct Lanes {
  static constexpr int kCount = 8, kRegisters = 16;
  using F = __m256;
  using I = __m256i;
  using M = __m256i;

  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float *from) { return _mm256_loadu_ps(from); }
  static void store(float *to, F x) { _mm256_storeu_ps(to, x); }
  static F load(const float *from, M m) { return _mm256_maskload_ps(from, m); }
  static void store(float *to, F x, M m) { _mm256_maskstore_ps(to, m, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F nearest(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F power(F x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
  }

  static I set(int x) { return _mm256_set1_epi32(x); }
  static I load(const int *from, M m) { return _mm256_maskload_epi32(from, m); }
  static void store(int *to, I x) { _mm256_storeu_si256((__m256i *)to, x); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static I times_power(I x, int power) { return _mm256_slli_epi32(x, power); }
  static I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static void store_low(int16_t *to, I x) {
    const __m256i low = _mm256_shuffle_epi8(x, _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,
                                                                0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1));
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(low, 0x08)));
  }
  static void store_bfloat16(uint16_t *to, F x, int count) {
    const __m256i bits = _mm256_castps_si256(x), even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), set(1));
    const __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(even, set(0x7FFF)));
    int16_t whole[kCount];
    store_low(whole, _mm256_srli_epi32(near, 16));
    std::memcpy(to, whole, count * sizeof(*to));
  }
  static I words(const int16_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
  static I wide_bytes(const uint8_t *from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)); }
  static constexpr int kAdded = 128;
  static void wide_bytes(const uint8_t *from, I (&to)[2]) {
    const __m256i bytes = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)from), _mm256_set1_epi8((char)0x80));
    to[0] = _mm256_unpacklo_epi8(bytes, _mm256_setzero_si256());
    to[1] = _mm256_unpackhi_epi8(bytes, _mm256_setzero_si256());
  }
  static void in_order(I (&sums)[2]) {
    const __m256i low = _mm256_permute2x128_si256(sums[0], sums[1], 0x20);
    sums[1] = _mm256_permute2x128_si256(sums[0], sums[1], 0x31);
    sums[0] = low;
  }
  template <int N>
  static I nibbles(I words) {
    const __m256i moved = N ? _mm256_srli_epi16(words, 4 * N) : words;
    return N == 3 ? moved : _mm256_and_si256(moved, _mm256_set1_epi16(15));
  }
  static I pair(const int16_t *from) {
    int both;
    std::memcpy(&both, from, sizeof(both));
    return _mm256_set1_epi32(both);
  }
  static I dot(I a, I b) { return _mm256_madd_epi16(a, b); }
  static I mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I index() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

  static M first(int count) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), index()); }
  static M less(I a, I b) { return _mm256_cmpgt_epi32(b, a); }
  static M less(F a, F b) { return _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static M equal(F a, F b) { return _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
  static M is_nan(F a) { return _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
  static M both(M a, M b) { return _mm256_and_si256(a, b); }
  static M either(M a, M b) { return _mm256_or_si256(a, b); }
  static bool any(M m) { return !_mm256_testz_si256(m, m); }
  static F select(M m, F a, F b) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(m)); }
  static I select(M m, I a, I b) { return _mm256_blendv_epi8(b, a, m); }

  static F even(const uint16_t *pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)pairs), 16));
  }
  static F odd(const uint16_t *pairs) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_loadu_si256((const __m256i *)pairs), _mm256_set1_epi32((int)0xFFFF0000)));
  }
  static F of_bfloat16(const uint16_t *from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
  }
  static F of_float16(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

  static I bytes(const uint8_t *from) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)); }
  static F whole(I x) { return _mm256_cvtepi32_ps(x); }
  static I to_whole(F x) { return _mm256_cvtps_epi32(x); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static constexpr int kFp8Power = 120;
  template <int ODD>
  static void fp8(const uint8_t *from, F (&to)[2]) {
    const __m256i codes = _mm256_loadu_si256((const __m256i *)from), mask = _mm256_set1_epi32((int)0x87F00000);
    const __m256i words = _mm256_srai_epi16(ODD ? codes : _mm256_slli_epi16(codes, 8), 4);
    to[0] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(words, 16), mask));
    to[1] = _mm256_castsi256_ps(_mm256_and_si256(words, mask));
  }
  static void interleaved(F (&both)[2]) {
    const F low = _mm256_unpacklo_ps(both[0], both[1]), high = _mm256_unpackhi_ps(both[0], both[1]);
    both[0] = _mm256_permute2f128_ps(low, high, 0x20);
    both[1] = _mm256_permute2f128_ps(low, high, 0x31);
  }

  static float sum(F x) {
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
  }
  static float most(F x) {
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_shuffle_ps(z, z, 1)));
  }
  // `sum` of eight vectors, in order.
  static F sums(const F *x) {
    F y[4];
    for (int i = 0; i < 4; ++i)
      y[i] = _mm256_add_ps(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20), _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    const F low = _mm256_add_ps(_mm256_shuffle_ps(y[0], y[1], 0x44), _mm256_shuffle_ps(y[0], y[1], 0xee));
    const F high = _mm256_add_ps(_mm256_shuffle_ps(y[2], y[3], 0x44), _mm256_shuffle_ps(y[2], y[3], 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd));
  }
};

#else

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

struct Lanes {
  static constexpr int kCount = 8, kRegisters = 16;
  template <typename T>
  struct Vector {
    T lane[kCount];
  };
  using F = Vector<float>;
  using I = Vector<int>;
  using M = Vector<bool>;

  // One result for each lane.
  template <typename Function>
  static auto map(Function function) {
    Vector<decltype(function(0))> result;
    for (int i = 0; i < kCount; ++i) result.lane[i] = function(i);
    return result;
  }

  static F set(float x) { return map([&](int) { return x; }); }
  static F load(const float *from) { return map([&](int i) { return from[i]; }); }
  static void store(float *to, F x) { std::memcpy(to, x.lane, sizeof(x)); }
  static F load(const float *from, M m) { return map([&](int i) { return m.lane[i] ? from[i] : 0.0f; }); }
  static void store(float *to, F x, M m) {
    for (int i = 0; i < kCount; ++i)
      if (m.lane[i]) to[i] = x.lane[i];
  }
  static F add(F a, F b) { return map([&](int i) { return a.lane[i] + b.lane[i]; }); }
  static F sub(F a, F b) { return map([&](int i) { return a.lane[i] - b.lane[i]; }); }
  static F mul(F a, F b) { return map([&](int i) { return a.lane[i] * b.lane[i]; }); }
  static F fma(F a, F b, F c) { return map([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); }); }
  static F max(F a, F b) { return map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
  static F nearest(F x) { return map([&](int i) { return std::nearbyint(x.lane[i]); }); }
  static F power(F x) {
    return map([&](int i) {
      return std::isnan(x.lane[i]) ? x.lane[i] : float_of_bits((uint32_t)((int)x.lane[i] + 127) << 23);
    });
  }

  static I set(int x) { return map([&](int) { return x; }); }
  static I load(const int *from, M m) { return map([&](int i) { return m.lane[i] ? from[i] : 0; }); }
  static void store(int *to, I x) { std::memcpy(to, x.lane, sizeof(x)); }
  static I add(I a, I b) { return map([&](int i) { return a.lane[i] + b.lane[i]; }); }
  static I times_power(I x, int power) { return map([&](int i) { return (int)((uint32_t)x.lane[i] << power); }); }
  static I sub(I a, I b) { return map([&](int i) { return a.lane[i] - b.lane[i]; }); }
  template <typename T>
  static void store_low(T *to, I x) {
    for (int i = 0; i < kCount; ++i) to[i] = (T)x.lane[i];
  }
  static void store_bfloat16(uint16_t *to, F x, int count) {
    uint32_t bits[kCount];
    std::memcpy(bits, x.lane, sizeof(bits));
    for (int i = 0; i < count; ++i) to[i] = (uint16_t)((bits[i] + 0x7FFF + (bits[i] >> 16 & 1)) >> 16);
  }
  static I words(const int16_t *from) { return map([&](int i) { return both_of(from[2 * i], from[2 * i + 1]); }); }
  static I wide_bytes(const uint8_t *from) {
    return map([&](int i) { return both_of((int8_t)from[2 * i], (int8_t)from[2 * i + 1]); });
  }
  static constexpr int kAdded = 0;
  static void wide_bytes(const uint8_t *from, I (&to)[2]) {
    for (int n = 0; n < 2; ++n) to[n] = wide_bytes(from + 2 * kCount * n);
  }
  static void in_order(I (&)[2]) {}
  template <int N>
  static I nibbles(I words) {
    return map([&](int i) { return words.lane[i] >> 4 * N & 0x000F000F; });
  }
  static I pair(const int16_t *from) { return map([&](int) { return both_of(from[0], from[1]); }); }
  static I dot(I a, I b) {
    return map([&](int i) { return (int16_t)a.lane[i] * (int16_t)b.lane[i] + (a.lane[i] >> 16) * (b.lane[i] >> 16); });
  }
  static I mul(I a, I b) { return map([&](int i) { return a.lane[i] * b.lane[i]; }); }
  static I index() { return map([](int i) { return i; }); }

  static M first(int count) { return map([&](int i) { return i < count; }); }
  static M less(I a, I b) { return map([&](int i) { return a.lane[i] < b.lane[i]; }); }
  static M less(F a, F b) { return map([&](int i) { return a.lane[i] < b.lane[i]; }); }
  static M equal(F a, F b) { return map([&](int i) { return a.lane[i] == b.lane[i]; }); }
  static M is_nan(F a) { return map([&](int i) { return (bool)std::isnan(a.lane[i]); }); }
  static M both(M a, M b) { return map([&](int i) { return a.lane[i] && b.lane[i]; }); }
  static M either(M a, M b) { return map([&](int i) { return a.lane[i] || b.lane[i]; }); }
  static bool any(M m) {
    bool found = false;
    for (bool x : m.lane) found |= x;
    return found;
  }
  static F select(M m, F a, F b) { return map([&](int i) { return m.lane[i] ? a.lane[i] : b.lane[i]; }); }
  static I select(M m, I a, I b) { return map([&](int i) { return m.lane[i] ? a.lane[i] : b.lane[i]; }); }

  static F even(const uint16_t *pairs) { return map([&](int i) { return float_of_bits((uint32_t)pairs[2 * i] << 16); }); }
  static F odd(const uint16_t *pairs) { return even(pairs + 1); }
  static F of_bfloat16(const uint16_t *from) { return map([&](int i) { return float_of_bits((uint32_t)from[i] << 16); }); }
  static F of_float16(const uint16_t *from) { return map([&](int i) { return float_of_half(from[i]); }); }

  static I bytes(const uint8_t *from) { return map([&](int i) { return (int)(int8_t)from[i]; }); }
  static F whole(I x) { return map([&](int i) { return (float)x.lane[i]; }); }
  static I to_whole(F x) { return map([&](int i) { return (int)x.lane[i]; }); }
  static F div(F a, F b) { return map([&](int i) { return a.lane[i] / b.lane[i]; }); }
  static constexpr int kFp8Power = 120;
  template <int ODD>
  static void fp8(const uint8_t *from, F (&to)[2]) {
    for (int n = 0; n < 2; ++n) to[n] = map([&](int i) { return float_of_fp8(from[2 * (2 * i + n) + ODD]); });
  }
  static void interleaved(F (&both)[2]) {
    const F was[2] = {both[0], both[1]};
    for (int n = 0; n < 2; ++n) both[n] = map([&](int i) { return was[i % 2].lane[(n * kCount + i) / 2]; });
  }

  static float sum(F x) {
    for (int half = kCount / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) x.lane[i] += x.lane[i + half];
    return x.lane[0];
  }
  static float most(F x) {
    for (int half = kCount / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) x.lane[i] = x.lane[i] > x.lane[i + half] ? x.lane[i] : x.lane[i + half];
    return x.lane[0];
  }
  static F sums(const F *x) { return map([&](int i) { return sum(x[i]); }); }

 private:
  static float float_of_fp8(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const int size = exponent ? fraction + 8 : fraction, power = (exponent ? exponent : 1) - 10 - kFp8Power;
    return std::ldexp((float)(code & 128 ? -size : size), power);
  }
  static int both_of(int low, int high) { return (int)((uint32_t)high << 16 | (uint16_t)low); }
  static float float_of_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = std::ldexp((float)(exponent ? fraction + 1024 : fraction), (exponent ? exponent : 1) - 25);
    if (exponent == 31) size = fraction ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
  }
};

#endif

using F = Lanes::F;
using I = Lanes::I;
using M = Lanes::M;

constexpr int kLanes = Lanes::kCount;
constexpr float kFloor = -1.0e30f;  // score of a hidden key; kernels_ref/partial.py says the same
constexpr float kLog2e = 1.44269504f;

// 2^x for x <= 0, within 2e-7 of it; 0 below 2^-126.
inline F exp2_of(F x) {
  x = Lanes::max(Lanes::set(-127.0f), x);
  const F whole = Lanes::nearest(x), f = Lanes::sub(x, whole);
  F y = Lanes::set(1.535336188319500e-4f);
  for (float c : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                  6.931472028550421e-1f, 1.0f})
    y = Lanes::fma(y, f, Lanes::set(c));
  return Lanes::mul(y, Lanes::power(whole));
}

inline float first_lane(F x) {
  float lane[kLanes];
  Lanes::store(lane, x);
  return lane[0];
}

// How weights, keys and values are stored: each vector is widened as it is read.
struct Bfloat16 {
  using Item = uint16_t;
  static constexpr int kPair = 2;  // inputs of an output that lie side by side in packed weights
  static F load(const Item *from) { return Lanes::of_bfloat16(from); }
};

struct Float16 {
  using Item = uint16_t;
  static constexpr int kPair = 1;
  static F load(const Item *from) { return Lanes::of_float16(from); }
};

struct Float32 {
  using Item = float;
  static constexpr int kPair = 1;
  static F load(const Item *from) { return Lanes::load(from); }
};

// Calls `function` with an object of the class.
template <class Function>
inline void with_stored(Store store, const Function &function) {
  switch (store) {
    case Store::kBfloat16: return function(Bfloat16());
    case Store::kFloat16: return function(Float16());
    default: return function(Float32());
  }
}

// The largest size of some numbers; NaN if one of them is.
inline float largest_of(const float *x, int64_t count) {
  F most = Lanes::set(0.0f);
  M has_nan = Lanes::is_nan(most);
  for (int64_t i = 0; i < count; i += kLanes) {
    const F each = Lanes::load(x + i);
    most = Lanes::max(most, Lanes::max(each, Lanes::sub(Lanes::set(0.0f), each)));
    has_nan = Lanes::either(has_nan, Lanes::is_nan(each));
  }
  return Lanes::any(has_nan) ? NAN : Lanes::most(most);
}

}  // namespace
}  // namespace hpu_duo
