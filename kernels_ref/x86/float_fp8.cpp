// Products of float32 rows with a weight of fp8 codes (e4m3), which is read as it is stored; quantised.cpp explains
// its panels.
//
// A vector has pairs of inputs for half as many outputs, and so have its sums: pairs are added at the end of a
// group. A few rows read codes once, into registers. More rows read some codes at a time as float32, from the first
// cache, and are laid out once for all panels: rows of a large power of two would take one another's place there.
// Rows of either kind have the same bits in any number of lanes.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "code_panels.h"
#include "float_kernels.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int kPanelVectors = kPairCodes / kLanes;   // of a pair of inputs
constexpr int kPassVectors = kIsWide ? 4 : 2;        // of a pass over widened codes,
constexpr int kPassItems = kPassVectors * kLanes;    // and its numbers, for a pair of inputs
constexpr int64_t kPart = kIsWide ? 256 : 512;       // inputs for which codes are widened at a time
// Rows for which they are read into registers.
constexpr int64_t kMostFew = kIsWide ? 2 * kFewStep : kFewStep;

struct Job {
  const float *x;
  Panels panels;

  // Sums of all groups, after one more; `column` is of the panel.
  F scaled(int64_t panel, int64_t group, int column, F sum, F total) const {
    return Lanes::fma(sum, panels.scale(panels.place(panel, group, column)), total);
  }
};

F values_of(const uint8_t *codes) { return Lanes::fp8(Lanes::bytes(codes)); }

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

// How a pass of `MR` rows reads codes. A CPU fetches several sequential streams on its own, faster than one whose
// lines are prefetched, so eight lanes read several panels side by side. One row is bound by the instructions that
// widen codes, and sixteen lanes have registers for a whole panel: these prefetch.
template <int MR>
struct Reading {
  static constexpr bool kPrefetches = kIsWide || MR == 1;
  static constexpr int kPanels = kPrefetches ? (kIsWide && MR == 1 ? 2 : 1) : MR == 4 ? 2 : 4;  // side by side
  static constexpr int kVectors = MR == 1 ? 8 : MR == 4 && !kIsWide ? 2 : 4;  // whose sums are in registers
  static constexpr int64_t kInputs = kPrefetches ? 1 << 30 : kDepth;  // which all vectors of a panel meet in turn
};

// `MR` rows with neighbouring panels.
template <int MR, int PANELS>
__attribute__((noinline)) void few(const Job &job, int64_t row, int64_t panel) {
  using Way = Reading<MR>;
  constexpr int kVectors = Way::kVectors;
  constexpr int kTurn = std::min(kVectors / PANELS, kPanelVectors), kTurns = kPanelVectors / kTurn;  // of each panel
  constexpr int NV = kTurn * PANELS;
  const Panels &panels = job.panels;
  const int64_t panel_bytes = panels.inputs * kPanel;
  F total[MR][PANELS][kPanelVectors / 2];
  for (auto &row_totals : total)
    for (auto &panel_totals : row_totals)
      for (F &each : panel_totals) each = Lanes::set(0.0f);
  for (int64_t group = 0; group < panels.weight.groups; ++group) {
    const int64_t begin = group * panels.weight.group, end = std::min(begin + panels.weight.group, panels.inputs);
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
          from[n] = panels.codes(panel, first) + n / kTurn * panel_bytes + (turn * kTurn + n % kTurn) * kLanes;
        const float *x = job.x + row * panels.inputs + first;
        for (int64_t input = first; input < last; input += 2, x += 2) {
          if (Way::kPrefetches && turn == 0)
#pragma GCC unroll 8
            for (int n = 0; n < NV; n += kTurn) __builtin_prefetch(from[n] + 2048, 0, 3);
          add_pair(x, panels.inputs, sum, [&](int n) { return values_of(from[n]); });
#pragma GCC unroll 8
          for (int n = 0; n < NV; ++n) from[n] += kPairCodes;
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
          total[m][p][n / 2] = job.scaled(panel + p, group, n / 2 * kLanes,
                                          Lanes::sum_of_pairs(sum_of(n), sum_of(n + 1)), total[m][p][n / 2]);
        }
  }
  for (int m = 0; m < MR; ++m)
    for (int p = 0; p < PANELS; ++p)
      for (int n = 0; n < kPanelVectors / 2; ++n) panels.store(row + m, panel + p, n * kLanes, total[m][p][n]);
}

