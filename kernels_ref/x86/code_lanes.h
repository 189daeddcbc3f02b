// Codes of keys and values to lanes of float32: two vectors at a time, of elements from `d` on and from `d + second` on.

#pragma once

#include <cstdint>

#include "codes.h"
#include "lanes.h"

namespace hpu_duo {
namespace {

struct Int8Codes {
  static constexpr int kStep = 2 * kLanes;  // bytes of two vectors
  static constexpr bool kHasZero = false;
  static constexpr float kUnit = 1;  // by which scales are multiplied
  static int bytes(int dim) { return dim; }
  static int second(int) { return kLanes; }

  static void load(const uint8_t *from, F &a, F &b) {
    a = one(from);
    b = one(from + kLanes);
  }

 private:
  static F one(const uint8_t *from) {
#if HPU_DUO_LANES == 16
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif HPU_DUO_LANES == 8
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    return Lanes::map([&](int i) { return (float)(int8_t)from[i]; });
#endif
  }
};

struct Int4Codes {
  static constexpr int kStep = kLanes;
  static constexpr bool kHasZero = true;
  static constexpr float kUnit = 1;
  static int bytes(int dim) { return dim / 2; }
  static int second(int dim) { return dim / 2; }

  static void load(const uint8_t *from, F &a, F &b) {
#if HPU_DUO_LANES == 16
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
    a = _mm512_cvtepi32_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(15)));
    b = _mm512_cvtepi32_ps(_mm512_srli_epi32(pairs, 4));
#elif HPU_DUO_LANES == 8
    const __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
    a = _mm256_cvtepi32_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(15)));
    b = _mm256_cvtepi32_ps(_mm256_srli_epi32(pairs, 4));
#else
    a = Lanes::map([&](int i) { return (float)(from[i] & 15); });
    b = Lanes::map([&](int i) { return (float)(from[i] >> 4); });
#endif
  }
};

// Their bits are those of a float16 that is 256 times smaller.
struct Fp8Codes {
  static constexpr int kStep = 2 * kLanes;
  static constexpr bool kHasZero = false;
  static constexpr float kUnit = 256;
  static int bytes(int dim) { return dim; }
  static int second(int) { return kLanes; }

  static void load(const uint8_t *from, F &a, F &b) {
    a = one(from);
    b = one(from + kLanes);
  }

 private:
  static F one(const uint8_t *from) {
#if HPU_DUO_LANES == 16
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    const __m256i size = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const __m256i is_nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(_mm256_set1_epi16(0x7f), wide), 8);
    return _mm512_cvtph_ps(_mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(size, 7), sign),
                                           _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00))));
#elif HPU_DUO_LANES == 8
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)from));
    const __m128i size = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    const __m128i is_nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f));
    const __m128i sign = _mm_slli_epi16(_mm_andnot_si128(_mm_set1_epi16(0x7f), wide), 8);
    return _mm256_cvtph_ps(_mm_or_si128(_mm_or_si128(_mm_slli_epi16(size, 7), sign),
                                        _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00))));
#else
    return Lanes::map([&](int i) {
      const int size = from[i] & 0x7f, exponent = size >> 3, fraction = size & 7;
      float x = std::ldexp((float)(exponent ? fraction + 8 : fraction), (exponent ? exponent : 1) - 18);
      if (size == 0x7f) x = NAN;
      return from[i] >> 7 ? -x : x;
    });
#endif
  }
};

// Calls `function` with an object of the class.
template <class Function>
inline void with_codes(Code code, const Function &function) {
  switch (code) {
    case Code::kInt8: return function(Int8Codes());
    case Code::kInt4: return function(Int4Codes());
    default: return function(Fp8Codes());
  }
}

}  // namespace
}  // namespace hpu_duo
