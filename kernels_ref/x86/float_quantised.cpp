// Products of float32 rows with a weight of 8-bit or 4-bit codes, which is read as it is stored; quantised.cpp explains
// its panels, and is the same for bfloat16.
//
// A vector has pairs of inputs for half as many outputs, and so have its sums: pairs are added at the end of a group.
// A few rows read codes once, into registers. More rows read some codes at a time as float32, from the first cache, and
// are laid out once for all panels: rows of a large power of two would take one another's place there. Rows of either
// kind have the same bits in any number of lanes.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "blocks.h"
#include "float_kernels.h"
#include "lanes.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int kPanel = 32, kDepth = 32;
constexpr int kPairItems = 2 * kPanel;                       // of a panel, for a pair of inputs
constexpr int kPanelVectors = kPairItems / kLanes;           // for a pair of inputs, or four pairs in words
constexpr bool kIsWide = Lanes::kRegisters == 32;
constexpr int kFewStep = 4;                                  // rows of a pass that reads codes into registers
constexpr int kRowStep = 6;                                  // rows of a pass over widened codes,
constexpr int kPassVectors = kIsWide ? 4 : 2;                // and its vectors
constexpr int kPassItems = kPassVectors * kLanes;            // of those, for a pair of inputs
constexpr int64_t kRowBlock = 240;                           // rows for which codes are widened once,
constexpr int64_t kPart = kIsWide ? 256 : 512;               // and inputs
constexpr int kLine = 64;                                    // bytes

F scale_at(const QuantisedWeight &weight, int64_t place) {
  switch (weight.scale_kind) {
    case ScaleKind::kFloat: return Lanes::load((const float *)weight.scales + place);
    case ScaleKind::kHalf: return Lanes::of_float16((const uint16_t *)weight.scales + place);
    default: return Lanes::of_bfloat16((const uint16_t *)weight.scales + place);
  }
}

struct Job {
  const float *x;     // times the units of the nibbles that they are multiplied with
  const float *sums;  // of inputs over groups [rows][groups], where the weight has zero points
  const QuantisedWeight &weight;
  int64_t inputs;

  int64_t bytes_per_pair() const { return weight.kind == CodeKind::kInt4 ? kPanel : kPairItems; }
  const uint8_t *codes(int64_t panel, int64_t input) const {
    return weight.codes + (panel * inputs + input) / 2 * bytes_per_pair();
  }
  // Sums of all groups, after one more; `column` is of the panel.
  F scaled(int64_t row, int64_t panel, int64_t group, int column, F sum, F total) const {
    const int64_t place = (panel * weight.groups + group) * kPanel + column;
    if (weight.zeros) {
      const F zero = Lanes::whole(Lanes::bytes((const uint8_t *)weight.zeros + place));
      sum = Lanes::fma(Lanes::set(-sums[row * weight.groups + group]), zero, sum);
    }
    return Lanes::fma(sum, scale_at(weight, place), total);
  }
  void store(int64_t row, int64_t panel, int column, F sum) const {
    const int64_t first = panel * kPanel + column, left = weight.outputs - first;
    if (left <= 0) return;
    if (weight.bias) sum = Lanes::add(sum, Lanes::load(weight.bias + first));
    float *to = (float *)weight.y + row * weight.outputs + first;
    left >= kLanes ? Lanes::store(to, sum) : Lanes::store(to, sum, Lanes::first((int)left));
  }
};

template <CodeKind kind>
inline F values_of(const uint8_t *codes) {
  return kind == CodeKind::kInt8 ? Lanes::whole(Lanes::bytes(codes)) : Lanes::fp8(Lanes::bytes(codes));
}

// Adds an input pair to the sums of `MR` rows with NV vectors.
template <int MR, int NV, class Value>
inline __attribute__((always_inline)) void add_pair(const float *x, int64_t stride, F (&sum)[MR][NV],
                                                    const Value &value_of) {
  F left[MR];
#pragma GCC unroll 4
  for (int m = 0; m < MR; ++m) left[m] = Lanes::pair(x + m * stride);
#pragma GCC unroll 8
  for (int n = 0; n < NV; ++n) {
    const F value = value_of(n);
#pragma GCC unroll 4
    for (int m = 0; m < MR; ++m) sum[m][n] = Lanes::fma(value, left[m], sum[m][n]);
  }
}