template <int MR>
void few_panels(const Job &job, int64_t row, int64_t panel, int num_panels) {
  constexpr int kPanels = Reading<MR>::kPanels;
  for (; num_panels >= kPanels; num_panels -= kPanels, panel += kPanels) few<MR, kPanels>(job, row, panel);
  for (; num_panels > 0; --num_panels, ++panel) few<MR, 1>(job, row, panel);
}

// A few rows with neighbouring panels.
void few_rows(const Job &job, const Share &share) {
  for_even_parts(share.rows, kFewStep, [&](int64_t row, int64_t count) {
    switch (count) {
      case 1: return few_panels<1>(job, row, share.panel, share.num_panels);
      case 2: return few_panels<2>(job, row, share.panel, share.num_panels);
      case 3: return few_panels<3>(job, row, share.panel, share.num_panels);
      default: return few_panels<kFewStep>(job, row, share.panel, share.num_panels);
    }
  });
}

// Some inputs of a block of rows, and of vectors of a panel.
struct Part {
  const float *left;   // [rows][count]
  const float *right;  // widened codes: [count / 2][kPassItems]
  int64_t panel, input, count;
  int vector;
};

// Codes of some inputs as float32, for the vectors of a pass: [inputs / 2][kPassItems].
void widen(const uint8_t *codes, int64_t count, float *to) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < count; i += 2, codes += kPairCodes, to += kPassItems)
#pragma GCC unroll 4
    for (int n = 0; n < kPassVectors; ++n) Lanes::store(to + n * kLanes, values_of(codes + n * kLanes));
}

// Sums of a block of rows with a panel: of pairs in the current group, and of the groups before it.
struct Held {
  float *pairs, *groups;
};

// `MR` rows.
template <int MR>
__attribute__((noinline)) void pass(const Job &job, const Part &part, int64_t row, const Held &held) {
  const QuantisedWeight &weight = job.panels.weight;
  float *const pairs = held.pairs + row * kPairCodes + part.vector * kLanes;
  for (int64_t begin = part.input; begin < part.input + part.count;) {
    const int64_t group = begin / weight.group, first = group * weight.group;
    const int64_t last = std::min(first + weight.group, job.panels.inputs);
    const int64_t end = std::min(last, part.input + part.count);
    F sum[MR][kPassVectors];
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < kPassVectors; ++n)
        sum[m][n] = begin == first ? Lanes::set(0.0f) : Lanes::load(pairs + m * kPairCodes + n * kLanes);
    const float *x = part.left + row * part.count + begin - part.input;
    const float *values = part.right + (begin - part.input) / 2 * kPassItems;
    for (int64_t input = begin; input < end; input += 2, x += 2, values += kPassItems) {
      F right[kPassVectors];
#pragma GCC unroll 4
      for (int n = 0; n < kPassVectors; ++n) right[n] = Lanes::load(values + n * kLanes);
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
        for (int n = 0; n < kPassVectors; ++n) Lanes::store(pairs + m * kPairCodes + n * kLanes, sum[m][n]);
      continue;
    }
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < kPassVectors / 2; ++n) {
        const int column = (part.vector / 2 + n) * kLanes;
        float *total = held.groups + (row + m) * kPanel + column;
        const F before = first ? Lanes::load(total) : Lanes::set(0.0f);
        Lanes::store(total, job.scaled(part.panel, group, column,
                                       Lanes::sum_of_pairs(sum[m][2 * n], sum[m][2 * n + 1]), before));
      }
  }
}

