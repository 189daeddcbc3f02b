// Codes of keys and values to lanes of float32: two vectors at a time, of elements from `d` on and from `d + second` on.

#pragma once

#include <cstdint>

#include "codes.h"
#include "lanes.h"

namespace hpu_duo {
namespace {

// Vectors of 16-bit integers, and of sums of products of neighbours.
#if HPU_DUO_LANES == 16
using Words = __m512i;

inline Words load_words(const int16_t *from) { return _mm512_loadu_si512(from); }
inline Words both_words(int pair) { return _mm512_set1_epi32(pair); }
inline I add_pairs(I sum, Words a, Words b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline void store_words(int16_t *to, F x) {
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
// Neighbours in 128 bits each of 32 bytes of two vectors side by side: of their first and of their last halves.
inline void pair_bytes(const uint8_t *even, const uint8_t *odd, __m256i &low, __m256i &high) {
  const __m256i a = _mm256_loadu_si256((const __m256i *)even), b = _mm256_loadu_si256((const __m256i *)odd);
  low = _mm256_unpacklo_epi8(a, b);
  high = _mm256_unpackhi_epi8(a, b);
}
inline Words signed_words(__m256i x) { return _mm512_cvtepi8_epi16(x); }
inline Words unsigned_words(__m256i x) { return _mm512_cvtepu8_epi16(x); }
inline Words low_nibbles(Words x) { return _mm512_and_si512(x, _mm512_set1_epi16(15)); }
inline Words high_nibbles(Words x) { return _mm512_srli_epi16(x, 4); }
inline void in_order(I &low, I &high) {
  const I first = _mm512_shuffle_i64x2(low, high, 0x44);
  high = _mm512_shuffle_i64x2(low, high, 0xee);
  low = first;
}
#elif HPU_DUO_LANES == 8
using Words = __m256i;

inline Words load_words(const int16_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
inline Words both_words(int pair) { return _mm256_set1_epi32(pair); }
inline I add_pairs(I sum, Words a, Words b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
inline F to_float(I x) { return _mm256_cvtepi32_ps(x); }
inline void store_words(int16_t *to, F x) {
  const __m256i y = _mm256_cvtps_epi32(x);
  _mm_storeu_si128((__m128i *)to, _mm_packs_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}
inline void pair_bytes(const uint8_t *even, const uint8_t *odd, __m128i &low, __m128i &high) {
  const __m128i a = _mm_loadu_si128((const __m128i *)even), b = _mm_loadu_si128((const __m128i *)odd);
  low = _mm_unpacklo_epi8(a, b);
  high = _mm_unpackhi_epi8(a, b);
}
inline Words signed_words(__m128i x) { return _mm256_cvtepi8_epi16(x); }
inline Words unsigned_words(__m128i x) { return _mm256_cvtepu8_epi16(x); }
inline Words low_nibbles(Words x) { return _mm256_and_si256(x, _mm256_set1_epi16(15)); }
inline Words high_nibbles(Words x) { return _mm256_srli_epi16(x, 4); }
inline void in_order(I &, I &) {}
#else
struct Words {
  int16_t item[2 * kLanes];
};
struct Bytes {
  uint8_t item[2 * kLanes];
};

template <class Function>
inline Words map_words(Function function) {
  Words result;
  for (int i = 0; i < 2 * kLanes; ++i) result.item[i] = (int16_t)function(i);
  return result;
}
inline Words load_words(const int16_t *from) { return map_words([&](int i) { return from[i]; }); }
inline Words both_words(int pair) { return map_words([&](int i) { return i % 2 ? pair >> 16 : (int16_t)pair; }); }
inline I add_pairs(I sum, Words a, Words b) {
  return Lanes::map([&](int i) {
    return sum.lane[i] + a.item[2 * i] * b.item[2 * i] + a.item[2 * i + 1] * b.item[2 * i + 1];
  });
}
inline F to_float(I x) { return Lanes::map([&](int i) { return (float)x.lane[i]; }); }
inline void store_words(int16_t *to, F x) {
  for (int i = 0; i < kLanes; ++i) to[i] = (int16_t)std::nearbyint(x.lane[i]);
}
inline void pair_bytes(const uint8_t *even, const uint8_t *odd, Bytes &low, Bytes &high) {
  for (int i = 0; i < 2 * kLanes; ++i) {
    low.item[i] = (i % 2 ? odd : even)[i / 2];
    high.item[i] = (i % 2 ? odd : even)[kLanes + i / 2];
  }
}
inline Words signed_words(Bytes x) { return map_words([&](int i) { return (int8_t)x.item[i]; }); }
inline Words unsigned_words(Bytes x) { return map_words([&](int i) { return x.item[i]; }); }
inline Words low_nibbles(Words x) { return map_words([&](int i) { return x.item[i] & 15; }); }
inline Words high_nibbles(Words x) { return map_words([&](int i) { return x.item[i] >> 4; }); }
inline void in_order(I &, I &) {}
#endif

inline auto load_bytes(const uint8_t *from) {
#if HPU_DUO_LANES == 16
  return _mm256_loadu_si256((const __m256i *)from);
#elif HPU_DUO_LANES == 8
  return _mm_loadu_si128((const __m128i *)from);
#else
  Bytes x;
  std::memcpy(&x, from, sizeof(x));
  return x;
#endif
}

// Keys that meet G query heads at a time: the sums of eight lanes leave registers for two, or for four of one head.
constexpr int keys_together(int group) { return kLanes == 16 || group == 1 ? 4 : 2; }

// Sums over the lanes of as many vectors as there are lanes, which come some at a time.
struct LaneSums {
#if HPU_DUO_LANES == 16
  // Of four vectors: quarters hold what a quarter adds to each of the sums.
  void put(int i, F a, F b, F c, F d) {
    const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    four[i / 4] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  F all() const {
    const F low = _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x88), _mm512_shuffle_f32x4(four[0], four[1], 0xdd));
    const F high = _mm512_add_ps(_mm512_shuffle_f32x4(four[2], four[3], 0x88), _mm512_shuffle_f32x4(four[2], four[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }

  F four[4];
#else
  F all() const { return Lanes::sums(one); }

  F one[kLanes];
#endif

  template <int N, int G>
  void put(int i, const F (&sum)[N][G], int g) {
#if HPU_DUO_LANES == 16
    put(i, sum[0][g], sum[1][g], sum[2][g], sum[3][g]);
#else
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) one[i + n] = sum[n][g];
#endif
  }
};

constexpr int kWordStep = 2 * kLanes;  // bytes that are widened to words at a time

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

  static constexpr int kParts = 1;  // vectors of words, half a vector of keys or values apart if there are two
  static void words(const uint8_t *from, Words (&to)[kParts]) { to[0] = signed_words(load_bytes(from)); }
  // Words of two vectors side by side.
  static void pairs(const uint8_t *even, const uint8_t *odd, Words (&to)[kParts][2]) {
    decltype(load_bytes(even)) low, high;
    pair_bytes(even, odd, low, high);
    to[0][0] = signed_words(low);
    to[0][1] = signed_words(high);
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

  static constexpr int kParts = 2;
  static void words(const uint8_t *from, Words (&to)[kParts]) {
    const Words both = unsigned_words(load_bytes(from));
    to[0] = low_nibbles(both);
    to[1] = high_nibbles(both);
  }
  static void pairs(const uint8_t *even, const uint8_t *odd, Words (&to)[kParts][2]) {
    decltype(load_bytes(even)) bytes[2];
    pair_bytes(even, odd, bytes[0], bytes[1]);
    for (int n = 0; n < 2; ++n) {
      const Words both = unsigned_words(bytes[n]);
      to[0][n] = low_nibbles(both);
      to[1][n] = high_nibbles(both);
    }
  }
};

// Their bits are those of a float16 that is 256 times smaller.
struct Fp8Codes {
  static constexpr int kParts = 0;  // no words
  static constexpr int kStep = 2 * kLanes;
  static constexpr bool kHasZero = false;
  static constexpr float kUnit = 256;
  static int bytes(int dim) { return dim; }
  static int second(int) { return kLanes; }

  static void load(const uint8_t *from, F &a, F &b) {
#if HPU_DUO_LANES == 16
    a = _mm512_cvtph_ps(sixteen(from));
    b = _mm512_cvtph_ps(sixteen(from + kLanes));
#elif HPU_DUO_LANES == 8
    const __m256i both = sixteen(from);
    a = _mm256_cvtph_ps(_mm256_castsi256_si128(both));
    b = _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
#else
    a = Lanes::map([&](int i) { return one(from[i]); });
    b = Lanes::map([&](int i) { return one(from[kLanes + i]); });
#endif
  }

 private:
#if HPU_DUO_LANES
  // As float16.
  static __m256i sixteen(const uint8_t *from) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    const __m256i size = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const __m256i is_nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(_mm256_set1_epi16(0x7f), wide), 8);
    return _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(size, 7), sign),
                           _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
  }
#else
  static float one(uint8_t code) {
    const int size = code & 0x7f, exponent = size >> 3, fraction = size & 7;
    float x = std::ldexp((float)(exponent ? fraction + 8 : fraction), (exponent ? exponent : 1) - 18);
    if (size == 0x7f) x = NAN;
    return code >> 7 ? -x : x;
  }
#endif
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
