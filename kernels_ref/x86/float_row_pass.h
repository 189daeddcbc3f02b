// Attention of decode rows of float32 query tokens, whatever their keys and values are stored as.
//
// A class of stores has `begin(heads, group, dim)`, which prepares queries, and `attend_keys<G>(heads, sight, dim, run,
// next)`, which adds the slots of a run to G query heads, and may fetch the keys of the next run meanwhile.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "row_items.h"

namespace hpu_duo {
namespace {

constexpr int kKeys = 128;    // keys whose scores are held at a time
constexpr int kMaxGroup = 4;  // query heads that one pass over values serves
constexpr int kMaxDim = 576;
constexpr int kLine = 64;     // bytes

// Neighbouring slots of a unit and a key/value head.
struct Run {
  int64_t unit = 0;
  int head = 0, first = 0, count = 0;
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
  alignas(64) int16_t words[kMaxGroup * kMaxDim];    // queries as multiples of a unit, where stores need them
  float unit[kMaxGroup], sum_of_q[kMaxGroup];
  float largest[kMaxGroup], total[kMaxGroup];
  float *raw = nullptr;  // scores of all slots of a unit, those of each head `raw_head` apart, or null
  int64_t raw_head = 0;
};

struct Pass {
  Heads heads;
  Sight sight;
  int first, group;  // query heads
};

// To the second level: the first one has few places for what is under way.
template <typename Item>
inline void prefetch(const Item *from, int count) {
  for (int d = 0; d < count; d += kLine / (int)sizeof(Item)) __builtin_prefetch(from + d, 0, 2);
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

// `next` are the keys that follow this unit. Each pass reads keys and values where the first one has brought them.
template <class Stores>
void attend_unit(std::vector<Pass> &passes, int dim, const Stores &stores, const Run &whole, const Run &next) {
  for (int first = 0; first < whole.count; first += kKeys) {
    const int count = std::min(kKeys, whole.count - first), left = whole.count - first - count;
    const Run run{whole.unit, whole.head, first, count};
    Run following = left ? Run{whole.unit, whole.head, first + count, std::min(kKeys, left)} : next;
    for (Pass &pass : passes) {
      pass.sight.first = first;
      switch (pass.group) {
        case 1: stores.template attend_keys<1>(pass.heads, pass.sight, dim, run, following); break;
        case 2: stores.template attend_keys<2>(pass.heads, pass.sight, dim, run, following); break;
        case 3: stores.template attend_keys<3>(pass.heads, pass.sight, dim, run, following); break;
        default: stores.template attend_keys<4>(pass.heads, pass.sight, dim, run, following);
      }
      following = {};
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
  int num_rows, num_heads, group, dim, num_slots, num_tokens, value_dim;
};

// Prepares query heads from number `pass.first` on of a row and key/value head.
void begin_pass(const Job &job, Pass &pass, int row, int head) {
  const RowPlan &plan = job.plan;
  Heads &h = pass.heads;
  pass.group = std::min(kMaxGroup, job.group - pass.first);
  for (int g = 0; g < pass.group; ++g) {
    const float *from = job.q + row * job.q_row + head * job.q_head + (pass.first + g) * job.q_member;
    std::copy(from, from + job.dim, h.q + g * job.dim);
    h.largest[g] = kFloor;
    h.total[g] = 0;
  }
  std::fill(h.attn, h.attn + pass.group * job.value_dim, 0.0f);
  Sight &sight = pass.sight = {};
  if (!plan.position) return;
  sight.kind = Sight::kHeld;
  sight.sink = plan.sink;
  sight.position = plan.position + ((int64_t)row * plan.position_heads + head % plan.position_heads) * job.num_slots;
  for (int g = 0; g < pass.group; ++g) {
    const int token = row * job.num_tokens + (pass.first + g) / (job.group / job.num_tokens);
    sight.begin[g] = plan.begin[token];
    sight.end[g] = plan.end[token];
  }
}

// Passes [begin, end) of a row and key/value head.
template <class Stores>
void attend_passes(const Job &job, const Stores &stores, const std::vector<std::vector<Item>> &items, int row,
                   int head, int begin, int end) {
  static thread_local std::vector<Pass> passes;
  static thread_local std::vector<float> raw;
  const RowPlan &plan = job.plan;
  const int members = job.group / job.num_tokens;
  const size_t raw_size = plan.mass ? kMaxGroup * (size_t)job.num_slots : 0;
  passes.resize(end - begin);
  raw.resize(passes.size() * raw_size);
  for (int n = begin; n < end; ++n) {
    Pass &pass = passes[n - begin];
    pass.first = n * kMaxGroup;
    begin_pass(job, pass, row, head);
    pass.heads.raw = plan.mass ? raw.data() + (n - begin) * raw_size : nullptr;
    pass.heads.raw_head = job.num_slots;
    stores.begin(pass.heads, pass.group, job.dim);
  }
  const auto first_of = [&](int other, size_t i, int its_head) {
    if (i >= items[other].size()) return Run{};
    return Run{items[other][i].unit, its_head, 0, std::min(kKeys, items[other][i].count)};
  };
  const size_t num_items = items[row].size();
  for (size_t i = 0; i < num_items; ++i) {
    const Item &item = items[row][i];
    for (Pass &pass : passes) {
      if (!plan.position) pass.sight.kind = item.limits ? Sight::kLeading : Sight::kAll;
      if (item.limits)
        for (int g = 0; g < pass.group; ++g) pass.sight.end[g] = item.limits[(pass.first + g) / members];
    }
    const Run next = i + 1 < num_items          ? first_of(row, i + 1, head)
                     : head + 1 < job.num_heads ? first_of(row, 0, head + 1)
                     : row + 1 < job.num_rows   ? first_of(row + 1, 0, 0)
                                                : Run{};
    attend_unit(passes, job.dim, stores, {item.unit, head, 0, item.count}, next);
  }
  const int64_t line = (int64_t)row * job.num_heads + head;
  for (const Pass &pass : passes) {
    const Heads &h = pass.heads;
    const int64_t place = line * job.group + pass.first;
    if (plan.mass && num_items)
      add_mass(h, pass.group, items[row][0].count, plan.sinks ? plan.sinks + head * job.group + pass.first : nullptr,
               plan.mass + line * job.num_slots);
    std::copy(h.attn, h.attn + pass.group * job.value_dim, job.attn + place * job.value_dim);
    std::copy(h.largest, h.largest + pass.group, job.largest + place);
    std::copy(h.total, h.total + pass.group, job.total + place);
  }
}

template <class Stores>
void attend_all(const Job &job, const Stores &stores, int num_threads) {
  const auto items = items_of(job.plan, job.num_rows, job.num_tokens, job.num_slots);
  const int num_passes = (job.group + kMaxGroup - 1) / kMaxGroup;
  const int num_parts = parts_of(num_passes, job.num_rows * job.num_heads, job.plan, num_threads);
#pragma omp parallel for collapse(3) schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
  for (int row = 0; row < job.num_rows; ++row)
    for (int head = 0; head < job.num_heads; ++head)
      for (int part = 0; part < num_parts; ++part)
        attend_passes(job, stores, items, row, head, num_passes * part / num_parts,
                      num_passes * (part + 1) / num_parts);
}

}  // namespace
}  // namespace hpu_duo
