// Floats and bfloat16 as what one instruction computes at a time: sixteen floats with AVX-512, eight with AVX2.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace hpu_duo {
namespace {

// The upper half of a float.
struct Half {
  uint16_t bits;
};

inline float get_one(const float *from) { return *from; }
inline float get_one(const Half *from) {
  const uint32_t bits = (uint32_t)from->bits << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline void put_one(float *to, float x) { *to = x; }
// Rounded to even, as torch does.
inline void put_one(Half *to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  to->bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (uint16_t)even;
}

#if defined(CPU_CAPABILITY_AVX512)

using Lanes = __m512;
constexpr int64_t kLanes = 16;

inline Lanes get(const float *from) { return _mm512_loadu_ps(from); }
inline Lanes get(const Half *from) {
  const __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
}
inline Lanes every(float x) { return _mm512_set1_ps(x); }
inline float first_of(Lanes x) { return _mm512_cvtss_f32(x); }
inline float sum_of(Lanes x) { return _mm512_reduce_add_ps(x); }

inline void put(float *to, Lanes x) { _mm512_storeu_ps(to, x); }
inline void put(Half *to, Lanes x) {
#if defined(__AVX512BF16__)
  // It takes what is denormal for 0, as products of bfloat16 do.
  _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_mov_epi32(even, is_nan, _mm512_set1_epi32(0x7FC00000));
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

#elif defined(CPU_CAPABILITY_AVX2)

using Lanes = __m256;
constexpr int64_t kLanes = 8;

inline Lanes get(const float *from) { return _mm256_loadu_ps(from); }
inline Lanes get(const Half *from) {
  const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16));
}
inline Lanes every(float x) { return _mm256_set1_ps(x); }
inline float first_of(Lanes x) { return _mm256_cvtss_f32(x); }
inline float sum_of(Lanes x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline void put(float *to, Lanes x) { _mm256_storeu_ps(to, x); }
inline void put(Half *to, Lanes x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_blendv_epi8(even, _mm256_set1_epi32(0x7FC00000), is_nan);
  const __m256i halves = _mm256_packus_epi32(_mm256_srli_epi32(rounded, 16), _mm256_setzero_si256());
  _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
}

#else

using Lanes = float;
constexpr int64_t kLanes = 1;

inline Lanes get(const float *from) { return get_one(from); }
inline Lanes get(const Half *from) { return get_one(from); }
inline Lanes every(float x) { return x; }
inline float first_of(Lanes x) { return x; }
inline float sum_of(Lanes x) { return x; }
inline void put(float *to, Lanes x) { put_one(to, x); }
inline void put(Half *to, Lanes x) { put_one(to, x); }

#endif

}  // namespace
}  // namespace hpu_duo
