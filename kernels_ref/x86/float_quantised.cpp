// Products of float32 rows with a weight of codes, which is read as it is stored; quantised.cpp explains its panels,
// and is the same for bfloat16. Codes of fp8 are multiplied by float_fp8.cpp.
//
// Integer codes are multiplied with rows in fixed point: up to 256 neighbouring inputs of a row, all in one group of
// the weight, are whole numbers of 16 bits times a scale, their largest size / 32767, and off by half of it at most.
// Sums over them are exact in 32 bits, and are multiplied with both scales in float32. So results do not depend on
// the number of lanes or rows.
//
// An infinite input is one times an infinite scale, with zeros beside it; NaN is the scale of inputs with a NaN.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "code_panels.h"
#include "float_kernels.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int kPanelVectors = kPanel / kLanes;          // of pairs of inputs
constexpr int kPassVectors = 2;                         // of a pass over widened codes,
constexpr int kPassWords = kPassVectors * kLanes * 2;   // and its words, for a pair of inputs
constexpr int64_t kMostFew = 2 * kFewStep;              // rows for which codes are read into registers
constexpr int kPad = 32;         // words between rows, which would share places in a cache otherwise
constexpr float kMostWord = 32767.0f;
// Inputs of a row with one scale, at most, and for which codes are widened at a time: sums of their products with
// 8-bit codes less zero points fit 32 bits.
constexpr int64_t kPart = 256;

// Inputs of a row with one scale.
int64_t block_of(const QuantisedWeight &weight) {
  if (weight.groups == 1) return kPart;
  int64_t block = kPart;
  while (weight.group % block) block /= 2;  // groups are a multiple of 32
  return block;
}

// Rows in fixed point.
struct Rows {
  const int16_t *codes;
  const float *scales;  // [rows][blocks]
  const int *sums;      // of the codes of each block
  int64_t stride, block, num_blocks;
};

// Some inputs as codes, and their scale and sum.
void round_block(const float *x, int64_t count, int16_t *codes, float &scale, int &sum) {
  const float largest = largest_of(x, count);
  if (std::isfinite(largest)) {
    const float bounded = std::max(largest, kLeastLargest);
    const F factor = Lanes::set(kMostWord / bounded);
    for (int64_t i = 0; i < count; i += kLanes)
      Lanes::store_low(codes + i, Lanes::to_whole(Lanes::nearest(Lanes::mul(Lanes::load(x + i), factor))));
    scale = bounded / kMostWord;
  } else {
    for (int64_t i = 0; i < count; ++i) codes[i] = (int16_t)(std::isinf(x[i]) ? (x[i] > 0 ? 1 : -1) : 0);
    scale = largest;
  }
  sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += codes[i];
}

// A block of rows in fixed point, from the first panel on that wants it so.
class RoundedRows {
 public:
  RoundedRows(const float *x, int64_t inputs) : x_(x), inputs_(inputs) {}

  Rows rows(int64_t first, int64_t count, int64_t block) {
    static thread_local Buffer<int16_t> codes;
    static thread_local Buffer<float> scales;
    static thread_local Buffer<int> sums;
    const int64_t stride = inputs_ + kPad, num_blocks = divide_up(inputs_, block);
    int16_t *const code = codes.reserve(count * stride);
    float *const scale = scales.reserve(count * num_blocks);
    int *const sum = sums.reserve(count * num_blocks);
    if (first != first_ || block != block_)
      for (int64_t row = 0; row < count; ++row)
        for (int64_t b = 0; b < num_blocks; ++b) {
          const int64_t begin = b * block, place = row * num_blocks + b;
          round_block(x_ + (first + row) * inputs_ + begin, std::min(block, inputs_ - begin),
                      code + row * stride + begin, scale[place], sum[place]);
        }
    first_ = first, block_ = block;
    return {code, scale, sum, stride, block, num_blocks};
  }

 private:
  const float *x_;
  int64_t inputs_, first_ = -1, block_ = 0;
};

struct Job {
  Panels panels;
  Rows rows;
  int64_t first;  // row of the results

  int64_t group_of(int64_t block) const { return block * rows.block / panels.weight.group; }
};

