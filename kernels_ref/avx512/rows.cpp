// Attention of rows with one bfloat16 query token each over units of keys: whole blocks and one last unit
// that is seen in part. For CPUs with AVX512-BF16.
//
// Such rows are bound by reading keys and values, so every visible one is read once for the whole group of
// query heads, from where it lies, and hidden ones are not read at all. Scores, weights and sums are float32.
//
// Built by library.py with nothing but a C++ compiler: no torch headers.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kKeys = 128;     // keys whose scores are held at a time
constexpr int kMaxGroup = 4;   // query heads that one pass over values serves
constexpr int kMaxDim = 256;
constexpr int kPairs = 2 * kLanes;  // items of a vector of bfloat16

struct Stores {
  const bf16 *k, *v;
  int64_t k_unit, k_head, k_slot, v_unit, v_head, v_slot;  // strides, in items
};

// A pass over up to kMaxGroup query heads of one row and key/value head.
struct Heads {
  alignas(64) bf16 q[kMaxGroup * kMaxDim];
  alignas(64) float scores[kMaxGroup * kKeys];
  alignas(64) float attn[kMaxGroup * kMaxDim];
  float largest[kMaxGroup], total[kMaxGroup];
};

// The sums of sixteen vectors, in order.
inline __m512 sums_of(const __m512 *x) {
  __m512 quads[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]), _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]), _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]));
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
  }
  const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88), _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// scores[g][j] of `count` keys; lanes behind the last one repeat it and are masked by `soften`.
void score(Heads &h, int group, int dim, const bf16 *k, int64_t slot, int count) {
  for (int j = 0; j < count; j += kLanes) {
    for (int g = 0; g < group; ++g) {
      __m512 products[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const bf16 *key = k + std::min(j + i, count - 1) * slot;
        __m512 sum = _mm512_setzero_ps();
        for (int d = 0; d < dim; d += kPairs)
          sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_load_si512(h.q + g * dim + d), (__m512bh)_mm512_loadu_si512(key + d));
        products[i] = sum;
      }
      _mm512_store_ps(h.scores + g * kKeys + j, sums_of(products));
    }
  }
}

// Scores to weights; what the heads had before fades where a larger score has come.
void soften(Heads &h, int group, int dim, int count) {
  for (int g = 0; g < group; ++g) {
    float *scores = h.scores + g * kKeys;
    __m512 top = _mm512_set1_ps(kFloor);
    for (int j = 0; j < count; j += kLanes) {
      const __mmask16 seen = count - j >= kLanes ? 0xFFFF : (1 << (count - j)) - 1;
      top = _mm512_mask_max_ps(top, seen, top, _mm512_load_ps(scores + j));
    }
    const float before = h.largest[g], now = std::max(before, _mm512_reduce_max_ps(top));
    const __m512 log2e = _mm512_set1_ps(kLog2e), shift = _mm512_set1_ps(-now * kLog2e);
    __m512 sum = _mm512_setzero_ps();
    for (int j = 0; j < count; j += kLanes) {
      const __mmask16 seen = count - j >= kLanes ? 0xFFFF : (1 << (count - j)) - 1;
      const __m512 w = _mm512_maskz_mov_ps(seen, exp2_of(_mm512_fmadd_ps(_mm512_load_ps(scores + j), log2e, shift)));
      sum = _mm512_add_ps(sum, w);
      _mm512_store_ps(scores + j, w);
    }
    const __m512 fade = exp2_of(_mm512_set1_ps((before - now) * kLog2e));
    for (int d = 0; d < dim; d += kLanes)
      _mm512_store_ps(h.attn + g * dim + d, _mm512_mul_ps(fade, _mm512_load_ps(h.attn + g * dim + d)));
    h.total[g] = h.total[g] * _mm512_cvtss_f32(fade) + _mm512_reduce_add_ps(sum);
    h.largest[g] = now;
  }
}