void pass_of(const Job &job, const Part &part, int64_t row, int64_t rows, const Held &held) {
  switch (rows) {
    case 1: return pass<1>(job, part, row, held);
    case 2: return pass<2>(job, part, row, held);
    case 3: return pass<3>(job, part, row, held);
    case 4: return pass<4>(job, part, row, held);
    case 5: return pass<5>(job, part, row, held);
    default: return pass<kRowStep>(job, part, row, held);
  }
}

// Inputs of a part of a panel.
int64_t part_of(int64_t inputs) { return even_step(inputs, kPart, kDepth); }

// Some rows with a panel; `left` has a part of the inputs of all of them after the other.
void many_rows(const Job &job, const float *left, int64_t first, int64_t rows, int64_t panel) {
  static thread_local Buffer<float> buffer, widened;
  const Panels &panels = job.panels;
  const int64_t depth = part_of(panels.inputs);
  const int64_t num_passes = kPanelVectors / kPassVectors * divide_up(rows, kRowStep);
  float *right = widened.reserve(depth / 2 * kPassItems);
  float *pairs = buffer.reserve(rows * (kPairCodes + kPanel));
  const Held held{pairs, pairs + rows * kPairCodes};
  for (int64_t input = 0; input < panels.inputs; input += depth) {
    const int64_t count = std::min(depth, panels.inputs - input);
    const uint8_t *codes = panels.codes(panel, input), *next = panels.codes(panel, input + count);
    const int64_t lines = count * kPanel / kLine;
    int64_t place = 0;
    for (int vector = 0; vector < kPanelVectors; vector += kPassVectors) {
      widen(codes + vector * kLanes, count, right);
      const Part part{left + input * rows, right, panel, input, count, vector};
      for_even_parts(rows, kRowStep, [&](int64_t row, int64_t number) {
        // Each pass fetches its share of the codes that come next.
        for (int64_t line = lines * place / num_passes; line < lines * (place + 1) / num_passes; ++line)
          __builtin_prefetch(next + line * kLine, 0, 2);
        ++place;
        pass_of(job, part, row, number, held);
      });
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int column = 0; column < kPanel; column += kLanes)
      panels.store(first + row, panel, column, Lanes::load(held.groups + row * kPanel + column));
}

// A block of rows as many_rows takes them, [parts][rows][inputs of a part], from the first panel on that wants it.
class LaidOut {
 public:
  LaidOut(const float *x, int64_t inputs) : x_(x), inputs_(inputs) {}

  const float *block(int64_t first, int64_t rows) {
    static thread_local Buffer<float> buffer;
    float *const block = buffer.reserve(rows * inputs_), *to = block;
    if (first_ == first) return block;
    first_ = first;
    const int64_t depth = part_of(inputs_);
    for (int64_t input = 0; input < inputs_; input += depth) {
      const int64_t count = std::min(depth, inputs_ - input);
      for (int64_t row = first; row < first + rows; ++row, to += count)
        std::copy_n(x_ + row * inputs_ + input, count, to);
    }
    return block;
  }

 private:
  const float *x_;
  int64_t inputs_, first_ = -1;
};

}  // namespace

void fp8_linears(const float *x, const std::vector<QuantisedWeight> &weights, int64_t rows, int64_t inputs,
                 int num_threads) {
  for_shares(weights, rows, num_threads, [&] {
    return [&, laid_out = LaidOut(x, inputs)](const Share &share) mutable {
      const Job job{x, {weights[share.weight], inputs}};
      if (rows <= kMostFew) return few_rows(job, share);
      const float *left = laid_out.block(share.first, share.rows);
      for (int p = 0; p < share.num_panels; ++p) many_rows(job, left, share.first, share.rows, share.panel + p);
    };
  });
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