// Adds the inputs of a step: a pair, or four of nibbles.
template <CodeKind kind, int MR, int NV>
inline __attribute__((always_inline)) void add_step(const float *x, int64_t stride, const uint8_t *const (&from)[NV],
                                                    F (&sum)[MR][NV]) {
  if constexpr (kind == CodeKind::kInt4) {
    I words[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) words[n] = Lanes::words(from[n]);
    add_pair(x, stride, sum, [&](int n) { return Lanes::nibble<0>(words[n]); });
    add_pair(x + 2, stride, sum, [&](int n) { return Lanes::nibble<1>(words[n]); });
    add_pair(x + 4, stride, sum, [&](int n) { return Lanes::nibble<2>(words[n]); });
    add_pair(x + 6, stride, sum, [&](int n) { return Lanes::nibble<3>(words[n]); });
  } else {
    add_pair(x, stride, sum, [&](int n) { return values_of<kind>(from[n]); });
  }
}

// How a pass of `MR` rows reads codes. A CPU fetches several sequential streams on its own, faster than one whose lines
// are prefetched, so eight lanes read several panels side by side. Nibbles, and fp8 for one row, are bound by the
// instructions that widen them, and sixteen lanes have registers for a whole panel: these prefetch.
template <CodeKind kind, int MR>
struct Reading {
  static constexpr bool kPrefetches = kIsWide || kind == CodeKind::kInt4 || (kind == CodeKind::kFp8 && MR == 1);
  static constexpr int kPanels = kPrefetches ? (kIsWide && MR == 1 ? 2 : 1) : MR == 4 ? 2 : 4;  // side by side
  // Vectors whose sums are in registers, with the words of nibbles.
  static constexpr int kVectors = kIsWide                  ? MR == 1 ? 8 : 4
                                  : kind == CodeKind::kInt4 ? MR == 1 ? 4 : 2
                                                            : MR == 1 ? 8 : MR == 4 ? 2 : 4;
  static constexpr int64_t kInputs = kPrefetches ? 1 << 30 : kDepth;  // which all vectors of a panel meet in turn
};

// `MR` rows with neighbouring panels.
template <CodeKind kind, int MR, int PANELS>
__attribute__((noinline)) void few(const Job &job, int64_t row, int64_t panel) {
  using Way = Reading<kind, MR>;
  constexpr int kStep = kind == CodeKind::kInt4 ? 8 : 2, kItem = kind == CodeKind::kInt4 ? 2 : 1;
  constexpr int kStepBytes = kPairItems * kItem, kVectors = Way::kVectors;
  constexpr int kTurn = std::min(kVectors / PANELS, kPanelVectors), kTurns = kPanelVectors / kTurn;  // of each panel
  constexpr int NV = kTurn * PANELS;
  const int64_t panel_bytes = job.inputs / 2 * job.bytes_per_pair();
  F total[MR][PANELS][kPanelVectors / 2];
  for (auto &row_totals : total)
    for (auto &panel_totals : row_totals)
      for (F &each : panel_totals) each = Lanes::set(0.0f);
  for (int64_t group = 0; group < job.weight.groups; ++group) {
    const int64_t begin = group * job.weight.group, end = std::min(begin + job.weight.group, job.inputs);
    F sums[kTurns][MR][NV];
    for (auto &turn_sums : sums)
      for (auto &row_sums : turn_sums)
        for (F &each : row_sums) each = Lanes::set(0.0f);
    for (int64_t first = begin; first < end; first += Way::kInputs) {
      const int64_t last = std::min(first + Way::kInputs, end);
      for (int turn = 0; turn < kTurns; ++turn) {
        F sum[MR][NV];
#pragma GCC unroll 4
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
          for (int n = 0; n < NV; ++n) sum[m][n] = sums[turn][m][n];
        const uint8_t *from[NV];
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n)
          from[n] = job.codes(panel, first) + n / kTurn * panel_bytes + (turn * kTurn + n % kTurn) * kLanes * kItem;
        const float *x = job.x + row * job.inputs + first;
        for (int64_t input = first; input < last; input += kStep, x += kStep) {
          if (Way::kPrefetches && turn == 0)
#pragma GCC unroll 8
            for (int n = 0; n < NV; n += kTurn)
#pragma GCC unroll 2
              for (int line = 0; line < kStepBytes; line += kLine) __builtin_prefetch(from[n] + 2048 + line, 0, 3);
          add_step<kind, MR, NV>(x, job.inputs, from, sum);
#pragma GCC unroll 8
          for (int n = 0; n < NV; ++n) from[n] += kStepBytes;
        }
#pragma GCC unroll 4
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
          for (int n = 0; n < NV; ++n) sums[turn][m][n] = sum[m][n];
      }
    }
    for (int m = 0; m < MR; ++m)
      for (int p = 0; p < PANELS; ++p)
        for (int n = 0; n < kPanelVectors; n += 2) {
          const auto sum_of = [&](int vector) { return sums[vector / kTurn][m][p * kTurn + vector % kTurn]; };
          total[m][p][n / 2] = job.scaled(row + m, panel + p, group, n / 2 * kLanes,
                                          Lanes::sum_of_pairs(sum_of(n), sum_of(n + 1)), total[m][p][n / 2]);
        }
  }
  for (int m = 0; m < MR; ++m)
    for (int p = 0; p < PANELS; ++p)
      for (int n = 0; n < kPanelVectors / 2; ++n) job.store(row + m, panel + p, n * kLanes, total[m][p][n]);
}