// What the sums of a block are multiplied with, for some vectors of outputs.
template <int NV>
struct Units {
  F scale[NV];
  I zero[NV];
  bool has_zeros;

  // `middle` is a zero point of all codes, besides those of the weight.
  template <class Place>
  Units(const Panels &panels, int middle, const Place &place_of) : has_zeros(middle || panels.weight.zeros) {
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) {
      const int64_t place = place_of(n);
      scale[n] = panels.scale(place);
      zero[n] = Lanes::set(middle);
      if (panels.weight.zeros)
        zero[n] = Lanes::add(zero[n], Lanes::bytes((const uint8_t *)panels.weight.zeros + place));
    }
  }
};

// Adds the sums of a block of inputs to those of `MR` rows from `row` on.
template <int MR, int NV, class Total>
inline __attribute__((always_inline)) void add_block(const Rows &rows, int64_t row, int64_t block,
                                                     const Units<NV> &units, I (&sum)[MR][NV],
                                                     const Total &total_of) {
  const float *scales = rows.scales + row * rows.num_blocks + block;
  const int *sums = rows.sums + row * rows.num_blocks + block;
  if (units.has_zeros)
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n)
        sum[m][n] = Lanes::sub(sum[m][n], Lanes::mul(units.zero[n], Lanes::set(sums[m * rows.num_blocks])));
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m) {
    const F scale = Lanes::set(scales[m * rows.num_blocks]);
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) {
      float *to = total_of(m, n);
      const F scaled = Lanes::mul(Lanes::whole(sum[m][n]), scale);
      Lanes::store(to, Lanes::fma(scaled, units.scale[n], Lanes::load(to)));
    }
  }
}

// Adds a pair of inputs to the sums of `MR` rows.
template <int MR, int NV, class Words>
inline __attribute__((always_inline)) void add_pair(const int16_t *x, int64_t stride, I (&sum)[MR][NV],
                                                    const Words &words_of) {
  I left[MR];
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m) left[m] = Lanes::pair(x + m * stride);
#pragma GCC unroll 8
  for (int n = 0; n < NV; ++n) {
    const I words = words_of(n);
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m) sum[m][n] = Lanes::add(sum[m][n], Lanes::dot(words, left[m]));
  }
}

// Adds four pairs of inputs, of which a word has four nibbles, to the sums of a row.
template <int NV>
inline __attribute__((always_inline)) void add_nibbles(const int16_t *x, const uint8_t *const (&from)[NV],
                                                       I (&sum)[1][NV]) {
  const I left[4] = {Lanes::pair(x), Lanes::pair(x + 2), Lanes::pair(x + 4), Lanes::pair(x + 6)};
#pragma GCC unroll 8
  for (int n = 0; n < NV; ++n) {
    const I words = Lanes::words((const int16_t *)from[n]);
    sum[0][n] = Lanes::add(sum[0][n], Lanes::dot(Lanes::nibbles<0>(words), left[0]));
    sum[0][n] = Lanes::add(sum[0][n], Lanes::dot(Lanes::nibbles<1>(words), left[1]));
    sum[0][n] = Lanes::add(sum[0][n], Lanes::dot(Lanes::nibbles<2>(words), left[2]));
    sum[0][n] = Lanes::add(sum[0][n], Lanes::dot(Lanes::nibbles<3>(words), left[3]));
  }
}

// To those of several rows.
template <int MR, int NV>
inline __attribute__((always_inline)) void add_nibbles(const int16_t *x, int64_t stride,
                                                       const uint8_t *const (&from)[NV], I (&sum)[MR][NV]) {
  I words[NV];
#pragma GCC unroll 8
  for (int n = 0; n < NV; ++n) words[n] = Lanes::words((const int16_t *)from[n]);
  add_pair(x, stride, sum, [&](int n) { return Lanes::nibbles<0>(words[n]); });
  add_pair(x + 2, stride, sum, [&](int n) { return Lanes::nibbles<1>(words[n]); });
  add_pair(x + 4, stride, sum, [&](int n) { return Lanes::nibbles<2>(words[n]); });
  add_pair(x + 6, stride, sum, [&](int n) { return Lanes::nibbles<3>(words[n]); });
}

