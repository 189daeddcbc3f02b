// Products of float32 rows with a weight that is packed once, in 16 or 32 bits, and widened as it is read.
//
// Panels are those of panels.h for bfloat16. For other numbers, tiles have a row of 16 outputs for each input:
// [outputs / 32][inputs / 32][2][32][16]. Few rows read the weight from where it lies, and are as fast as memory. For
// more rows some inputs of a panel are widened at a time, and multiplied with a block of rows from the second-level
// cache. Whatever the number of rows and lanes, inputs are added one by one in their order.

#include <algorithm>
#include <cstdint>

#include "blocks.h"
#include "float_kernels.h"
#include "float_tile.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int kPanel = 32, kDepth = 32, kHalf = 16;  // outputs and inputs of a step of a panel; outputs of a tile
constexpr int kTileItems = kDepth * kHalf, kStepItems = 2 * kTileItems;
constexpr int kTileVectors = kHalf / kLanes;    // of an input, or of a pair
constexpr int kLine = 64;                       // bytes
constexpr int64_t kMostDirect = 6 * kTileRows;  // rows that read the weight as it lies
constexpr int64_t kMaxRows = 240;               // of a block
constexpr int64_t kPart = 512;                  // inputs of a panel that stay in a cache
constexpr int64_t kDirectInputs = 2048;         // of a part of a panel, times the passes over it
constexpr int64_t kAhead = 8;                   // steps of a tile between what a single pass reads and what it fetches

// Where sums of some rows and neighbouring outputs go; they continue what is there unless inputs are the first.
struct Sums {
  float *y;  // of the first row and output
  int64_t stride, columns;
  const float *bias;  // of the first output, or null
  bool is_first, is_last;

  F begin(int64_t row, int64_t column) const {
    if (is_first || column >= columns) return Lanes::set(0.0f);
    const float *from = y + row * stride + column;
    return column + kLanes <= columns ? Lanes::load(from) : Lanes::load(from, Lanes::first((int)(columns - column)));
  }
  void end(int64_t row, int64_t column, F sum) const {
    if (column >= columns) return;
    if (is_last && bias) sum = Lanes::add(sum, Lanes::load(bias + column));
    float *to = y + row * stride + column;
    if (column + kLanes <= columns)
      Lanes::store(to, sum);
    else
      Lanes::store(to, sum, Lanes::first((int)(columns - column)));
  }
};

// The first or second input of a pair, of the vector of a tile from `column` on.
template <class Stored, int ODD>
inline F widened(const typename Stored::Item *tile, int pair, int column) {
  if constexpr (Stored::kPair == 1) return Stored::load(tile + (2 * pair + ODD) * kHalf + column);
  else if constexpr (ODD) return Lanes::odd(tile + (pair * kHalf + column) * 2);
  else return Lanes::even(tile + (pair * kHalf + column) * 2);
}

// Some inputs of neighbouring tiles, and what is fetched meanwhile: lines [fetch, stop) of each step of a panel that lies
// `ahead` items behind.
template <class Stored>
struct Part {
  const float *x;
  int64_t x_stride;
  const typename Stored::Item *weight;  // the panel of the first tile
  int64_t panel_items, ahead;
  int inputs, first_tile, fetch, stop;
};

// Lines of a step of a panel.
template <class Stored>
constexpr int lines_of() {
  return kStepItems * (int)sizeof(typename Stored::Item) / kLine;
}

// Fetches lines of a step of a panel, into the first cache or the second.
template <int LEVEL>
inline __attribute__((always_inline)) void prefetch(const void *step, int first, int stop) {
#pragma GCC unroll 4
  for (int line = first; line < stop; ++line) __builtin_prefetch((const char *)step + line * kLine, 0, LEVEL);
}