template <CodeKind kind, int MR>
void few_panels(const Job &job, int64_t row, int64_t panel, int num_panels) {
  constexpr int kPanels = Reading<kind, MR>::kPanels;
  for (; num_panels >= kPanels; num_panels -= kPanels, panel += kPanels) few<kind, MR, kPanels>(job, row, panel);
  for (; num_panels > 0; --num_panels, ++panel) few<kind, MR, 1>(job, row, panel);
}

// A few rows with neighbouring panels.
template <CodeKind kind>
void few_rows(const Job &job, int64_t rows, int64_t panel, int num_panels) {
  for_even_parts(rows, kFewStep, [&](int64_t row, int64_t count) {
    switch (count) {
      case 1: return few_panels<kind, 1>(job, row, panel, num_panels);
      case 2: return few_panels<kind, 2>(job, row, panel, num_panels);
      case 3: return few_panels<kind, 3>(job, row, panel, num_panels);
      default: return few_panels<kind, kFewStep>(job, row, panel, num_panels);
    }
  });
}

// Rows for which codes are read into registers.
constexpr int most_few(CodeKind kind) { return kIsWide || kind == CodeKind::kInt8 ? 2 * kFewStep : kFewStep; }

// Some inputs of a block of rows, and of vectors of a panel.
struct Part {
  const float *left;     // [rows][count]
  const uint8_t *codes;  // of the vectors
  float *right;          // as float32: [count / 2][kPassItems], nibbles in their units
  int64_t panel, input, count;
  int vector;
};

// Codes of some inputs as float32, for the vectors of a pass: [inputs / 2][kPassItems], nibbles in their units.
template <CodeKind kind>
void widen(const uint8_t *codes, int64_t count, float *to) {
  if constexpr (kind == CodeKind::kInt4) {
    for (int64_t i = 0; i < count; i += 8, codes += 2 * kPairItems, to += 4 * kPassItems)
#pragma GCC unroll 4
      for (int n = 0; n < kPassVectors; ++n) {
        const I words = Lanes::words(codes + n * kLanes * 2);
        float *out = to + n * kLanes;
        Lanes::store(out, Lanes::nibble<0>(words));
        Lanes::store(out + kPassItems, Lanes::nibble<1>(words));
        Lanes::store(out + 2 * kPassItems, Lanes::nibble<2>(words));
        Lanes::store(out + 3 * kPassItems, Lanes::nibble<3>(words));
      }
  } else {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i += 2, codes += kPairItems, to += kPassItems)
#pragma GCC unroll 4
      for (int n = 0; n < kPassVectors; ++n)
        Lanes::store(to + n * kLanes, values_of<kind>(codes + n * kLanes));
  }
}

// The vectors of a pair of inputs: widened ones, or bytes, which a first pass widens for all others beside its products.
struct Widened {
  static F value(const uint8_t *, float *right) { return Lanes::load(right); }
};

struct Bytes {
  static F value(const uint8_t *codes, float *right) {
    const F value = values_of<CodeKind::kInt8>(codes);
    Lanes::store(right, value);
    return value;
  }
};

// Sums of a block of rows with a panel: of pairs in the current group, and of the groups before it.
struct Held {
  float *pairs, *groups;
};

