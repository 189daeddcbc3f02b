// Attention of decode rows over keys and values of few bits, which are read where they lie; and these, widened.
//
// With a scale s and a zero z of each vector, the score of a key of codes c is s (q c) + z (sum of q), and a value of
// weight p adds p s c and p z: codes are widened, and nothing else is computed for each of their elements.
//
// For queries of 16-bit floats, codes of integers are widened to 16 bits, and multiplied with queries as multiples of
// 2^-15 of the largest element of a head, and with weights as multiples of 2^-15 of the largest of a run: exact sums of
// factors that are rounded less than such queries are.

#include <algorithm>
#include <cstdint>

#include "code_lanes.h"
#include "float_kernels.h"
#include "float_row_pass.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr float kMeanNibble = 7.5f;
constexpr int kWholeWords = 32;  // bytes of a vector are a multiple where it is multiplied as words

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

// Fetches bytes of a vector: short ones to the first level, which has places for a run of them.
template <class Kind>
inline __attribute__((always_inline)) void fetch(const uint8_t *from, int count) {
  for (int d = 0; d < count; d += kLine)
    if constexpr (Kind::kHasZero)
      __builtin_prefetch(from + d, 0, 3);
    else
      __builtin_prefetch(from + d, 0, 2);
}

// The keys that are next: each pass over values fetches one line of each, or none.
struct Ahead {
  const Codes &of;
  int bytes;  // of each vector
  const uint8_t *line = nullptr;
  int count = 0;

  // The next pass does `done` of `all`, and passes before it have done `before`.
  void share(int before, int done, int all) {
    const int lines = (bytes + kLine - 1) / kLine, first = (before * lines + all - 1) / all;
    line = of.first + first * kLine;
    count = ((before + done) * lines + all - 1) / all > first ? of.count : 0;
  }

  template <class Kind>
  inline __attribute__((always_inline)) void fetch_line(int j) const {
    if (j < count) fetch<Kind>(line + j * of.slot, 1);
  }
};

