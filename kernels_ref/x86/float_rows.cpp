// Attention of decode rows, of a few float32 query tokens each, over units of stored keys: as rows.cpp.
//
// Keys and values are widened as they are read, each once for a few query heads, from where they lie.

#include <algorithm>
#include <cstdint>

#include "float_kernels.h"
#include "float_row_pass.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int kWide = 2;  // vectors of a head that a pass over values takes

// Keys that lie a stride apart.
template <class Stored>
struct Keys {
  const typename Stored::Item *first = nullptr;
  int64_t slot = 0;
  int count = 0;
};

template <class Stored>
struct Stores {
  const typename Stored::Item *k, *v;
  int64_t k_unit, k_head, k_slot, v_unit, v_head, v_slot;  // strides, in items
  int value_dim;

  void begin(Heads &, int, int) const {}

  template <int G>
  void attend_keys(Heads &h, const Sight &sight, int dim, const Run &run, const Run &next) const;

  Keys<Stored> keys(const Run &run) const {
    return {k + run.unit * k_unit + run.head * k_head + run.first * k_slot, k_slot, run.count};
  }
};

// scores[g][j] of `count` keys; lanes behind the last one repeat it and are masked by `soften`. Fetches the values
// meanwhile.
template <class Stored, int G>
void score(Heads &h, int dim, const Stores<Stored> &stores, const typename Stored::Item *k,
           const typename Stored::Item *v, int count) {
  constexpr int kTogether = 2;
  // Values that are a part of their keys come with them.
  const int apart = stores.v == stores.k ? 0 : stores.value_dim;
  for (int j = 0; j < count; j += kLanes) {
    F products[G][kLanes];
    for (int i = 0; i < kLanes; i += kTogether) {
      const typename Stored::Item *keys[kTogether];
      F sum[kTogether][G];
#pragma GCC unroll 2
      for (int n = 0; n < kTogether; ++n) {
        const int slot = std::min(j + i + n, count - 1);
        keys[n] = k + slot * stores.k_slot;
        prefetch(v + slot * stores.v_slot, apart);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sum[n][g] = Lanes::set(0.0f);
      }
      for (int d = 0; d < dim; d += kLanes) {
        F part[kTogether];
#pragma GCC unroll 2
        for (int n = 0; n < kTogether; ++n) part[n] = Stored::load(keys[n] + d);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          const F q = Lanes::load(h.q + g * dim + d);
#pragma GCC unroll 2
          for (int n = 0; n < kTogether; ++n) sum[n][g] = Lanes::fma(q, part[n], sum[n][g]);
        }
      }
#pragma GCC unroll 2
      for (int n = 0; n < kTogether; ++n)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) products[g][i + n] = sum[n][g];
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) Lanes::store(h.scores + g * kKeys + j, Lanes::sums(products[g]));
  }
}

// Adds weighted values to kWide vectors of the sums from d on, and fetches keys that are next meanwhile.
template <class Stored, int G>
void add_columns(Heads &h, int dim, int d, const typename Stored::Item *v, int64_t slot, int count,
                 const Keys<Stored> &next) {
  F sum[G][kWide];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
    for (int n = 0; n < kWide; ++n) sum[g][n] = Lanes::load(h.attn + g * dim + d + n * kLanes);
  const bool is_line = d * (int)sizeof(*v) % kLine == 0;
  for (int j = 0; j < count; ++j) {
    if (is_line)
      for (int ahead = j; ahead < next.count; ahead += count) prefetch(next.first + ahead * next.slot + d, kWide * kLanes);
    F value[kWide];
#pragma GCC unroll 2
    for (int n = 0; n < kWide; ++n) value[n] = Stored::load(v + j * slot + d + n * kLanes);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const F weight = Lanes::set(h.scores[g * kKeys + j]);
#pragma GCC unroll 2
      for (int n = 0; n < kWide; ++n) sum[g][n] = Lanes::fma(weight, value[n], sum[g][n]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
    for (int n = 0; n < kWide; ++n) Lanes::store(h.attn + g * dim + d + n * kLanes, sum[g][n]);
}

template <class Stored>
template <int G>
void Stores<Stored>::attend_keys(Heads &h, const Sight &sight, int dim, const Run &run, const Run &next) const {
  const auto *values = v + run.unit * v_unit + run.head * v_head + run.first * v_slot;
  score<Stored, G>(h, dim, *this, keys(run).first, values, run.count);
  if (h.raw)
    for (int g = 0; g < G; ++g)
      std::copy(h.scores + g * kKeys, h.scores + g * kKeys + run.count, h.raw + g * h.raw_head + sight.first);
  soften(h, sight, G, value_dim, run.count);
  for (int d = 0; d < value_dim; d += kWide * kLanes)
    add_columns<Stored, G>(h, value_dim, d, values, v_slot, run.count, keys(next));
}

}  // namespace

// As `attend_rows` of rows.cpp.
void attend_rows(const float *q, const void *k, const void *v, Store store, const RowPlan &plan, float *attn,
                 float *largest, float *total, const int64_t *strides, const int *sizes, int num_threads) {
  const Job job{q,          plan,     attn,     largest,  total,    strides[0], strides[1],
                strides[2], sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],   sizes[5], sizes[6]};
  const auto run = [&](auto stored) {
    using Item = typename decltype(stored)::Item;
    const Stores<decltype(stored)> stores{(const Item *)k, (const Item *)v, strides[3], strides[4],
                                          strides[5],      strides[6],      strides[7], strides[8], sizes[6]};
    attend_all(job, stores, num_threads);
  };
  with_stored(store, run);
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