// `MR` rows; `first_row` is the block's place among all rows.
template <class Source, int MR>
void pass(const Job &job, const Part &part, int64_t first_row, int64_t row, const Held &held) {
  float *const pairs = held.pairs + row * kPairItems + part.vector * kLanes;
  for (int64_t begin = part.input; begin < part.input + part.count;) {
    const int64_t group = begin / job.weight.group, first = group * job.weight.group;
    const int64_t last = std::min(first + job.weight.group, job.inputs), end = std::min(last, part.input + part.count);
    F sum[MR][kPassVectors];
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < kPassVectors; ++n)
        sum[m][n] = begin == first ? Lanes::set(0.0f) : Lanes::load(pairs + m * kPairItems + n * kLanes);
    const float *x = part.left + row * part.count + begin - part.input;
    float *values = part.right + (begin - part.input) / 2 * kPassItems;
    const uint8_t *codes = part.codes + (begin - part.input) * kPanel;
    for (int64_t input = begin; input < end; input += 2, x += 2, codes += kPairItems, values += kPassItems) {
      F right[kPassVectors];
#pragma GCC unroll 4
      for (int n = 0; n < kPassVectors; ++n) right[n] = Source::value(codes + n * kLanes, values + n * kLanes);
#pragma GCC unroll 6
      for (int m = 0; m < MR; ++m) {
        const F left = Lanes::pair(x + m * part.count);
#pragma GCC unroll 4
        for (int n = 0; n < kPassVectors; ++n) sum[m][n] = Lanes::fma(left, right[n], sum[m][n]);
      }
    }
    begin = end;
    if (end < last) {
#pragma GCC unroll 6
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < kPassVectors; ++n) Lanes::store(pairs + m * kPairItems + n * kLanes, sum[m][n]);
      continue;
    }
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < kPassVectors / 2; ++n) {
        const int column = (part.vector / 2 + n) * kLanes;
        float *total = held.groups + (row + m) * kPanel + column;
        const F before = first ? Lanes::load(total) : Lanes::set(0.0f);
        Lanes::store(total, job.scaled(first_row + row + m, part.panel, group, column,
                                       Lanes::sum_of_pairs(sum[m][2 * n], sum[m][2 * n + 1]), before));
      }
  }
}

template <class Source>
void pass_of(const Job &job, const Part &part, int64_t first_row, int64_t row, int64_t rows, const Held &held) {
  switch (rows) {
    case 1: return pass<Source, 1>(job, part, first_row, row, held);
    case 2: return pass<Source, 2>(job, part, first_row, row, held);
    case 3: return pass<Source, 3>(job, part, first_row, row, held);
    case 4: return pass<Source, 4>(job, part, first_row, row, held);
    case 5: return pass<Source, 5>(job, part, first_row, row, held);
    default: return pass<Source, kRowStep>(job, part, first_row, row, held);
  }
}

// Inputs of a part of a panel.
int64_t part_of(int64_t inputs) { return even_step(inputs, kPart, kDepth); }

// Some rows with a panel; `left` has a part of the inputs of all of them after the other.
void many_rows(const Job &job, const float *left, int64_t first, int64_t rows, int64_t panel) {
  static thread_local Buffer<float> buffer, widened;
  const int64_t depth = part_of(job.inputs);
  const int64_t num_passes = kPanelVectors / kPassVectors * divide_up(rows, kRowStep);
  float *right = widened.reserve(depth / 2 * kPassItems), *pairs = buffer.reserve(rows * (kPairItems + kPanel));
  const Held held{pairs, pairs + rows * kPairItems};
  for (int64_t input = 0; input < job.inputs; input += depth) {
    const int64_t count = std::min(depth, job.inputs - input);
    const uint8_t *codes = job.codes(panel, input), *next = job.codes(panel, input + count);
    const int64_t lines = count / 2 * job.bytes_per_pair() / kLine;
    int64_t place = 0;
    for (int vector = 0; vector < kPanelVectors; vector += kPassVectors) {
      const CodeKind kind = job.weight.kind;
      const uint8_t *from = codes + vector * kLanes * (kind == CodeKind::kInt4 ? 2 : 1);
      if (kind == CodeKind::kInt4) widen<CodeKind::kInt4>(from, count, right);
      if (kind == CodeKind::kFp8) widen<CodeKind::kFp8>(from, count, right);
      const Part part{left + input * rows, from, right, panel, input, count, vector};
      for_even_parts(rows, kRowStep, [&](int64_t row, int64_t number) {
        // Each pass fetches its share of the codes that come next.
        for (int64_t line = lines * place / num_passes; line < lines * (place + 1) / num_passes; ++line)
          __builtin_prefetch(next + line * kLine, 0, 2);
        ++place;
        if (kind == CodeKind::kInt8 && !row)
          pass_of<Bytes>(job, part, first, row, number, held);
        else
          pass_of<Widened>(job, part, first, row, number, held);
      });
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int column = 0; column < kPanel; column += kLanes)
      job.store(first + row, panel, column, Lanes::load(held.groups + row * kPanel + column));
}

// A block of rows as many_rows takes them, [parts][rows][inputs of a part], from the first panel on that wants them.
class LaidOut {
 public:
  explicit LaidOut(Buffer<float> &buffer) : buffer_(buffer) {}

  const float *block(const float *x, int64_t first, int64_t rows, int64_t inputs) {
    float *const block = buffer_.reserve(rows * inputs), *to = block;
    if (first_ == first) return block;
    first_ = first;
    const int64_t depth = part_of(inputs);
    for (int64_t input = 0; input < inputs; input += depth) {
      const int64_t count = std::min(depth, inputs - input);
      for (int64_t row = first; row < first + rows; ++row, to += count)
        std::copy_n(x + row * inputs + input, count, to);
    }
    return block;
  }

 private:
  Buffer<float> &buffer_;
  int64_t first_ = -1;
};

// Inputs times the units of the nibbles that they are multiplied with, which are powers of two.
const float *in_units(const float *x, int64_t count) {
  static thread_local Buffer<float> buffer;
  float *to = buffer.reserve(count);
  for (int64_t i = 0; i < count; i += 8)
    for (int j = 0; j < 8; ++j) to[i + j] = x[i + j] * Lanes::nibble_unit(j / 2);
  return to;
}

// Of each row, the sum of the inputs of each group.
void sum_groups(const float *x, const QuantisedWeight &weight, int64_t rows, int64_t inputs, float *sums,
                int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t group = 0; group < weight.groups; ++group) {
      const int64_t begin = group * weight.group, end = std::min(begin + weight.group, inputs);
      float part[8] = {};
      for (int64_t i = begin; i < end; i += 8)
        for (int lane = 0; lane < 8; ++lane) part[lane] += x[row * inputs + i + lane];
      float sum = 0;
      for (float each : part) sum += each;
      sums[row * weight.groups + group] = sum;
    }
}

}  // namespace