template <int G>
void add_values(Heads &h, int dim, const bf16 *v, int64_t slot, int count) {
  for (int d = 0; d < dim; d += kPairs) {
    __m512 sum[G][2];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
      for (int n = 0; n < 2; ++n) sum[g][n] = _mm512_load_ps(h.attn + g * dim + d + n * kLanes);
    for (int j = 0; j < count; ++j) {
      __m512 value[2];
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n)
        value[n] = _mm512_castsi512_ps(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(v + j * slot + d + n * kLanes))), 16));
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n)
          sum[g][n] = _mm512_fmadd_ps(_mm512_set1_ps(h.scores[g * kKeys + j]), value[n], sum[g][n]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
      for (int n = 0; n < 2; ++n) _mm512_store_ps(h.attn + g * dim + d + n * kLanes, sum[g][n]);
  }
}

void attend_unit(Heads &h, int group, int dim, const Stores &stores, int64_t unit, int head, int visible) {
  const bf16 *k = stores.k + unit * stores.k_unit + head * stores.k_head;
  const bf16 *v = stores.v + unit * stores.v_unit + head * stores.v_head;
  for (int first = 0; first < visible; first += kKeys) {
    const int count = std::min(kKeys, visible - first);
    score(h, group, dim, k + first * stores.k_slot, stores.k_slot, count);
    soften(h, group, dim, count);
    const bf16 *values = v + first * stores.v_slot;
    switch (group) {
      case 1: add_values<1>(h, dim, values, stores.v_slot, count); break;
      case 2: add_values<2>(h, dim, values, stores.v_slot, count); break;
      case 3: add_values<3>(h, dim, values, stores.v_slot, count); break;
      default: add_values<4>(h, dim, values, stores.v_slot, count);
    }
  }
}

}  // namespace

extern "C" {

// Row n sees all slots of every unit x with owner[x] == n, and last_visible[n] slots of unit last[n].
// `strides`: q row, head, member; k unit, head, slot; v unit, head, slot.
// `sizes`: rows, key/value heads, group, head size, slots of a unit, length of owner.
void hpu_duo_attend_rows(const void *q, const void *k, const void *v, const int *owner, const int *last,
                         const int *last_visible, float *attn, float *largest, float *total,
                         const int64_t *strides, const int *sizes, int num_threads) {
  const int num_rows = sizes[0], num_heads = sizes[1], group = sizes[2], dim = sizes[3], num_slots = sizes[4];
  const Stores stores{(const bf16 *)k, (const bf16 *)v, strides[3], strides[4], strides[5],
                      strides[6],      strides[7],      strides[8]};
  std::vector<std::vector<int>> owned(num_rows);
  for (int unit = 0; unit < sizes[5]; ++unit)
    if (owner[unit] >= 0 && owner[unit] < num_rows) owned[owner[unit]].push_back(unit);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
  for (int row = 0; row < num_rows; ++row)
    for (int head = 0; head < num_heads; ++head)
      for (int first = 0; first < group; first += kMaxGroup) {
        const int count = std::min(kMaxGroup, group - first);
        Heads h;
        for (int g = 0; g < count; ++g) {
          const bf16 *from = (const bf16 *)q + row * strides[0] + head * strides[1] + (first + g) * strides[2];
          std::copy(from, from + dim, h.q + g * dim);
          h.largest[g] = kFloor;
          h.total[g] = 0;
        }
        std::fill(h.attn, h.attn + count * dim, 0.0f);
        for (int unit : owned[row]) attend_unit(h, count, dim, stores, unit, head, num_slots);
        attend_unit(h, count, dim, stores, last[row], head, last_visible[row]);
        const int64_t place = ((int64_t)row * num_heads + head) * group + first;
        std::copy(h.attn, h.attn + count * dim, attn + place * dim);
        std::copy(h.largest, h.largest + count, largest + place);
        std::copy(h.total, h.total + count, total + place);
      }
}
}
