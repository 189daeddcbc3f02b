// Attention of decode rows, of a few float32 query tokens each, over units of stored keys: as rows.cpp.
//
// Keys and values are widened as they are read, each once for a few query heads, from where they lie.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "float_kernels.h"
#include "lanes.h"
#include "row_items.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int kKeys = 128;    // keys whose scores are held at a time
constexpr int kMaxGroup = 4;  // query heads that one pass over values serves
constexpr int kMaxDim = 256;
constexpr int kWide = 2;      // vectors of a head that a pass over values takes
constexpr int kLine = 64;     // bytes

template <class Stored>
struct Stores {
  const typename Stored::Item *k, *v;
  int64_t k_unit, k_head, k_slot, v_unit, v_head, v_slot;  // strides, in items
};

// Keys that lie a stride apart.
template <class Stored>
struct Keys {
  const typename Stored::Item *first = nullptr;
  int64_t slot = 0;
  int count = 0;
};

// What the query heads of a pass see of the keys that are at hand: all of them; or those in slots below a limit of
// each head; or those whose positions lie in an interval of each head, or below `sink`.
struct Sight {
  enum Kind { kAll, kLeading, kHeld } kind = kAll;
  int first = 0;                         // slot of the first key
  int end[kMaxGroup], begin[kMaxGroup];  // of slots, or of positions
  const int *position = nullptr;         // of the slots of the unit
  int sink = 0;

  // Which keys from the j-th on, of `count` in all, head g sees: one for each lane.
  M of(int g, int j, int count) const {
    const M there = Lanes::first(count - j);
    if (kind == kAll) return there;
    if (kind == kLeading)
      return Lanes::both(there, Lanes::less(Lanes::add(Lanes::set(first + j), Lanes::index()), Lanes::set(end[g])));
    const I at = Lanes::load(position + first + j, there);
    const M kept = Lanes::either(Lanes::less(Lanes::set(begin[g] - 1), at), Lanes::less(at, Lanes::set(sink)));
    const M held = Lanes::both(Lanes::less(at, Lanes::set(end[g])), Lanes::less(Lanes::set(-1), at));
    return Lanes::both(there, Lanes::both(kept, held));
  }
};

// A pass over up to kMaxGroup query heads of one row and key/value head.
struct Heads {
  alignas(64) float q[kMaxGroup * kMaxDim];
  alignas(64) float scores[kMaxGroup * kKeys];
  alignas(64) float attn[kMaxGroup * kMaxDim];
  float largest[kMaxGroup], total[kMaxGroup];
  float *raw = nullptr;  // scores of all slots of a unit, those of each head `raw_head` apart, or null
  int64_t raw_head = 0;
};

// To the second level: the first one has few places for what is under way.
template <typename Item>
inline void prefetch(const Item *from, int count) {
  for (int d = 0; d < count; d += kLine / (int)sizeof(Item)) __builtin_prefetch(from + d, 0, 2);
}