// Adds one input of all rows and tiles, of which VECTORS are taken.
template <class Stored, int ODD, int ROWS, int TILES, int VECTORS = kTileVectors>
inline __attribute__((always_inline)) void add_input(const typename Stored::Item *const (&tiles)[TILES], int pair,
                                                     const float *x, int64_t x_stride,
                                                     F (&sum)[ROWS][TILES * VECTORS]) {
  constexpr int kVectors = TILES * VECTORS;
  F right[kVectors];
#pragma GCC unroll 8
  for (int n = 0; n < kVectors; ++n)
    right[n] = widened<Stored, ODD>(tiles[n / VECTORS], pair, n % VECTORS * kLanes);
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; ++m) {
    const F left = Lanes::set(x[m * x_stride + 2 * pair + ODD]);
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) sum[m][n] = Lanes::fma(left, right[n], sum[m][n]);
  }
}

// ROWS rows with TILES tiles, two of each panel, or one. A single pass fetches all lines, each pair its share and in the order of
// memory: bursts of lines, or lines of two tiles in turn, take up to twice as long. Inlined, sums leave their registers.
template <class Stored, int ROWS, int TILES, bool IS_SINGLE>
__attribute__((noinline)) void multiply_tiles(const Part<Stored> &part, int64_t row, const Sums &out) {
  constexpr int kVectors = TILES * kTileVectors, kPairLines = lines_of<Stored>() / (TILES == 1 ? kDepth : kDepth / 2);
  const float *x = part.x + row * part.x_stride;
  const typename Stored::Item *tiles[TILES];
#pragma GCC unroll 8
  for (int t = 0; t < TILES; ++t) {
    const int tile = part.first_tile + t;
    tiles[t] = part.weight + tile / 2 * part.panel_items + tile % 2 * kTileItems;
  }
  F sum[ROWS][kVectors];
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) sum[m][n] = out.begin(row + m, part.first_tile * kHalf + n * kLanes);
  for (int i = 0; i < part.inputs; i += kDepth, x += kDepth) {
    if (!IS_SINGLE) prefetch<2>(tiles[0] - part.first_tile % 2 * kTileItems + part.ahead, part.fetch, part.stop);
    for (int pair = 0; pair < kDepth / 2; ++pair) {
#pragma GCC unroll 2
      for (int t = 0; IS_SINGLE && t < TILES; t += 2)
        prefetch<3>(tiles[t] + part.ahead, pair * kPairLines, (pair + 1) * kPairLines);
      add_input<Stored, 0>(tiles, pair, x, part.x_stride, sum);
      add_input<Stored, 1>(tiles, pair, x, part.x_stride, sum);
    }
#pragma GCC unroll 8
    for (int t = 0; t < TILES; ++t) tiles[t] += kStepItems;
  }
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) out.end(row + m, part.first_tile * kHalf + n * kLanes, sum[m][n]);
}

// Panels that a single pass in eight lanes reads side by side, without prefetches: a CPU fetches several sequential streams
// on its own, faster than one whose lines are prefetched. More streams would need more
// registers. Sixteen lanes prefetch.
constexpr int streams_of(int rows) {
  return Lanes::kRegisters == 32 ? 0 : rows < 3 ? 4 : rows == 3 ? 3 : 2;
}

constexpr int kMostStreamed = Lanes::kRegisters == 32 ? 0 : 10;  // rows of a single pass over two panels

// Adds a step of PANELS panels to the sums of ROWS rows and VECTORS vectors of each panel.
template <class Stored, int ROWS, int PANELS, int VECTORS>
inline __attribute__((always_inline)) void add_step(const typename Stored::Item *const (&tiles)[PANELS], const float *x,
                                                    int64_t x_stride, F (*sums)[PANELS * VECTORS]) {
  F sum[ROWS][PANELS * VECTORS];
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < PANELS * VECTORS; ++n) sum[m][n] = sums[m][n];
  for (int pair = 0; pair < kDepth / 2; ++pair) {
    add_input<Stored, 0, ROWS, PANELS, VECTORS>(tiles, pair, x, x_stride, sum);
    add_input<Stored, 1, ROWS, PANELS, VECTORS>(tiles, pair, x, x_stride, sum);
  }
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < PANELS * VECTORS; ++n) sums[m][n] = sum[m][n];
}

