// Products of float32 rows with a weight of fp8 codes (e4m3), which is read as it is stored; quantised.cpp explains
// its panels.
//
// Codes are widened by their bits alone, to 2^-120 of what they are: rows are multiplied with a power of 2 before, for
// their sums not to be denormal, and sums of a group of inputs with another one. Both are exact. A few rows read codes
// into registers. More rows read some inputs at a time as float32, from the first cache, and are laid out once for all
// panels: rows of a large power of two would take one another's place there. Inputs are added one by one in their
// order, whatever the number of rows and lanes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "code_panels.h"
#include "float_kernels.h"
#include "float_tile.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int kUnitCodes = 2 * kTileColumns;       // of a pair of inputs, that are widened together
constexpr int kUnits = kPanel / kTileColumns;      // of a panel
constexpr int64_t kPart = 256;                     // inputs for which codes are widened at a time
constexpr int kLines = kDepth * kPanel / kLine;    // of some inputs of a panel
constexpr int kTurn = 8;                           // inputs of them at once
constexpr int64_t kMostFew = 3 * kRowStep;         // rows for which they are read into registers

// Rows times a power of 2: [parts][rows][inputs of a part], and what their sums are multiplied with.
struct Rows {
  const float *x, *scales;
  int64_t first, count, depth;
};

class ScaledRows {
 public:
  ScaledRows(const float *x, int64_t inputs, int64_t depth) : x_(x), inputs_(inputs), depth_(depth) {}

  // A block, from the first panel on that wants it so.
  Rows block(int64_t first, int64_t count) {
    static thread_local Buffer<float> buffer, powers;
    float *const block = buffer.reserve(count * inputs_), *const scales = powers.reserve(count);
    if (first_ != first)
      for (int64_t row = 0; row < count; ++row) scales[row] = scale(first + row, row, count, block);
    first_ = first;
    return {block, scales, first, count, depth_};
  }

 private:
  float scale(int64_t row, int64_t place, int64_t count, float *block) const {
    const float *x = x_ + row * inputs_;
    const float largest = largest_of(x, inputs_);
    const bool is_any = std::isfinite(largest) && largest > 0.0f;
    const int power = is_any ? std::clamp(100 - std::ilogb(largest), Lanes::kFp8Power - 127, 127) : 0;
    const F factor = Lanes::set(std::ldexp(1.0f, power));
    for (int64_t input = 0; input < inputs_; input += depth_) {
      const int64_t size = std::min(depth_, inputs_ - input);
      float *to = block + input * count + place * size;
      for (int64_t i = 0; i < size; i += kLanes) Lanes::store(to + i, Lanes::mul(Lanes::load(x + input + i), factor));
    }
    return std::ldexp(1.0f, Lanes::kFp8Power - power);
  }

  const float *x_;
  int64_t inputs_, depth_, first_ = -1;
};

struct Job {
  Panels panels;
  Rows rows;

  // Adds the sums of a row over a group to those of groups before it, of a unit of outputs.
  void add_group(int64_t row, int64_t panel, int64_t group, int unit, F (&sum)[kWide], float *totals) const {
    Lanes::interleaved(sum);
    const F factor = Lanes::set(rows.scales[row]);
#pragma GCC unroll 2
    for (int n = 0; n < kWide; ++n) {
      const int column = unit * kTileColumns + n * kLanes;
      const F scale = panels.scale(panels.place(panel, group, column));
      Lanes::store(totals + column, Lanes::fma(Lanes::mul(sum[n], factor), scale, Lanes::load(totals + column)));
    }
  }
  void store(int64_t row, int64_t panel, const float *totals) const {
    for (int column = 0; column < kPanel; column += kLanes)
      panels.store(rows.first + row, panel, column, Lanes::load(totals + column));
  }
};

// Panels that a pass of few rows reads side by side: a CPU fetches several sequential streams on its own, faster than
// one whose lines are prefetched.
constexpr int streams_of(int rows) { return rows == 1 ? 4 : rows == 2 || kIsWide ? 2 : 1; }

// Adds an input of a unit, whose sums begin at vector `first`.
template <int MR, int NV>
inline __attribute__((always_inline)) void add_input(const float *x, int64_t stride, const F (&values)[kWide],
                                                     int first, F (&sum)[MR][NV]) {
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) {
    asm volatile("" : "+r"(x));  // numbers read earlier would take registers that sums need
    const F left = Lanes::set(x[m * stride]);
#pragma GCC unroll 2
    for (int n = 0; n < kWide; ++n) sum[m][first + n] = Lanes::fma(left, values[n], sum[m][first + n]);
  }
}