// Adds a pair of inputs of bytes, `Lanes::kAdded` more than they are, and not in order.
template <int MR, int NV>
inline __attribute__((always_inline)) void add_bytes(const int16_t *x, int64_t stride,
                                                     const uint8_t *const (&from)[NV], I (&sum)[MR][NV]) {
  I left[MR];
#pragma GCC unroll 4
  for (int m = 0; m < MR; ++m) left[m] = Lanes::pair(x + m * stride);
#pragma GCC unroll 8
  for (int n = 0; n < NV; n += 2) {
    I both[2];
    Lanes::wide_bytes(from[n], both);
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k)
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m) sum[m][n + k] = Lanes::add(sum[m][n + k], Lanes::dot(both[k], left[m]));
  }
}

template <int MR, int NV>
inline __attribute__((always_inline)) void order(I (&sum)[MR][NV]) {
#pragma GCC unroll 4
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; n += 2) {
      I both[2] = {sum[m][n], sum[m][n + 1]};
      Lanes::in_order(both);
      sum[m][n] = both[0], sum[m][n + 1] = both[1];
    }
}

// How a pass of `MR` rows reads codes: panels side by side, vectors of each whose sums are in registers, and bytes
// between what it reads and what it fetches.
template <CodeKind kind, int MR>
struct Reading {
  static constexpr bool kIsNibbles = kind == CodeKind::kInt4;
  static constexpr int kPanels = MR == 1 && !kIsNibbles ? 2 : 1;
  static constexpr int kVectors = std::min(MR > 1 && kIsNibbles ? 2 : 4, kPanelVectors);
  static constexpr int64_t kAhead = kIsNibbles || MR > 1 ? 4096 : 1024;
};

// `MR` rows from `row` of the block on with neighbouring panels.
template <CodeKind kind, int MR, int PANELS>
__attribute__((noinline)) void few(const Job &job, int64_t row, int64_t panel) {
  using Way = Reading<kind, MR>;
  constexpr bool kIsNibbles = Way::kIsNibbles;
  constexpr int kStep = kIsNibbles ? 8 : 2, kStepBytes = kIsNibbles ? 2 * kPairCodes : kPairCodes;
  constexpr int kTurn = Way::kVectors, NV = kTurn * PANELS, kVectorBytes = kStepBytes / kPanelVectors;
  const Panels &panels = job.panels;
  const int64_t panel_bytes = panels.inputs / 2 * panels.bytes_per_pair(), stride = job.rows.stride;
  alignas(kLine) float total[MR][PANELS][kPanel] = {};
  for (int64_t block = 0; block < job.rows.num_blocks; ++block) {
    const int64_t first = block * job.rows.block, last = std::min(first + job.rows.block, panels.inputs);
    const int64_t group = job.group_of(block);
    for (int turn = 0; turn < kPanelVectors; turn += kTurn) {
      I sum[MR][NV];
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) sum[m][n] = Lanes::set(0);
      const uint8_t *from[NV];
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n)
        from[n] = panels.codes(panel, first) + n / kTurn * panel_bytes + (turn + n % kTurn) * kVectorBytes;
      const int16_t *x = job.rows.codes + row * stride + first;
      for (int64_t input = first; input < last; input += kStep, x += kStep) {
        if (turn == 0)
#pragma GCC unroll 8
          for (int n = 0; n < NV; n += kTurn)
#pragma GCC unroll 2
            for (int line = 0; line < kStepBytes; line += kLine)
              __builtin_prefetch(from[n] + Way::kAhead + line, 0, 3);
        if constexpr (!kIsNibbles) add_bytes(x, stride, from, sum);
        else if constexpr (MR == 1) add_nibbles(x, from, sum);
        else add_nibbles(x, stride, from, sum);
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) from[n] += kStepBytes;
      }
      if constexpr (!kIsNibbles) order(sum);
      const Units<NV> units(panels, kIsNibbles ? 8 : Lanes::kAdded, [&](int n) {
        return panels.place(panel + n / kTurn, group, (turn + n % kTurn) * kLanes);
      });
      add_block(job.rows, row, block, units, sum,
                [&](int m, int n) { return &total[m][n / kTurn][(turn + n % kTurn) * kLanes]; });
    }
  }
  for (int m = 0; m < MR; ++m)
    for (int p = 0; p < PANELS; ++p)
      for (int column = 0; column < kPanel; column += kLanes)
        panels.store(job.first + row + m, panel + p, column, Lanes::load(&total[m][p][column]));
}