// ROWS rows with all outputs of PANELS panels. During a step, registers have the sums of one tile of each panel, or of a
// vector of it, for all rows or for one half after the other.
template <class Stored, int ROWS, int PANELS>
__attribute__((noinline)) void multiply_streams(const Part<Stored> &part, int64_t row, const Sums &out) {
  constexpr int kTurnVectors = ROWS == 1 ? kTileVectors : 1;  // of each panel
  constexpr int kTurns = 2 * kTileVectors / kTurnVectors, kVectors = PANELS * kTurnVectors;
  constexpr int kFirst = ROWS > kTileRows ? (ROWS + 1) / 2 : ROWS;
  const float *x = part.x + row * part.x_stride;
  const typename Stored::Item *step = part.weight + part.first_tile / 2 * part.panel_items;
  F sums[kTurns][ROWS][kVectors];
  const auto for_sums = [&](const auto &function) {
    for (int turn = 0; turn < kTurns; ++turn)
      for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < kVectors; ++n) {
          const int panel = part.first_tile / 2 + n / kTurnVectors;
          const int column = (turn * kTurnVectors + n % kTurnVectors) * kLanes;
          function(row + m, panel * kPanel + column, sums[turn][m][n]);
        }
  };
  for_sums([&](int64_t m, int64_t column, F &sum) { sum = out.begin(m, column); });
  for (int i = 0; i < part.inputs; i += kDepth, x += kDepth, step += kStepItems) {
    for (int turn = 0; turn < kTurns; ++turn) {
      const int column = turn * kTurnVectors * kLanes;  // of a panel
      const typename Stored::Item *tiles[PANELS];
#pragma GCC unroll 4
      for (int t = 0; t < PANELS; ++t)
        tiles[t] = step + t * part.panel_items + column / kHalf * kTileItems + column % kHalf * Stored::kPair;
      add_step<Stored, kFirst, PANELS, kTurnVectors>(tiles, x, part.x_stride, sums[turn]);
      if constexpr (kFirst < ROWS)
        add_step<Stored, ROWS - kFirst, PANELS, kTurnVectors>(tiles, x + kFirst * part.x_stride, part.x_stride,
                                                              sums[turn] + kFirst);
    }
  }
  for_sums([&](int64_t m, int64_t column, F &sum) { out.end(m, column, sum); });
}

constexpr int kLeastTiles = kWide / kTileVectors;  // of the most rows of a pass

// How many tiles a pass takes: a panel, if there are registers for it, and four sums at least.
constexpr int tiles_of(int rows) {
  return rows == 1 ? 4 / kTileVectors : (rows + 1) * 2 * kTileVectors < Lanes::kRegisters ? 2 : kLeastTiles;
}

template <class Stored>
class DirectProduct {
 public:
  // Rows with the panels [begin, end) of a weight of `inputs` inputs.
  static void multiply(const float *x, int64_t rows, int64_t inputs, const typename Stored::Item *weight,
                       int64_t panels, Sums out) {
    if (rows <= kTileRows) {
      const int64_t ahead = kAhead / std::min(tiles_of((int)rows), 2) * kStepItems;
      const Part<Stored> part{x, inputs, weight, inputs * kPanel, ahead, (int)inputs, 0, 0, 0};
      return with_rows<kTileRows>((int)rows,
                                  [&](auto count) { multiply_rows<count, true>(part, 0, 2 * panels, out); });
    }
    int64_t panel = 0;
    if constexpr (kMostStreamed > kTileRows)
      if (rows <= kMostStreamed) {
        Part<Stored> part{x, inputs, weight, inputs * kPanel, 0, (int)inputs, 0, 0, 0};
        with_rows<kMostStreamed>((int)rows, [&](auto count) {
          if constexpr (count > kTileRows)
            for (; panel + 2 <= panels; panel += 2, part.first_tile += 4)
              multiply_streams<Stored, count, 2>(part, 0, out);
        });
      }
    constexpr int lines = lines_of<Stored>();
    const int64_t passes = divide_up(rows, kTileRows);
    const int64_t depth = even_step(inputs, std::max(kPart, kDirectInputs / passes), kDepth);
    for (; panel < panels; ++panel) {
      for (int64_t input = 0; input < inputs; input += depth) {
        Part<Stored> part{x + input, inputs, weight + input * kPanel, inputs * kPanel, 0, 0, (int)panel * 2, 0, 0};
        part.inputs = (int)std::min(depth, inputs - input);
        out.is_first = !input, out.is_last = input + part.inputs == inputs;
        // Passes share what is read next: the following inputs of the same panel, or the first ones of the next.
        part.ahead = (out.is_last ? inputs - input : depth) * kPanel;
        int64_t pass = 0;
        for_even_parts(rows, kTileRows, [&](int64_t row, int64_t number) {
          part.fetch = (int)(lines * pass / passes), part.stop = (int)(lines * (pass + 1) / passes);
          ++pass;
          with_rows<kTileRows>((int)number, [&](auto count) { multiply_rows<count, false>(part, row, 2, out); });
        });
      }
    }
  }