// scores[g][j] of all keys; lanes behind the last one repeat it and are masked by `soften`. Fetches the values
// meanwhile.
template <class Kind, int G>
__attribute__((noinline)) void score(Heads &h, int dim, const Codes &k, const Terms &terms, const Codes &v,
                                     int value_bytes) {
  constexpr int kTogether = keys_together(G);
  const int bytes = Kind::bytes(dim), second = Kind::second(dim);
  for (int j = 0; j < k.count; j += kLanes) {
    LaneSums products[G];
    for (int i = 0; i < kLanes; i += kTogether) {
      const uint8_t *keys[kTogether];
      F sum[kTogether][G];
#pragma GCC unroll 4
      for (int n = 0; n < kTogether; ++n) {
        const int slot = std::min(j + i + n, k.count - 1);
        keys[n] = k.first + slot * k.slot;
        fetch<Kind>(v.first + slot * v.slot, value_bytes);
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
      for (int g = 0; g < G; ++g) products[g].put(i, sum, g);
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      F x = Lanes::mul(products[g].all(), Lanes::load(terms.scale + j));
      if (Kind::kHasZero) x = Lanes::fma(Lanes::load(terms.zero + j), Lanes::set(h.sum_of_q[g]), x);
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
void add_columns(Heads &h, int dim, int d, const Codes &v, const Ahead &next) {
  const int second = Kind::second(dim);
  const auto at = [&](int g, int w) { return h.attn + g * dim + d + w * Kind::kStep; };
  F sum[G][W][2];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      sum[g][w][0] = Lanes::load(at(g, w));
      sum[g][w][1] = Lanes::load(at(g, w) + second);
    }
  for (int j = 0; j < v.count; ++j) {
    next.fetch_line<Kind>(j);
    F value[W][2];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) Kind::load(v.first + j * v.slot + d + w * Kind::kStep, value[w][0], value[w][1]);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const F weight = Lanes::set(h.scores[g * kKeys + j]);
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
        sum[g][w][0] = Lanes::fma(weight, value[w][0], sum[g][w][0]);
        sum[g][w][1] = Lanes::fma(weight, value[w][1], sum[g][w][1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      Lanes::store(at(g, w), sum[g][w][0]);
      Lanes::store(at(g, w) + second, sum[g][w][1]);
    }
}

// Adds weighted codes to the sums.
template <class Kind, int G>
__attribute__((noinline)) void add_values(Heads &h, int dim, const Codes &v, Ahead next) {
  // Eight sums hide the time that a product takes.
  constexpr int kWide = Lanes::kRegisters == 32 ? 2 : std::max(4 / G, 1), kStep = kWide * Kind::kStep;
  const int bytes = Kind::bytes(dim);
  int d = 0;
  for (; d + kStep <= bytes; d += kStep) {
    next.share(d, kStep, bytes);
    add_columns<Kind, G, kWide>(h, dim, d, v, next);
  }
  for (; d < bytes; d += Kind::kStep) {
    next.share(d, Kind::kStep, bytes);
    add_columns<Kind, G, 1>(h, dim, d, v, next);
  }
}

// Numbers as multiples of the unit that is returned, which is NaN if one of them is not finite. `lost` is the sum of
// what they lose.
float round_to_words(const float *from, int count, int16_t *to, float *lost = nullptr) {
  constexpr float kMost = 32767, kLeast = 4e-34f;  // if all are smaller, all are 0
  F most = Lanes::set(0.0f), nothing = Lanes::set(0.0f);
  for (int j = 0; j < count; j += kLanes) {
    const F x = Lanes::load(from + j);
    most = Lanes::max(most, Lanes::max(x, Lanes::sub(Lanes::set(0.0f), x)));
    nothing = Lanes::fma(x, Lanes::set(0.0f), nothing);
  }
  const float none = Lanes::sum(nothing), largest = none == 0 ? Lanes::most(most) : 0;
  const float unit = largest < kLeast ? 0 : largest / kMost;
  const F factor = Lanes::set(largest < kLeast ? 0 : kMost / largest);
  F rest = Lanes::set(0.0f);
  for (int j = 0; j < count; j += kLanes) {
    const F x = none == 0 ? Lanes::load(from + j) : Lanes::set(0.0f), multiple = Lanes::nearest(Lanes::mul(factor, x));
    store_words(to + j, multiple);
    rest = Lanes::add(rest, Lanes::fma(Lanes::set(-unit), multiple, x));
  }
  if (lost) *lost = Lanes::sum(rest);
  return none == 0 ? unit : none;
}

// `score` by words.
template <class Kind, int G>
__attribute__((noinline)) void score_words(Heads &h, int dim, const Codes &k, const Terms &terms, const Codes &v,
                                           int value_bytes) {
  constexpr int kTogether = keys_together(G);
  const int bytes = Kind::bytes(dim);
  for (int j = 0; j < k.count; j += kLanes) {
    LaneSums products[G];
    for (int i = 0; i < kLanes; i += kTogether) {
      const uint8_t *keys[kTogether];
      I sum[kTogether][G];
#pragma GCC unroll 4
      for (int n = 0; n < kTogether; ++n) {
        const int slot = std::min(j + i + n, k.count - 1);
        keys[n] = k.first + slot * k.slot;
        fetch<Kind>(v.first + slot * v.slot, value_bytes);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sum[n][g] = Lanes::set(0);
      }
      for (int d = 0; d < bytes; d += kWordStep) {
        Words part[kTogether][Kind::kParts];
#pragma GCC unroll 4
        for (int n = 0; n < kTogether; ++n) Kind::words(keys[n] + d, part[n]);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
          for (int p = 0; p < Kind::kParts; ++p) {
            const Words q = load_words(h.words + g * dim + p * bytes + d);
#pragma GCC unroll 4
            for (int n = 0; n < kTogether; ++n) sum[n][g] = add_pairs(sum[n][g], q, part[n][p]);
          }
      }
      F as_float[kTogether][G];
#pragma GCC unroll 4
      for (int n = 0; n < kTogether; ++n)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) as_float[n][g] = to_float(sum[n][g]);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) products[g].put(i, as_float, g);
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      F x = Lanes::mul(Lanes::mul(products[g].all(), Lanes::load(terms.scale + j)), Lanes::set(h.unit[g]));
      if (Kind::kHasZero) x = Lanes::fma(Lanes::load(terms.zero + j), Lanes::set(h.sum_of_q[g]), x);
      Lanes::store(h.scores + g * kKeys + j, x);
    }
  }
}

// `add_columns` of W steps of words; `weights` of heads are multiples of units.
template <class Kind, int G, int W>
void add_word_columns(Heads &h, int dim, int d, const Codes &v, const int16_t *weights, const float *unit,
                      const Ahead &next) {
  I sum[G][W][Kind::kParts][2];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w)
#pragma GCC unroll 2
      for (int p = 0; p < Kind::kParts; ++p) sum[g][w][p][0] = sum[g][w][p][1] = Lanes::set(0);
  for (int j = 0; j < v.count; j += 2) {
    next.fetch_line<Kind>(j);
    next.fetch_line<Kind>(j + 1);
    const uint8_t *even = v.first + j * v.slot + d, *odd = j + 1 < v.count ? even + v.slot : even;
    Words value[W][Kind::kParts][2];
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) Kind::pairs(even + w * kWordStep, odd + w * kWordStep, value[w]);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      int pair;
      std::memcpy(&pair, weights + g * kKeys + j, sizeof(pair));
      const Words weight = both_words(pair);
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w)
#pragma GCC unroll 2
        for (int p = 0; p < Kind::kParts; ++p)
#pragma GCC unroll 2
          for (int n = 0; n < 2; ++n) sum[g][w][p][n] = add_pairs(sum[g][w][p][n], value[w][p][n], weight);
    }
  }
  for (int g = 0; g < G; ++g)
    for (int w = 0; w < W; ++w)
      for (int p = 0; p < Kind::kParts; ++p) {
        in_order(sum[g][w][p][0], sum[g][w][p][1]);
        for (int n = 0; n < 2; ++n) {
          float *at = h.attn + g * dim + p * Kind::bytes(dim) + d + w * kWordStep + n * kLanes;
          Lanes::store(at, Lanes::fma(Lanes::set(unit[g]), to_float(sum[g][w][p][n]), Lanes::load(at)));
        }
      }
}