template <CodeKind kind, int MR>
void few_panels(const Job &job, int64_t row, int64_t panel, int num_panels) {
  constexpr int kPanels = Reading<kind, MR>::kPanels;
  for (; num_panels >= kPanels; num_panels -= kPanels, panel += kPanels)
    few<kind, MR, kPanels>(job, row, panel);
  for (; num_panels > 0; --num_panels, ++panel) few<kind, MR, 1>(job, row, panel);
}

// A few rows with neighbouring panels.
template <CodeKind kind>
void few_rows(const Job &job, const Share &share) {
  for_even_parts(share.rows, kFewStep, [&](int64_t row, int64_t count) {
    switch (count) {
      case 1: return few_panels<kind, 1>(job, row, share.panel, share.num_panels);
      case 2: return few_panels<kind, 2>(job, row, share.panel, share.num_panels);
      case 3: return few_panels<kind, 3>(job, row, share.panel, share.num_panels);
      default: return few_panels<kind, kFewStep>(job, row, share.panel, share.num_panels);
    }
  });
}

// Codes of some inputs as words, for the vectors of a pass: [inputs / 2][kPassWords].
template <CodeKind kind>
void widen(const uint8_t *codes, int64_t count, int16_t *to) {
  if constexpr (kind == CodeKind::kInt4) {
    for (int64_t i = 0; i < count; i += 8, codes += 2 * kPairCodes, to += 4 * kPassWords)
#pragma GCC unroll 2
      for (int n = 0; n < kPassVectors; ++n) {
        const I words = Lanes::words((const int16_t *)codes + n * kLanes * 2);
        int16_t *const out = to + n * kLanes * 2;
        Lanes::store((int *)out, Lanes::nibbles<0>(words));
        Lanes::store((int *)(out + kPassWords), Lanes::nibbles<1>(words));
        Lanes::store((int *)(out + 2 * kPassWords), Lanes::nibbles<2>(words));
        Lanes::store((int *)(out + 3 * kPassWords), Lanes::nibbles<3>(words));
      }
  } else {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i += 2, codes += kPairCodes, to += kPassWords)
#pragma GCC unroll 2
      for (int n = 0; n < kPassVectors; ++n)
        Lanes::store((int *)(to + n * kLanes * 2), Lanes::wide_bytes(codes + n * kLanes * 2));
  }
}

// Some inputs, in whole blocks, of vectors of a panel, and sums of a block of rows, [rows][kPanel].
struct Part {
  const int16_t *right;  // widened codes
  int64_t panel, input, count;
  int vector;
  float *totals;
};

template <int MR>
__attribute__((noinline)) void pass(const Job &job, const Part &part, int64_t row) {
  const int16_t *right = part.right;
  const int middle = job.panels.weight.kind == CodeKind::kInt4 ? 8 : 0;
  const int64_t end = part.input + part.count, stride = job.rows.stride;
  for (int64_t first = part.input; first < end; first += job.rows.block) {
    const int64_t last = std::min(first + job.rows.block, end), block = first / job.rows.block;
    I sum[MR][kPassVectors];
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < kPassVectors; ++n) sum[m][n] = Lanes::set(0);
    const int16_t *x = job.rows.codes + row * stride + first;
    for (int64_t input = first; input < last; input += 2, x += 2, right += kPassWords) {
      const I low = Lanes::words(right), high = Lanes::words(right + kLanes * 2);
#pragma GCC unroll 6
      for (int m = 0; m < MR; ++m) {
        const I left = Lanes::pair(x + m * stride);
        sum[m][0] = Lanes::add(sum[m][0], Lanes::dot(low, left));
        sum[m][1] = Lanes::add(sum[m][1], Lanes::dot(high, left));
      }
    }
    const int64_t group = job.group_of(block);
    const Units<kPassVectors> units(job.panels, middle, [&](int n) {
      return job.panels.place(part.panel, group, (part.vector + n) * kLanes);
    });
    add_block(job.rows, row, block, units, sum,
              [&](int m, int n) { return part.totals + (row + m) * kPanel + (part.vector + n) * kLanes; });
  }
}