 private:
  template <int ROWS, bool IS_SINGLE>
  static void multiply_rows(Part<Stored> part, int64_t row, int64_t tiles, const Sums &out) {
    constexpr int kTiles = tiles_of(ROWS), kLeast = std::min(kTiles, 2);
    const int stop = part.stop;
    if constexpr (IS_SINGLE && streams_of(ROWS))
      for (constexpr int kPanels = streams_of(ROWS); tiles >= 2 * kPanels; part.first_tile += 2 * kPanels) {
        multiply_streams<Stored, ROWS, kPanels>(part, row, out);
        tiles -= 2 * kPanels;
      }
    for (; tiles >= kTiles; tiles -= kTiles, part.first_tile += kTiles) {
      if (kTiles == 1) part.stop = tiles > 1 ? (part.fetch + stop) / 2 : stop;
      multiply_tiles<Stored, ROWS, kTiles, IS_SINGLE>(part, row, out);
      part.fetch = part.stop;
    }
    for (; tiles > 0; tiles -= kLeast, part.first_tile += kLeast)
      multiply_tiles<Stored, ROWS, kLeast, IS_SINGLE>(part, row, out);
  }
};

// Some inputs of a block of rows, [rows][count], that many panels meet.
struct Inputs {
  const float *left;
  int64_t rows;
  int count;
};

// ROWS rows with kTileColumns outputs, from widened inputs [inputs][kTileColumns].
template <int ROWS>
void multiply_tile(const float *left, const float *right, int inputs, int64_t row, int64_t column, const Sums &out) {
  F sum[ROWS][kWide];
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < kWide; ++n) sum[m][n] = out.begin(row + m, column + n * kLanes);
  add_products<ROWS>(left, inputs, 1, right, kTileColumns, inputs, sum);
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < kWide; ++n) out.end(row + m, column + n * kLanes, sum[m][n]);
}

// Many rows with panels of which some inputs at a time are widened.
template <class Stored>
class WidenedProduct {
 public:
  using Item = typename Stored::Item;

  // `weight` begins at the inputs, and `panel_items` is from one panel to the next.
  static void multiply(const Inputs &in, const Item *weight, int64_t panel_items, int64_t panels, const Sums &out) {
    static thread_local Buffer<float> buffer;
    float *right = buffer.reserve(kPart * kTileColumns);
    const int64_t tiles = kPanel / kTileColumns * divide_up(in.rows, kTileRows);
    const int64_t lines = lines_of<Stored>() * (in.count / kDepth);
    for (int64_t panel = 0; panel < panels; ++panel, weight += panel_items) {
      int64_t place = 0;
      for (int column = 0; column < kPanel; column += kTileColumns) {
        widen(weight, column, in.count, right);
        for_even_parts(in.rows, kTileRows, [&](int64_t row, int64_t number) {
          // Each tile fetches its share of the next panel.
          prefetch<2>(weight + panel_items, (int)(lines * place / tiles), (int)(lines * (place + 1) / tiles));
          ++place;
          with_rows<kTileRows>((int)number, [&](auto count) {
            multiply_tile<decltype(count)::value>(in.left + row * in.count, right, in.count, row,
                                                  panel * kPanel + column, out);
          });
        });
      }
    }
  }