// scores[g][j] of `count` keys; lanes behind the last one repeat it and are masked by `soften`. Fetches the values
// meanwhile.
template <class Stored, int G>
void score(Heads &h, int dim, const Stores<Stored> &stores, const typename Stored::Item *k,
           const typename Stored::Item *v, int count) {
  constexpr int kTogether = 2;
  for (int j = 0; j < count; j += kLanes) {
    F products[G][kLanes];
    for (int i = 0; i < kLanes; i += kTogether) {
      const typename Stored::Item *keys[kTogether];
      F sum[kTogether][G];
#pragma GCC unroll 2
      for (int n = 0; n < kTogether; ++n) {
        const int slot = std::min(j + i + n, count - 1);
        keys[n] = k + slot * stores.k_slot;
        prefetch(v + slot * stores.v_slot, dim);
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

// Scores to weights; what the heads had before fades where a larger score has come.
void soften(Heads &h, const Sight &sight, int group, int dim, int count) {
  for (int g = 0; g < group; ++g) {
    float *scores = h.scores + g * kKeys;
    F top = Lanes::set(kFloor);
    for (int j = 0; j < count; j += kLanes)
      top = Lanes::max(top, Lanes::select(sight.of(g, j, count), Lanes::load(scores + j), top));
    const float before = h.largest[g], now = std::max(before, Lanes::most(top));
    const F log2e = Lanes::set(kLog2e), shift = Lanes::set(-now * kLog2e);
    F sum = Lanes::set(0.0f);
    for (int j = 0; j < count; j += kLanes) {
      const F w = exp2_of(Lanes::fma(Lanes::load(scores + j), log2e, shift));
      const F seen = Lanes::select(sight.of(g, j, count), w, Lanes::set(0.0f));
      sum = Lanes::add(sum, seen);
      Lanes::store(scores + j, seen);
    }
    const float fade = first_lane(exp2_of(Lanes::set((before - now) * kLog2e)));
    for (int d = 0; d < dim; d += kLanes)
      Lanes::store(h.attn + g * dim + d, Lanes::mul(Lanes::set(fade), Lanes::load(h.attn + g * dim + d)));
    h.total[g] = h.total[g] * fade + Lanes::sum(sum);
    h.largest[g] = now;
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

template <class Stored, int G>
void attend_keys(Heads &h, const Sight &sight, int dim, const Stores<Stored> &stores, const typename Stored::Item *k,
                 const typename Stored::Item *v, int count, const Keys<Stored> &next) {
  score<Stored, G>(h, dim, stores, k, v, count);
  if (h.raw)
    for (int g = 0; g < G; ++g)
      std::copy(h.scores + g * kKeys, h.scores + g * kKeys + count, h.raw + g * h.raw_head + sight.first);
  soften(h, sight, G, dim, count);
  for (int d = 0; d < dim; d += kWide * kLanes) add_columns<Stored, G>(h, dim, d, v, stores.v_slot, count, next);
}

// The first keys of a unit.
template <class Stored>
Keys<Stored> keys_of(const Stores<Stored> &stores, int64_t unit, int head, int visible) {
  return {stores.k + unit * stores.k_unit + head * stores.k_head, stores.k_slot, std::min(kKeys, visible)};
}

// `next` are the keys that follow this unit.
template <class Stored>
void attend_unit(Heads &h, Sight &sight, int group, int dim, const Stores<Stored> &stores, int64_t unit, int head,
                 int visible, const Keys<Stored> &next) {
  const auto *k = stores.k + unit * stores.k_unit + head * stores.k_head;
  const auto *v = stores.v + unit * stores.v_unit + head * stores.v_head;
  for (int first = 0; first < visible; first += kKeys) {
    sight.first = first;
    const int count = std::min(kKeys, visible - first), left = visible - first - count;
    const auto *keys = k + first * stores.k_slot, *values = v + first * stores.v_slot;
    const Keys<Stored> following =
        left ? Keys<Stored>{keys + count * stores.k_slot, stores.k_slot, std::min(kKeys, left)} : next;
    switch (group) {
      case 1: attend_keys<Stored, 1>(h, sight, dim, stores, keys, values, count, following); break;
      case 2: attend_keys<Stored, 2>(h, sight, dim, stores, keys, values, count, following); break;
      case 3: attend_keys<Stored, 3>(h, sight, dim, stores, keys, values, count, following); break;
      default: attend_keys<Stored, 4>(h, sight, dim, stores, keys, values, count, following);
    }
  }
}

// Adds the weights of the heads of a pass, once all their keys are known, to what each slot has received.
void add_mass(const Heads &h, int group, int visible, const float *sinks, float *mass) {
  for (int g = 0; g < group; ++g) {
    if (h.total[g] == 0) continue;
    const F log2e = Lanes::set(kLog2e), shift = Lanes::set(-h.largest[g] * kLog2e);
    float whole = h.total[g];
    if (sinks) whole += first_lane(exp2_of(Lanes::fma(Lanes::set(sinks[g]), log2e, shift)));
    const F share = Lanes::set(1 / whole);
    const float *scores = h.raw + g * h.raw_head;
    for (int j = 0; j < visible; j += kLanes) {
      const M there = Lanes::first(visible - j);
      const F w = exp2_of(Lanes::fma(Lanes::load(scores + j, there), log2e, shift));
      Lanes::store(mass + j, Lanes::fma(w, share, Lanes::load(mass + j, there)), there);
    }
  }
}

struct Job {
  const float *q;
  const RowPlan &plan;
  float *attn, *largest, *total;
  int64_t q_row, q_head, q_member;  // strides, in items
  int num_rows, num_heads, group, dim, num_slots, num_tokens;
};

// Query heads [first, first + count) of a row and key/value head.
template <class Stored>
void attend_heads(const Job &job, const Stores<Stored> &stores, const std::vector<std::vector<Item>> &items, int row,
                  int head, int first, int count) {
  const RowPlan &plan = job.plan;
  const int dim = job.dim, members = job.group / job.num_tokens;
  Heads h;
  Sight sight;
  for (int g = 0; g < count; ++g) {
    const float *from = job.q + row * job.q_row + head * job.q_head + (first + g) * job.q_member;
    std::copy(from, from + dim, h.q + g * dim);
    h.largest[g] = kFloor;
    h.total[g] = 0;
  }
  std::fill(h.attn, h.attn + count * dim, 0.0f);
  static thread_local std::vector<float> raw;
  if (plan.mass) {
    raw.resize(kMaxGroup * (size_t)job.num_slots);
    h.raw = raw.data();
    h.raw_head = job.num_slots;
  }
  if (plan.position) {
    sight.kind = Sight::kHeld;
    sight.sink = plan.sink;
    sight.position =
        plan.position + ((int64_t)row * plan.position_heads + head % plan.position_heads) * job.num_slots;
    for (int g = 0; g < count; ++g) {
      const int token = row * job.num_tokens + (first + g) / members;
      sight.begin[g] = plan.begin[token];
      sight.end[g] = plan.end[token];
    }
  }
  const auto keys_at = [&](int other, size_t i, int its_head) {
    if (i >= items[other].size()) return Keys<Stored>{};
    return keys_of(stores, items[other][i].unit, its_head, items[other][i].count);
  };
  const size_t num_items = items[row].size();
  for (size_t i = 0; i < num_items; ++i) {
    const Item &item = items[row][i];
    if (!plan.position) sight.kind = item.limits ? Sight::kLeading : Sight::kAll;
    if (item.limits)
      for (int g = 0; g < count; ++g) sight.end[g] = item.limits[(first + g) / members];
    const Keys<Stored> next = i + 1 < num_items          ? keys_at(row, i + 1, head)
                              : head + 1 < job.num_heads ? keys_at(row, 0, head + 1)
                              : row + 1 < job.num_rows   ? keys_at(row + 1, 0, 0)
                                                         : Keys<Stored>{};
    attend_unit(h, sight, count, dim, stores, item.unit, head, item.count, next);
  }
  const int64_t line = (int64_t)row * job.num_heads + head, place = line * job.group + first;
  if (plan.mass && num_items)
    add_mass(h, count, items[row][0].count, plan.sinks ? plan.sinks + head * job.group + first : nullptr,
             plan.mass + line * job.num_slots);
  std::copy(h.attn, h.attn + count * dim, job.attn + place * dim);
  std::copy(h.largest, h.largest + count, job.largest + place);
  std::copy(h.total, h.total + count, job.total + place);
}

template <class Stored>
void attend_all(const Job &job, const Stores<Stored> &stores, int num_threads) {
  const auto items = items_of(job.plan, job.num_rows, job.num_tokens, job.num_slots);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
  for (int row = 0; row < job.num_rows; ++row)
    for (int head = 0; head < job.num_heads; ++head)
      for (int first = 0; first < job.group; first += kMaxGroup)
        attend_heads(job, stores, items, row, head, first, std::min(kMaxGroup, job.group - first));
}

}  // namespace

// As `attend_rows` of rows.cpp.
void attend_rows(const float *q, const void *k, const void *v, Store store, const RowPlan &plan, float *attn,
                 float *largest, float *total, const int64_t *strides, const int *sizes, int num_threads) {
  const Job job{q,          plan,     attn,     largest,  total,    strides[0], strides[1],
                strides[2], sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],   sizes[5]};
  const auto run = [&](auto stored) {
    using Item = typename decltype(stored)::Item;
    attend_all<decltype(stored)>(job,
                                 {(const Item *)k, (const Item *)v, strides[3], strides[4], strides[5], strides[6],
                                  strides[7], strides[8]},
                                 num_threads);
  };
  with_stored(store, run);
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