void pass_of(const Job &job, const Part &part, int64_t row, int64_t rows) {
  switch (rows) {
    case 1: return pass<1>(job, part, row);
    case 2: return pass<2>(job, part, row);
    case 3: return pass<3>(job, part, row);
    case 4: return pass<4>(job, part, row);
    case 5: return pass<5>(job, part, row);
    default: return pass<kRowStep>(job, part, row);
  }
}

// A block of rows with a panel.
void many_rows(const Job &job, int64_t rows, int64_t panel) {
  static thread_local Buffer<float> buffer;
  static thread_local Buffer<int16_t> widened;
  const Panels &panels = job.panels;
  int16_t *const right = widened.reserve(kPart / 2 * kPassWords);
  float *const totals = buffer.reserve(rows * kPanel);
  std::fill_n(totals, rows * kPanel, 0.0f);
  const int64_t num_passes = kPanelVectors / kPassVectors * divide_up(rows, kRowStep);
  const bool is_nibbles = panels.weight.kind == CodeKind::kInt4;
  for (int64_t input = 0; input < panels.inputs; input += kPart) {
    const int64_t count = std::min(kPart, panels.inputs - input);
    const uint8_t *codes = panels.codes(panel, input), *next = panels.codes(panel, input + count);
    const int64_t lines = count / 2 * panels.bytes_per_pair() / kLine;
    int64_t place = 0;
    for (int vector = 0; vector < kPanelVectors; vector += kPassVectors) {
      if (is_nibbles)
        widen<CodeKind::kInt4>(codes + vector * kLanes * 4, count, right);
      else
        widen<CodeKind::kInt8>(codes + vector * kLanes * 2, count, right);
      const Part part{right, panel, input, count, vector, totals};
      for_even_parts(rows, kRowStep, [&](int64_t row, int64_t number) {
        // Each pass fetches its share of the codes that come next.
        for (int64_t line = lines * place / num_passes; line < lines * (place + 1) / num_passes; ++line)
          __builtin_prefetch(next + line * kLine, 0, 2);
        ++place;
        pass_of(job, part, row, number);
      });
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int column = 0; column < kPanel; column += kLanes)
      panels.store(job.first + row, panel, column, Lanes::load(totals + row * kPanel + column));
}

void integer_linears(const float *x, const std::vector<QuantisedWeight> &weights, int64_t rows,
                     int64_t inputs, int num_threads) {
  for_shares(weights, rows, num_threads, [&] {
    return [&, rounded = RoundedRows(x, inputs)](const Share &share) mutable {
      const QuantisedWeight &weight = weights[share.weight];
      const Rows words = rounded.rows(share.first, share.rows, block_of(weight));
      const Job job{{weight, inputs}, words, share.first};
      if (rows > kMostFew)
        for (int p = 0; p < share.num_panels; ++p) many_rows(job, share.rows, share.panel + p);
      else if (weight.kind == CodeKind::kInt4)
        few_rows<CodeKind::kInt4>(job, share);
      else
        few_rows<CodeKind::kInt8>(job, share);
    };
  });
}

}  // namespace

// As `quantised_linears` of quantised.cpp, of float32.
void quantised_linears(const float *x, const QuantisedWeight *weights, int64_t num_weights, const int *live,
                       int64_t rows, int64_t inputs, int num_threads) {
  const int64_t all = rows;
  if (live && rows == live[0]) rows = std::min<int64_t>(rows, live[1]);
  std::vector<QuantisedWeight> of_integers, of_fp8;
  for (const QuantisedWeight *weight = weights; weight < weights + num_weights; ++weight) {
    std::fill((float *)weight->y + rows * weight->outputs, (float *)weight->y + all * weight->outputs, 0.0f);
    (weight->kind == CodeKind::kFp8 ? of_fp8 : of_integers).push_back(*weight);
  }
  if (!rows) return;
  if (!of_integers.empty()) integer_linears(x, of_integers, rows, inputs, num_threads);
  if (!of_fp8.empty()) fp8_linears(x, of_fp8, rows, inputs, num_threads);
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