 private:
  // Outputs of a panel from `column` on, as [inputs][kTileColumns].
  static void widen(const Item *weight, int column, int inputs, float *to) {
    for (int i = 0; i < inputs; i += kDepth, weight += kStepItems)
#pragma GCC unroll 4
      for (int pair = 0; pair < kDepth / 2; ++pair, to += 2 * kTileColumns)
#pragma GCC unroll 2
        for (int n = 0; n < kWide; ++n) {
          const int output = column + n * kLanes;
          const Item *tile = weight + output / kHalf * kTileItems;
          Lanes::store(to + n * kLanes, widened<Stored, 0>(tile, pair, output % kHalf));
          Lanes::store(to + kTileColumns + n * kLanes, widened<Stored, 1>(tile, pair, output % kHalf));
        }
  }
};

struct Job {
  const float *x;
  const FloatWeight *weights;
  int64_t num_weights, rows, inputs;
};

// Calls `function` with each weight that has some of the panels [begin, end), which are counted one weight after the
// other, with its first panel and the number of them, and with their sums from row `row` on.
template <class Function>
void for_panels(const Job &job, int64_t row, int64_t begin, int64_t end, const Function &function) {
  int64_t first = 0;
  for (const FloatWeight *weight = job.weights; weight < job.weights + job.num_weights; ++weight) {
    const int64_t panels = divide_up(weight->outputs, kPanel);
    const int64_t from = std::clamp<int64_t>(begin - first, 0, panels), to = std::clamp<int64_t>(end - first, 0, panels);
    first += panels;
    if (from == to) continue;
    const Sums out{weight->y + row * weight->outputs + from * kPanel,
                   weight->outputs,
                   weight->outputs - from * kPanel,
                   weight->bias ? weight->bias + from * kPanel : nullptr,
                   true,
                   true};
    with_stored(weight->store, [&](auto stored) {
      const auto *packed = (const typename decltype(stored)::Item *)weight->packed;
      function(stored, packed + from * job.inputs * kPanel, to - from, out);
    });
  }
}

// `rows` rows from `row` on with the panels [begin, end) of all weights.
void multiply_block(const Job &job, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  const float *x = job.x + row * job.inputs;
  if (rows <= kMostDirect)
    return for_panels(job, row, begin, end, [&](auto stored, const auto *packed, int64_t panels, const Sums &out) {
      DirectProduct<decltype(stored)>::multiply(x, rows, job.inputs, packed, panels, out);
    });
  static thread_local Buffer<float> buffer;
  const int64_t depth = even_step(job.inputs, kPart, kDepth);
  float *left = buffer.reserve(rows * depth);
  for (int64_t input = 0; input < job.inputs; input += depth) {
    const int count = (int)std::min(depth, job.inputs - input);
    for (int64_t m = 0; m < rows; ++m) std::copy_n(x + m * job.inputs + input, count, left + m * count);
    for_panels(job, row, begin, end, [&](auto stored, const auto *packed, int64_t panels, Sums out) {
      out.is_first = !input, out.is_last = input + count == job.inputs;
      WidenedProduct<decltype(stored)>::multiply({left, rows, count}, packed + input * kPanel, job.inputs * kPanel,
                                                 panels, out);
    });
  }
}

}  // namespace

// As `linear` of linear.cpp.
void linear(const float *x, const FloatWeight *weights, int64_t num_weights, const int *live, int64_t rows,
            int64_t inputs, int num_threads) {
  Job job{x, weights, num_weights, rows, inputs};
  int64_t panels = 0;
  for (const FloatWeight *weight = weights; weight < weights + num_weights; ++weight) {
    panels += divide_up(weight->outputs, kPanel);
    if (!live || rows != live[0] || live[1] >= rows) continue;
    job.rows = live[1];
    std::fill(weight->y + job.rows * weight->outputs, weight->y + rows * weight->outputs, 0.0f);
  }
  if (!job.rows) return;
  const int64_t step = even_step(job.rows, kMaxRows, kTileRows), blocks = divide_up(job.rows, step);
  // Blocks are shared out whole if that is fair, else each is cut by outputs.
  const int64_t cuts = blocks % num_threads ? std::min<int64_t>(num_threads, panels) : 1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t item = 0; item < blocks * cuts; ++item) {
    const int64_t row = item / cuts * step, cut = item % cuts;
    multiply_block(job, row, std::min(step, job.rows - row), cut * panels / cuts, (cut + 1) * panels / cuts);
  }
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
