// Attention of decode rows, of a few bfloat16 query tokens each, over units of keys: whole blocks, and units that
// a token may see in part. For CPUs with AVX512-BF16.
//
// Such rows are bound by reading keys and values, so every visible one is read once for a group of query heads,
// from where it lies, and what lies behind the last visible slot of a unit is not read at all. Scores, weights and
// sums are float32.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "row_items.h"
#include "vectors.h"

namespace hpu_duo {
namespace {

constexpr int kKeys = 128;     // keys whose scores are held at a time
constexpr int kMaxGroup = 4;   // query heads that one pass over values serves
constexpr int kMaxDim = 576;
constexpr int kPairs = 2 * kLanes;  // items of a vector of bfloat16

struct Stores {
  const bf16 *k, *v;
  int64_t k_unit, k_head, k_slot, v_unit, v_head, v_slot;  // strides, in items
  int value_dim;
};

// Keys that lie a stride apart.
struct Keys {
  const bf16 *first;
  int64_t slot;
  int count;
};

// What the query heads of a pass see of the keys that are at hand: all of them; or those in slots below a limit of
// each head; or those whose positions lie in an interval of each head, or below `sink`.
struct Sight {
  enum Kind { kAll, kLeading, kHeld } kind = kAll;
  int first = 0;                      // slot of the first key
  int end[kMaxGroup], begin[kMaxGroup];  // of slots, or of positions
  const int *position = nullptr;      // of the slots of the unit
  int sink = 0;

  // Which of up to sixteen keys from the j-th on head g sees; `there` are those that are there.
  inline __mmask16 of(int g, int j, __mmask16 there) const {
    if (kind == kAll) return there;
    const __m512i last = _mm512_set1_epi32(end[g]);
    if (kind == kLeading) {
      const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      return _mm512_mask_cmplt_epi32_mask(there, _mm512_add_epi32(_mm512_set1_epi32(first + j), lane), last);
    }
    const __m512i at = _mm512_maskz_loadu_epi32(there, position + first + j);
    const __mmask16 kept = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(begin[g])) |
                           _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(sink));
    return there & kept & _mm512_cmplt_epi32_mask(at, last) & _mm512_cmpge_epi32_mask(at, _mm512_setzero_si512());
  }
};

// A pass over up to kMaxGroup query heads of one row and key/value head.
struct Heads {
  alignas(64) bf16 q[kMaxGroup * kMaxDim];
  alignas(64) float scores[kMaxGroup * kKeys];
  alignas(64) float attn[kMaxGroup * kMaxDim];
  float largest[kMaxGroup], total[kMaxGroup];
  float *raw = nullptr;  // scores of all slots of a unit, those of each head `raw_head` apart, or null
  int64_t raw_head = 0;
};

struct Pass {
  Heads heads;
  Sight sight;
  int first, group;  // query heads
};

// Four vectors to one whose quarters hold, each, what a quarter adds to the sums of the four.
inline __m512 quarter_sums(const __m512 *x) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
}

// Four of these to sixteen sums, in order.
inline __m512 sums_of(const __m512 *quads) {
  const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88),
                                   _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88),
                                    _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

inline void prefetch(const bf16 *from, int dim) {
  // To the second level: the first one has few places for what is under way.
  for (int d = 0; d < dim; d += kPairs) _mm_prefetch((const char *)(from + d), _MM_HINT_T1);
}

// scores[g][j] of `count` keys; lanes behind the last one repeat it and are masked by `soften`. Fetches the
// values meanwhile. V is dim / kPairs, or 0 for any.
template <int G, int V>
void score(Heads &h, int dim, const bf16 *k, int64_t k_slot, const bf16 *v, int64_t v_slot, int value_dim, int count) {
  const int width = V ? V * kPairs : dim;
  for (int j = 0; j < count; j += kLanes) {
    __m512 quads[G][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512 products[G][4];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) {
        const int slot = std::min(j + 4 * i + n, count - 1);
        const bf16 *key = k + slot * k_slot;
        prefetch(v + slot * v_slot, value_dim);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) products[g][n] = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int d = 0; d < width; d += kPairs) {
          const __m512bh part = (__m512bh)_mm512_loadu_si512(key + d);
#pragma GCC unroll 4
          for (int g = 0; g < G; ++g)
            products[g][n] = _mm512_dpbf16_ps(products[g][n], (__m512bh)_mm512_load_si512(h.q + g * width + d), part);
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) quads[g][i] = quarter_sums(products[g]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) _mm512_store_ps(h.scores + g * kKeys + j, sums_of(quads[g]));
  }
}

