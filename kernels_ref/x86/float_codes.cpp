// Attention of decode rows over keys and values of few bits, which are read where they lie; and these, widened.
//
// With a scale s and a zero z of each vector, the score of a key of codes c is s (q c) + z (sum of q), and a value of
// weight p adds p s c and p z: codes are widened, and nothing else is computed for each of their elements.

#include <algorithm>
#include <cstdint>

#include "code_lanes.h"
#include "float_kernels.h"
#include "float_row_pass.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

// Scales and zeros of the vectors of a run; those of lanes behind the last one are 0.
struct Terms {
  alignas(64) float scale[kKeys], zero[kKeys];

  template <class Codes>
  void read(const uint16_t *meta, int count) {
    constexpr int kWidth = Codes::kHasZero ? 2 : 1;
    const F unit = Lanes::set(Codes::kUnit);
    for (int j = 0; j < count; j += kLanes) {
      if (!meta) {
        Lanes::store(scale + j, unit);
        continue;
      }
      const uint16_t *from = meta + j * kWidth;
      uint16_t some[2 * kLanes] = {};
      if (count - j < kLanes) {
        std::copy(from, meta + count * kWidth, some);
        from = some;
      }
      if (Codes::kHasZero) {
        Lanes::store(scale + j, Lanes::even(from));
        Lanes::store(zero + j, Lanes::odd(from));
      } else {
        Lanes::store(scale + j, Lanes::mul(unit, Lanes::of_bfloat16(from)));
      }
    }
  }
};

// Vectors of a run.
struct Codes {
  const uint8_t *first;
  const uint16_t *meta;
  int64_t slot;
  int count;

  Codes(const CodedVectors &of, const Run &run, int width)
      : first(of.codes + run.unit * of.unit + run.head * of.head + run.first * of.slot),
        meta(of.meta ? of.meta + run.unit * of.meta_unit + run.head * of.meta_head + run.first * width : nullptr),
        slot(of.slot),
        count(run.count) {}
};

// scores[g][j] of all keys; lanes behind the last one repeat it and are masked by `soften`. Fetches the values
// meanwhile.
template <class Kind, int G>
void score(Heads &h, int dim, const Codes &k, const Terms &terms, const Codes &v, int value_bytes) {
  constexpr int kTogether = Lanes::kRegisters == 32 ? 4 : 2;
  const int bytes = Kind::bytes(dim), second = Kind::second(dim);
  float sums_of_q[G];
  if (Kind::kHasZero)
    for (int g = 0; g < G; ++g) {
      F sum = Lanes::set(0.0f);
      for (int d = 0; d < dim; d += kLanes) sum = Lanes::add(sum, Lanes::load(h.q + g * dim + d));
      sums_of_q[g] = Lanes::sum(sum);
    }
  for (int j = 0; j < k.count; j += kLanes) {
    F products[G][kLanes];
    for (int i = 0; i < kLanes; i += kTogether) {
      const uint8_t *keys[kTogether];
      F sum[kTogether][G];
#pragma GCC unroll 4
      for (int n = 0; n < kTogether; ++n) {
        const int slot = std::min(j + i + n, k.count - 1);
        keys[n] = k.first + slot * k.slot;
        prefetch(v.first + slot * v.slot, value_bytes);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sum[n][g] = Lanes::set(0.0f);
      }
      const float *q = h.q;
      for (int d = 0; d < bytes; d += Kind::kStep, q += Kind::kStep) {
        F part[kTogether][2];
#pragma GCC unroll 4
        for (int n = 0; n < kTogether; ++n) Kind::load(keys[n] + d, part[n][0], part[n][1]);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          const F a = Lanes::load(q + g * dim), b = Lanes::load(q + g * dim + second);
#pragma GCC unroll 4
          for (int n = 0; n < kTogether; ++n)
            sum[n][g] = Lanes::fma(b, part[n][1], Lanes::fma(a, part[n][0], sum[n][g]));
        }
      }
#pragma GCC unroll 4
      for (int n = 0; n < kTogether; ++n)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) products[g][i + n] = sum[n][g];
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      F x = Lanes::mul(Lanes::sums(products[g]), Lanes::load(terms.scale + j));
      if (Kind::kHasZero) x = Lanes::fma(Lanes::load(terms.zero + j), Lanes::set(sums_of_q[g]), x);
      Lanes::store(h.scores + g * kKeys + j, x);
    }
  }
}

// Weights to weights of codes; the sums get what zeros add.
template <class Kind>
void weigh_codes(Heads &h, int group, int dim, const Terms &terms, int count) {
  for (int g = 0; g < group; ++g) {
    float *weights = h.scores + g * kKeys;
    F zeros = Lanes::set(0.0f);
    for (int j = 0; j < count; j += kLanes) {
      const F weight = Lanes::load(weights + j);
      if (Kind::kHasZero) zeros = Lanes::fma(weight, Lanes::load(terms.zero + j), zeros);
      Lanes::store(weights + j, Lanes::mul(weight, Lanes::load(terms.scale + j)));
    }
    if (!Kind::kHasZero) continue;
    const F all = Lanes::set(Lanes::sum(zeros));
    float *attn = h.attn + g * dim;
    for (int d = 0; d < dim; d += kLanes) Lanes::store(attn + d, Lanes::add(all, Lanes::load(attn + d)));
  }
}