// `add_values` by words.
template <class Kind, int G>
__attribute__((noinline)) void add_words(Heads &h, int dim, const Codes &v, Ahead next) {
  constexpr int kWide = Lanes::kRegisters == 32 && Kind::kParts == 1 ? 2 : 1, kStep = kWide * kWordStep;
  alignas(64) int16_t weights[G * kKeys];
  float unit[G];
  const int lanes = (v.count + kLanes - 1) / kLanes * kLanes, bytes = Kind::bytes(dim);
  for (int g = 0; g < G; ++g) {
    float lost;
    unit[g] = round_to_words(h.scores + g * kKeys, lanes, weights + g * kKeys, &lost);
    if (!Kind::kHasZero) continue;
    // Many small weights may round to 0. The mean of all codes stands for those of their values.
    const F mean = Lanes::set(lost * kMeanNibble);
    float *attn = h.attn + g * dim;
    for (int e = 0; e < dim; e += kLanes) Lanes::store(attn + e, Lanes::add(mean, Lanes::load(attn + e)));
  }
  int d = 0;
  for (; d + kStep <= bytes; d += kStep) {
    next.share(d, kStep, bytes);
    add_word_columns<Kind, G, kWide>(h, dim, d, v, weights, unit, next);
  }
  if (d == bytes) return;
  next.share(d, bytes - d, bytes);
  add_word_columns<Kind, G, 1>(h, dim, d, v, weights, unit, next);
}

template <class KeyKind, class ValueKind>
struct CodedStores {
  const CodedVectors &k, &v;
  bool is_rounded;  // whether queries have 16 bits

  void begin(Heads &h, int group, int dim) const {
    for (int g = 0; g < group; ++g) {
      const float *q = h.q + g * dim;
      F sum = Lanes::set(0.0f);
      for (int d = 0; d < dim; d += kLanes) sum = Lanes::add(sum, Lanes::load(q + d));
      h.sum_of_q[g] = Lanes::sum(sum);
      if (is_rounded) h.unit[g] = round_to_words(q, dim, h.words + g * dim);
    }
  }

  template <int G>
  void attend_keys(Heads &h, const Sight &sight, int dim, const Run &run, const Run &after) const {
    const Codes keys = keys_of(run), following = keys_of(after), values(v, run, ValueKind::kHasZero ? 2 : 1);
    const Ahead next{following, KeyKind::bytes(dim)};
    Terms terms;
    terms.read<KeyKind>(keys.meta, run.count);
    score_keys<G>(h, dim, keys, terms, values);
    soften(h, sight, G, dim, run.count);
    terms.read<ValueKind>(values.meta, run.count);
    weigh_codes<ValueKind>(h, G, dim, terms, run.count);
    if constexpr (ValueKind::kParts > 0) {
      if (is_rounded && ValueKind::bytes(dim) % kWholeWords == 0) return add_words<ValueKind, G>(h, dim, values, next);
    }
    add_values<ValueKind, G>(h, dim, values, next);
  }

 private:
  template <int G>
  void score_keys(Heads &h, int dim, const Codes &keys, const Terms &terms, const Codes &values) const {
    if constexpr (KeyKind::kParts > 0) {
      if (is_rounded && KeyKind::bytes(dim) % kWholeWords == 0)
        return score_words<KeyKind, G>(h, dim, keys, terms, values, ValueKind::bytes(dim));
    }
    score<KeyKind, G>(h, dim, keys, terms, values, ValueKind::bytes(dim));
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

// As `attend_rows` of rows.cpp; `is_rounded`: whether queries are 16-bit floats, widened.
void attend_codes(const float *q, bool is_rounded, const CodedVectors &k, const CodedVectors &v, const RowPlan &plan,
                  float *attn, float *largest, float *total, const int64_t *strides, const int *sizes,
                  int num_threads) {
  const Job job{q,          plan,     attn,     largest,  total,    strides[0], strides[1],
                strides[2], sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],   sizes[5], sizes[3]};
  with_codes(k.code, [&](auto keys) {
    with_codes(v.code, [&](auto values) {
      attend_all(job, CodedStores<decltype(keys), decltype(values)>{k, v, is_rounded}, num_threads);
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