// `MR` rows of a block of one part with neighbouring panels.
template <int MR, int PANELS>
__attribute__((noinline)) void few(const Job &job, int64_t row, int64_t panel) {
  constexpr int NV = kWide * PANELS;
  const Panels &panels = job.panels;
  const int64_t panel_bytes = panels.inputs * kPanel, stride = panels.inputs;
  alignas(kLine) float totals[MR][PANELS][kPanel] = {};
  for (int64_t group = 0; group < panels.weight.groups; ++group) {
    const int64_t begin = group * panels.weight.group, end = std::min(begin + panels.weight.group, panels.inputs);
    F sums[kUnits][MR][NV];
    for (auto &unit_sums : sums)
      for (auto &row_sums : unit_sums)
        for (F &each : row_sums) each = Lanes::set(0.0f);
    for (int64_t first = begin; first < end; first += kDepth)
      for (int unit = 0; unit < kUnits; ++unit) {
        F sum[MR][NV];
#pragma GCC unroll 6
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
          for (int n = 0; n < NV; ++n) sum[m][n] = sums[unit][m][n];
        const uint8_t *codes = panels.codes(panel, first) + unit * kUnitCodes;
        const float *x = job.rows.x + row * stride + first;
        for (int input = 0; input < kDepth; input += 2, x += 2, codes += kPairCodes) {
          if (PANELS == 1 && unit == 0) __builtin_prefetch(codes + 2048, 0, 3);
#pragma GCC unroll 4
          for (int p = 0; p < PANELS; ++p) {
            F values[kWide];
            Lanes::fp8<0>(codes + p * panel_bytes, values);
            add_input(x, stride, values, kWide * p, sum);
            Lanes::fp8<1>(codes + p * panel_bytes, values);
            add_input(x + 1, stride, values, kWide * p, sum);
          }
        }
#pragma GCC unroll 6
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
          for (int n = 0; n < NV; ++n) sums[unit][m][n] = sum[m][n];
      }
    for (int m = 0; m < MR; ++m)
      for (int p = 0; p < PANELS; ++p)
        for (int unit = 0; unit < kUnits; ++unit) {
          F both[kWide] = {sums[unit][m][kWide * p], sums[unit][m][kWide * p + 1]};
          job.add_group(row + m, panel + p, group, unit, both, totals[m][p]);
        }
  }
  for (int m = 0; m < MR; ++m)
    for (int p = 0; p < PANELS; ++p) job.store(row + m, panel + p, totals[m][p]);
}

template <int MR>
void few_panels(const Job &job, int64_t row, int64_t panel, int num_panels) {
  constexpr int kPanels = streams_of(MR);
  for (; num_panels >= kPanels; num_panels -= kPanels, panel += kPanels) few<MR, kPanels>(job, row, panel);
  for (; num_panels > 0; --num_panels, ++panel) few<MR, 1>(job, row, panel);
}

// A few rows with neighbouring panels.
void few_rows(const Job &job, const Share &share) {
  for_even_parts(share.rows, kRowStep, [&](int64_t row, int64_t count) {
    with_rows<kRowStep>((int)count,
                        [&](auto number) { few_panels<number>(job, row, share.panel, share.num_panels); });
  });
}

// Some inputs of a unit of outputs.
struct Part {
  const uint8_t *codes, *next;  // of the unit, and of the panel's inputs that come next
  int fetch, stop;              // lines of each kDepth of these, that are fetched meanwhile
  float *values;  // the same as float32, from the first pass on: [count][kTileColumns]
  int64_t panel, input, count;
  int unit;
  float *sums, *totals;  // of the current group, and of the groups before it: [rows][kPanel]
};

// Codes of kTurn inputs as float32.
void widen(const uint8_t *codes, float *to) {
#pragma GCC unroll 8
  for (int i = 0; i < kTurn; i += 2, codes += kPairCodes, to += 2 * kTileColumns) {
    F even[kWide], odd[kWide];
    Lanes::fp8<0>(codes, even);
    Lanes::fp8<1>(codes, odd);
#pragma GCC unroll 2
    for (int n = 0; n < kWide; ++n) {
      Lanes::store(to + n * kLanes, even[n]);
      Lanes::store(to + kTileColumns + n * kLanes, odd[n]);
    }
  }
}