// As `quantised_linears` of quantised.cpp, of float32.
void quantised_linears(const float *x, const QuantisedWeight *weights, int64_t num_weights, const int *live,
                       int64_t rows, int64_t inputs, int num_threads) {
  if (live && rows == live[0] && live[1] < rows) {
    for (const QuantisedWeight *weight = weights; weight < weights + num_weights; ++weight) {
      float *y = (float *)weight->y;
      std::fill(y + live[1] * weight->outputs, y + rows * weight->outputs, 0.0f);
    }
    rows = live[1];
  }
  if (!rows) return;
  const float *in_unit = nullptr;
  std::vector<Job> jobs;
  std::vector<int64_t> ends;  // units of panels up to the end of each weight
  std::vector<std::vector<float>> sums(num_weights);
  int64_t panels = 0, units = 0;
  for (int64_t n = 0; n < num_weights; ++n) panels += divide_up(weights[n].outputs, kPanel);
  // A few rows read four panels at a time; larger units leave threads with less equal shares.
  const int64_t unit_panels = rows <= 2 * kFewStep && panels >= 8 * num_threads ? 4 : 2;
  for (int64_t n = 0; n < num_weights; ++n) {
    if (weights[n].zeros) {
      sums[n].resize(rows * weights[n].groups);
      sum_groups(x, weights[n], rows, inputs, sums[n].data(), num_threads);
    }
    const bool has_units = Lanes::nibble_unit(1) != 1.0f && weights[n].kind == CodeKind::kInt4;
    if (has_units && !in_unit) in_unit = in_units(x, rows * inputs);
    jobs.push_back({has_units ? in_unit : x, sums[n].data(), weights[n], inputs});
    ends.push_back(units += divide_up(weights[n].outputs, unit_panels * kPanel));
  }
  const int64_t step = even_step(rows, kRowBlock, 6), blocks = divide_up(rows, step);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    static thread_local Buffer<float> plain_buffer, unit_buffer;
    LaidOut plain(plain_buffer), in_units(unit_buffer);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < blocks * units; ++item) {
      const int64_t unit = item % units, first = item / units * step, count = std::min(step, rows - first);
      const size_t n = std::upper_bound(ends.begin(), ends.end(), unit) - ends.begin();
      const int64_t panel = (unit - (n ? ends[n - 1] : 0)) * unit_panels;
      const int num_panels = (int)std::min(unit_panels, divide_up(weights[n].outputs, kPanel) - panel);
      if (rows <= most_few(weights[n].kind)) {
        switch (weights[n].kind) {
          case CodeKind::kInt8: few_rows<CodeKind::kInt8>(jobs[n], rows, panel, num_panels); break;
          case CodeKind::kFp8: few_rows<CodeKind::kFp8>(jobs[n], rows, panel, num_panels); break;
          default: few_rows<CodeKind::kInt4>(jobs[n], rows, panel, num_panels);
        }
        continue;
      }
      const float *left = (jobs[n].x == x ? plain : in_units).block(jobs[n].x, first, count, inputs);
      for (int p = 0; p < num_panels; ++p) many_rows(jobs[n], left, first, count, panel + p);
    }
  }
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