// Scores to weights; what the heads had before fades where a larger score has come.
void soften(Heads &h, const Sight &sight, int group, int dim, int count) {
  for (int g = 0; g < group; ++g) {
    float *scores = h.scores + g * kKeys;
    __m512 top = _mm512_set1_ps(kFloor);
    for (int j = 0; j < count; j += kLanes) {
      const __mmask16 seen = sight.of(g, j, count - j >= kLanes ? 0xFFFF : (1 << (count - j)) - 1);
      top = _mm512_mask_max_ps(top, seen, top, _mm512_load_ps(scores + j));
    }
    const float before = h.largest[g], now = std::max(before, _mm512_reduce_max_ps(top));
    const __m512 log2e = _mm512_set1_ps(kLog2e), shift = _mm512_set1_ps(-now * kLog2e);
    __m512 sum = _mm512_setzero_ps();
    for (int j = 0; j < count; j += kLanes) {
      const __mmask16 seen = sight.of(g, j, count - j >= kLanes ? 0xFFFF : (1 << (count - j)) - 1);
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

// Adds weighted values to W * kPairs items of the sums from d on, and fetches keys that are next meanwhile.
// Of each vector of values the even items and the odd ones have sums of their own: see `in_order`.
template <int G, int W>
void add_columns(Heads &h, int dim, int d, const bf16 *v, int64_t slot, int count, const Keys &next) {
  const __m512i odd = _mm512_set1_epi32(0xFFFF0000);
  __m512 sum[G][2 * W];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int n = 0; n < 2 * W; ++n) sum[g][n] = _mm512_load_ps(h.attn + g * dim + d + n * kLanes);
  for (int j = 0; j < count; ++j) {
    for (int ahead = j; ahead < next.count; ahead += count) prefetch(next.first + ahead * next.slot + d, W * kPairs);
    __m512 value[2 * W];
#pragma GCC unroll 2
    for (int n = 0; n < W; ++n) {
      const __m512i pairs = _mm512_loadu_si512(v + j * slot + d + n * kPairs);
      value[2 * n] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
      value[2 * n + 1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, odd));
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const __m512 weight = _mm512_set1_ps(h.scores[g * kKeys + j]);
#pragma GCC unroll 4
      for (int n = 0; n < 2 * W; ++n) sum[g][n] = _mm512_fmadd_ps(weight, value[n], sum[g][n]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int n = 0; n < 2 * W; ++n) _mm512_store_ps(h.attn + g * dim + d + n * kLanes, sum[g][n]);
}

template <int G>
void attend_keys(Heads &h, const Sight &sight, int dim, const Stores &stores, const bf16 *k, const bf16 *v,
                 int count, const Keys &next) {
  const int width = stores.value_dim;
  // Values that are a part of their keys come with them.
  const int apart = stores.v == stores.k ? 0 : width;
  switch (dim) {
    case 64: score<G, 2>(h, dim, k, stores.k_slot, v, stores.v_slot, apart, count); break;
    case 128: score<G, 4>(h, dim, k, stores.k_slot, v, stores.v_slot, apart, count); break;
    default: score<G, 0>(h, dim, k, stores.k_slot, v, stores.v_slot, apart, count);
  }
  if (h.raw)
    for (int g = 0; g < G; ++g)
      std::copy(h.scores + g * kKeys, h.scores + g * kKeys + count, h.raw + g * h.raw_head + sight.first);
  soften(h, sight, G, width, count);
  int d = 0;
  for (; d + 2 * kPairs <= width; d += 2 * kPairs)
    add_columns<G, 2>(h, width, d, v, stores.v_slot, count, next);
  if (d < width) add_columns<G, 1>(h, width, d, v, stores.v_slot, count, next);
}

// The first keys of a unit.
Keys keys_of(const Stores &stores, int64_t unit, int head, int visible) {
  return {stores.k + unit * stores.k_unit + head * stores.k_head, stores.k_slot, std::min(kKeys, visible)};
}

// `next` are the keys that follow this unit. Each pass reads keys and values where the first one has brought them.
void attend_unit(std::vector<Pass> &passes, int dim, const Stores &stores, int64_t unit, int head, int visible,
                 const Keys &next) {
  const bf16 *k = stores.k + unit * stores.k_unit + head * stores.k_head;
  const bf16 *v = stores.v + unit * stores.v_unit + head * stores.v_head;
  for (int first = 0; first < visible; first += kKeys) {
    const int count = std::min(kKeys, visible - first), left = visible - first - count;
    const bf16 *keys = k + first * stores.k_slot, *values = v + first * stores.v_slot;
    Keys following = left ? Keys{keys + count * stores.k_slot, stores.k_slot, std::min(kKeys, left)} : next;
    for (Pass &pass : passes) {
      pass.sight.first = first;
      switch (pass.group) {
        case 1: attend_keys<1>(pass.heads, pass.sight, dim, stores, keys, values, count, following); break;
        case 2: attend_keys<2>(pass.heads, pass.sight, dim, stores, keys, values, count, following); break;
        case 3: attend_keys<3>(pass.heads, pass.sight, dim, stores, keys, values, count, following); break;
        default: attend_keys<4>(pass.heads, pass.sight, dim, stores, keys, values, count, following);
      }
      following = {};
    }
  }
}

// Adds the weights of the heads of a pass, once all their keys are known, to what each slot has received.
void add_mass(const Heads &h, int group, int visible, const float *sinks, float *mass) {
  for (int g = 0; g < group; ++g) {
    if (h.total[g] == 0) continue;
    const __m512 log2e = _mm512_set1_ps(kLog2e), shift = _mm512_set1_ps(-h.largest[g] * kLog2e);
    float whole = h.total[g];
    if (sinks) whole += _mm512_cvtss_f32(exp2_of(_mm512_fmadd_ps(_mm512_set1_ps(sinks[g]), log2e, shift)));
    const __m512 share = _mm512_set1_ps(1 / whole);
    const float *scores = h.raw + g * h.raw_head;
    for (int j = 0; j < visible; j += kLanes) {
      const __mmask16 there = visible - j >= kLanes ? 0xFFFF : (1 << (visible - j)) - 1;
      const __m512 w = exp2_of(_mm512_fmadd_ps(_mm512_maskz_loadu_ps(there, scores + j), log2e, shift));
      const __m512 sum = _mm512_fmadd_ps(w, share, _mm512_maskz_loadu_ps(there, mass + j));
      _mm512_mask_storeu_ps(mass + j, there, sum);
    }
  }
}

// Sums of even and odd items, a vector of each in turn, to sums in the order of the values.
void in_order(float *to, const float *from, int dim) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int d = 0; d < dim; d += kPairs) {
    const __m512 even = _mm512_load_ps(from + d), odd = _mm512_load_ps(from + d + kLanes);
    _mm512_storeu_ps(to + d, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(to + d + kLanes, _mm512_permutex2var_ps(even, high, odd));
  }
}

}  // namespace

// `strides`: q row, head, member; k unit, head, slot; v unit, head, slot.
// `sizes`: rows, key/value heads, query heads of a row, size of keys, slots of a unit, tokens of a row, size of values.
void attend_rows(const bf16 *q, const bf16 *k, const bf16 *v, const RowPlan &plan, float *attn, float *largest,
                 float *total, const int64_t *strides, const int *sizes, int num_threads) {
  const int num_rows = sizes[0], num_heads = sizes[1], group = sizes[2], dim = sizes[3], num_slots = sizes[4];
  const int num_tokens = sizes[5], members = group / num_tokens, value_dim = sizes[6];
  const Stores stores{k, v, strides[3], strides[4], strides[5], strides[6], strides[7], strides[8], value_dim};
  const auto items = items_of(plan, num_rows, num_tokens, num_slots);
  const auto keys_at = [&](int row, size_t i, int head) {
    if (i >= items[row].size()) return Keys{};
    return keys_of(stores, items[row][i].unit, head, items[row][i].count);
  };
  const int num_passes = (group + kMaxGroup - 1) / kMaxGroup;
  const int num_parts = parts_of(num_passes, num_rows * num_heads, plan, num_threads);
#pragma omp parallel for collapse(3) schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
  for (int row = 0; row < num_rows; ++row)
    for (int head = 0; head < num_heads; ++head)
      for (int part = 0; part < num_parts; ++part) {
        static thread_local std::vector<Pass> passes;
        static thread_local std::vector<float> raw;
        const int begin = num_passes * part / num_parts, end = num_passes * (part + 1) / num_parts;
        passes.resize(end - begin);
        if (plan.mass) raw.resize(passes.size() * kMaxGroup * (size_t)num_slots);
        const int64_t line = (int64_t)row * num_heads + head;
        for (int n = begin; n < end; ++n) {
          Pass &pass = passes[n - begin];
          Heads &h = pass.heads;
          pass.first = n * kMaxGroup;
          pass.group = std::min(kMaxGroup, group - pass.first);
          for (int g = 0; g < pass.group; ++g) {
            const bf16 *from = q + row * strides[0] + head * strides[1] + (pass.first + g) * strides[2];
            std::copy(from, from + dim, h.q + g * dim);
            h.largest[g] = kFloor;
            h.total[g] = 0;
          }
          std::fill(h.attn, h.attn + pass.group * value_dim, 0.0f);
          h.raw = plan.mass ? raw.data() + (n - begin) * kMaxGroup * (size_t)num_slots : nullptr;
          h.raw_head = num_slots;
          Sight &sight = pass.sight = {};
          if (!plan.position) continue;
          sight.kind = Sight::kHeld;
          sight.sink = plan.sink;
          sight.position =
              plan.position + ((int64_t)row * plan.position_heads + head % plan.position_heads) * num_slots;
          for (int g = 0; g < pass.group; ++g) {
            const int token = row * num_tokens + (pass.first + g) / members;
            sight.begin[g] = plan.begin[token];
            sight.end[g] = plan.end[token];
          }
        }
        const size_t num_items = items[row].size();
        for (size_t i = 0; i < num_items; ++i) {
          const Item &item = items[row][i];
          for (Pass &pass : passes) {
            if (!plan.position) pass.sight.kind = item.limits ? Sight::kLeading : Sight::kAll;
            if (item.limits)
              for (int g = 0; g < pass.group; ++g) pass.sight.end[g] = item.limits[(pass.first + g) / members];
          }
          const Keys next = i + 1 < num_items      ? keys_at(row, i + 1, head)
                            : head + 1 < num_heads ? keys_at(row, 0, head + 1)
                            : row + 1 < num_rows   ? keys_at(row + 1, 0, 0)
                                                   : Keys{};
          attend_unit(passes, dim, stores, item.unit, head, item.count, next);
        }
        for (const Pass &pass : passes) {
          const Heads &h = pass.heads;
          if (plan.mass && num_items)
            add_mass(h, pass.group, items[row][0].count,
                     plan.sinks ? plan.sinks + head * group + pass.first : nullptr, plan.mass + line * num_slots);
          const int64_t place = line * group + pass.first;
          for (int g = 0; g < pass.group; ++g)
            in_order(attn + (place + g) * value_dim, h.attn + g * value_dim, value_dim);
          std::copy(h.largest, h.largest + pass.group, largest + place);
          std::copy(h.total, h.total + pass.group, total + place);
        }
      }
}

}  // namespace hpu_duo