// `MR` rows. The first pass widens codes, some at a time, while products of those before them are under way.
template <int MR, bool IS_FIRST>
__attribute__((noinline)) void pass(const Job &job, const Part &part, int64_t row) {
  const int64_t group_size = job.panels.weight.group, part_end = part.input + part.count;
  const float *x = job.rows.x + part.input * job.rows.count + row * part.count;
  const uint8_t *const codes = part.codes;
  float *values = part.values;
  float *const sums = part.sums + row * kPanel + part.unit * kTileColumns;
  for (int64_t begin = part.input, end; begin < part_end; begin = end) {
    const int64_t group = begin / group_size, first = group * group_size;
    const int64_t last = std::min(first + group_size, job.panels.inputs);
    end = std::min(last, part_end);
    F sum[MR][kWide];
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < kWide; ++n)
        sum[m][n] = begin == first ? Lanes::set(0.0f) : Lanes::load(sums + m * kPanel + n * kLanes);
    int depth = IS_FIRST ? kTurn : kDepth;
    asm volatile("" : "+r"(depth));  // not unrolled: sums would leave their registers
    for (int64_t input = begin; input < end; input += kDepth) {
      for (int line = part.fetch; line < part.stop; ++line)
        __builtin_prefetch(part.next + (input - part.input) * kPanel + line * kLine, 0, 2);
      for (int turn = 0; turn < kDepth; turn += depth, x += depth, values += depth * kTileColumns) {
        if constexpr (IS_FIRST) widen(codes + (input + turn - part.input) / 2 * kPairCodes, values);
        add_products<MR>(x, part.count, 1, values, kTileColumns, depth, sum);
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) {
      if (end == last) {
        job.add_group(row + m, part.panel, group, part.unit, sum[m], part.totals + (row + m) * kPanel);
        continue;
      }
#pragma GCC unroll 2
      for (int n = 0; n < kWide; ++n) Lanes::store(sums + m * kPanel + n * kLanes, sum[m][n]);
    }
  }
}

// A block of rows with a panel.
void many_rows(const Job &job, int64_t panel) {
  static thread_local Buffer<float> buffer, widened;
  const Panels &panels = job.panels;
  const int64_t rows = job.rows.count, num_passes = kUnits * divide_up(rows, kTileRows);
  float *const values = widened.reserve(job.rows.depth * kTileColumns);
  float *const sums = buffer.reserve(2 * rows * kPanel), *const totals = sums + rows * kPanel;
  std::fill_n(totals, rows * kPanel, 0.0f);
  for (int64_t input = 0; input < panels.inputs; input += job.rows.depth) {
    const int64_t count = std::min(job.rows.depth, panels.inputs - input);
    const uint8_t *codes = panels.codes(panel, input), *next = panels.codes(panel, input + count);
    int64_t place = 0;
    for (int unit = 0; unit < kUnits; ++unit) {
      Part part{codes + unit * kUnitCodes, next, 0, 0, values, panel, input, count, unit, sums, totals};
      for_even_parts(rows, kTileRows, [&](int64_t row, int64_t number) {
        part.fetch = (int)(kLines * place / num_passes), part.stop = (int)(kLines * (place + 1) / num_passes);
        ++place;
        with_rows<kTileRows>((int)number, [&](auto constant) {
          row ? pass<constant, false>(job, part, row) : pass<constant, true>(job, part, row);
        });
      });
    }
  }
  for (int64_t row = 0; row < rows; ++row) job.store(row, panel, totals + row * kPanel);
}

}  // namespace

void fp8_linears(const float *x, const std::vector<QuantisedWeight> &weights, int64_t rows, int64_t inputs,
                 int num_threads) {
  const bool is_few = rows <= kMostFew;
  const int64_t depth = is_few ? inputs : even_step(inputs, kPart, kDepth);
  for_shares(weights, rows, num_threads, [&] {
    return [&, scaled = ScaledRows(x, inputs, depth)](const Share &share) mutable {
      const Job job{{weights[share.weight], inputs}, scaled.block(share.first, share.rows)};
      if (is_few) return few_rows(job, share);
      for (int p = 0; p < share.num_panels; ++p) many_rows(job, share.panel + p);
    };
  });
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