// Adds weighted codes to W pairs of vectors of the sums, those of bytes from d on.
template <class Kind, int G, int W>
void add_columns(Heads &h, int dim, int d, const Codes &v) {
  const int second = Kind::second(dim);
  const auto at = [&](int g, int w) { return h.attn + g * dim + d + w * Kind::kStep; };
  F sum[G][W][2];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      sum[g][w][0] = Lanes::load(at(g, w));
      sum[g][w][1] = Lanes::load(at(g, w) + second);
    }
  for (int j = 0; j < v.count; ++j) {
    F value[W][2];
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) Kind::load(v.first + j * v.slot + d + w * Kind::kStep, value[w][0], value[w][1]);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const F weight = Lanes::set(h.scores[g * kKeys + j]);
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
        sum[g][w][0] = Lanes::fma(weight, value[w][0], sum[g][w][0]);
        sum[g][w][1] = Lanes::fma(weight, value[w][1], sum[g][w][1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      Lanes::store(at(g, w), sum[g][w][0]);
      Lanes::store(at(g, w) + second, sum[g][w][1]);
    }
}

// Adds weighted codes to the sums, and fetches keys that are next meanwhile.
template <class Kind, int G>
void add_values(Heads &h, int dim, const Codes &v, const Codes &next, int key_bytes) {
  constexpr int kWide = Lanes::kRegisters == 32 ? 2 : 1;
  const int bytes = Kind::bytes(dim), passes = bytes / Kind::kStep;
  int fetched = 0;
  for (int d = 0; d < bytes;) {
    const int wide = d + kWide * Kind::kStep <= bytes ? kWide : 1;
    for (const int end = next.count * (d / Kind::kStep + wide) / passes; fetched < end; ++fetched)
      prefetch(next.first + fetched * next.slot, key_bytes);
    if (wide == kWide)
      add_columns<Kind, G, kWide>(h, dim, d, v);
    else
      add_columns<Kind, G, 1>(h, dim, d, v);
    d += wide * Kind::kStep;
  }
}

template <class KeyKind, class ValueKind>
struct CodedStores {
  const CodedVectors &k, &v;

  template <int G>
  void attend_keys(Heads &h, const Sight &sight, int dim, const Run &run, const Run &next) const {
    const Codes keys = keys_of(run), following = keys_of(next), values(v, run, ValueKind::kHasZero ? 2 : 1);
    Terms terms;
    terms.read<KeyKind>(keys.meta, run.count);
    score<KeyKind, G>(h, dim, keys, terms, values, ValueKind::bytes(dim));
    soften(h, sight, G, dim, run.count);
    terms.read<ValueKind>(values.meta, run.count);
    weigh_codes<ValueKind>(h, G, dim, terms, run.count);
    add_values<ValueKind, G>(h, dim, values, following, KeyKind::bytes(dim));
  }

  Codes keys_of(const Run &run) const { return Codes(k, run, KeyKind::kHasZero ? 2 : 1); }
};

inline uint16_t bfloat16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// One run of a unit and head, dense.
template <class Kind>
void widen_run(const Codes &from, int dim, void *to, Store store) {
  Terms terms;
  terms.read<Kind>(from.meta, from.count);
  const int second = Kind::second(dim);
  alignas(64) float numbers[kMaxDim];
  for (int j = 0; j < from.count; ++j) {
    const bool is_float = store == Store::kFloat32;
    float *x = is_float ? (float *)to + j * dim : numbers, *at = x;
    const F scale = Lanes::set(terms.scale[j]), zero = Lanes::set(Kind::kHasZero ? terms.zero[j] : 0.0f);
    for (int d = 0; d < Kind::bytes(dim); d += Kind::kStep, at += Kind::kStep) {
      F a, b;
      Kind::load(from.first + j * from.slot + d, a, b);
      Lanes::store(at, Kind::kHasZero ? Lanes::fma(a, scale, zero) : Lanes::mul(a, scale));
      Lanes::store(at + second, Kind::kHasZero ? Lanes::fma(b, scale, zero) : Lanes::mul(b, scale));
    }
    if (is_float) continue;
    uint16_t *rounded = (uint16_t *)to + j * dim;
    for (int d = 0; d < dim; ++d) rounded[d] = bfloat16_of(numbers[d]);
  }
}

}  // namespace

// Query heads of all rows as `attend_rows` of rows.cpp.
void attend_codes(const float *q, const CodedVectors &k, const CodedVectors &v, const RowPlan &plan, float *attn,
                  float *largest, float *total, const int64_t *strides, const int *sizes, int num_threads) {
  const Job job{q,          plan,     attn,     largest,  total,    strides[0], strides[1],
                strides[2], sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],   sizes[5]};
  with_codes(k.code, [&](auto keys) {
    with_codes(v.code, [&](auto values) {
      attend_all(job, CodedStores<decltype(keys), decltype(values)>{k, v}, num_threads);
    });
  });
}

// `sizes`: heads, slots, elements of a vector.
void widen_codes(const CodedVectors &from, const int64_t *unit, int64_t num_units, const int *sizes, void *to,
                 Store store, int num_threads) {
  const int heads = sizes[0], slots = sizes[1], dim = sizes[2];
  const int64_t item = store == Store::kFloat32 ? 4 : 2;
  with_codes(from.code, [&](auto kind) {
    using Kind = decltype(kind);
#pragma omp parallel for collapse(2) num_threads(num_threads) if (num_threads > 1)
    for (int64_t n = 0; n < num_units; ++n)
      for (int head = 0; head < heads; ++head)
        for (int first = 0; first < slots; first += kKeys) {
          const Codes run(from, {unit[n], head, first, std::min(kKeys, slots - first)}, Kind::kHasZero ? 2 : 1);
          widen_run<Kind>(run, dim, (char *)to + (((n * heads + head) * slots + first) * dim) * item, store);
        }
  });
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
