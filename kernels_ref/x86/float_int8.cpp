// Products of rows of int8 with a weight of int8: sums are exact, and scaled in float32 at the end.
//
// Codes of rows are stored plus 128, and 128 times the sum of a weight is subtracted again: VNNI multiplies unsigned
// with signed bytes. Without it both are widened to 16 bits first, whose products are exact too; nothing saturates.
//
// The weight lies in panels [outputs / 32][inputs / 4][32][4]: sixteen outputs with four inputs each are a vector of
// VNNI, and the pairs of tiles of AMX have the same order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "blocks.h"
#include "float_kernels.h"
#include "lanes.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int kPanel = 32, kDepth = 32, kInputs = 4, kStepBytes = kPanel * kInputs;
constexpr int kMiddlePower = 7;               // 2 to this is added to codes of rows
constexpr int64_t kRowBlock = 240, kRowItems = 1 << 19, kPart = 1024;

// Vectors of a panel's step: how they are read, multiplied with a row's inputs, and become sums of outputs.
#ifdef HPU_DUO_VNNI
struct Dot {
  using Item = uint8_t;
  using W = __m512i;
  static constexpr int kBytes = 64, kRows = 6, kMost = 24;
  static W weight(const int8_t *from) { return _mm512_loadu_si512(from); }
  static W inputs(const Item *x) {
    int four;
    std::memcpy(&four, x, sizeof(four));
    return _mm512_set1_epi32(four);
  }
  static I add(I sum, W weight, W x) { return _mm512_dpbusd_epi32(sum, x, weight); }
  static I outputs(const I *sums) { return sums[0]; }
};
#elif HPU_DUO_LANES == 16
struct Dot {
  using Item = int16_t;
  using W = __m512i;
  static constexpr int kBytes = 32, kRows = 6, kMost = 24;
  static W weight(const int8_t *from) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from)); }
  static W inputs(const Item *x) {
    int64_t four;
    std::memcpy(&four, x, sizeof(four));
    return _mm512_set1_epi64(four);
  }
  static I add(I sum, W weight, W x) { return _mm512_add_epi32(sum, _mm512_madd_epi16(weight, x)); }
  static I outputs(const I *sums) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_permutex2var_epi32(sums[0], even, sums[1]),
                            _mm512_permutex2var_epi32(sums[0], odd, sums[1]));
  }
};
#elif HPU_DUO_LANES == 8
struct Dot {
  using Item = int16_t;
  using W = __m256i;
  static constexpr int kBytes = 16, kRows = 5, kMost = 12;
  static W weight(const int8_t *from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)); }
  static W inputs(const Item *x) {
    int64_t four;
    std::memcpy(&four, x, sizeof(four));
    return _mm256_set1_epi64x(four);
  }
  static I add(I sum, W weight, W x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(weight, x)); }
  static I outputs(const I *sums) { return _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[0], sums[1]), 0xd8); }
};
#else
struct Dot {
  using Item = uint8_t;
  using W = const int8_t *;
  static constexpr int kBytes = 32, kRows = 3, kMost = 12;
  static W weight(const int8_t *from) { return from; }
  static const Item *inputs(const Item *x) { return x; }
  static I add(I sum, W weight, const Item *x) {
    return Lanes::map([&](int i) {
      int total = sum.lane[i];
      for (int k = 0; k < kInputs; ++k) total += (int)x[k] * weight[kInputs * i + k];
      return total;
    });
  }
  static I outputs(const I *sums) { return sums[0]; }
};
#endif

using Item = Dot::Item;
constexpr int kVectors = kStepBytes / Dot::kBytes;             // of a panel
constexpr int kVectorsOfOutputs = kVectors * kLanes / kPanel;  // whose sums become those of `kLanes` outputs

// Rows as codes, and their scales.
struct Rows {
  Item *codes;
  float *scales;
};

void round_row(const float *x, int64_t count, float scale, Item *codes) {
  const F divisor = Lanes::set(scale), least = Lanes::set(-128.0f), most = Lanes::set(-127.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const F near = Lanes::nearest(Lanes::div(Lanes::load(x + i), divisor));
    const F bounded = Lanes::max(Lanes::sub(Lanes::set(0.0f), Lanes::max(Lanes::sub(Lanes::set(0.0f), near), most)), least);
    Lanes::store_low(codes + i, Lanes::add(Lanes::to_whole(bounded), Lanes::set(1 << kMiddlePower)));
  }
}

const float *floats_of(const void *x, bool is_bfloat16, int64_t begin, int64_t count, float *wide) {
  if (!is_bfloat16) return (const float *)x + begin;
  for (int64_t i = 0; i < count; i += kLanes)
    Lanes::store(wide + i, Lanes::of_bfloat16((const uint16_t *)x + begin + i));
  return wide;
}

void round_rows(const Int8Inputs &in, int64_t rows, const Rows &out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    static thread_local Buffer<float> buffer;
    const float *x = floats_of(in.x, in.is_bfloat16, row * in.inputs, in.inputs, buffer.reserve(in.inputs));
    const float largest = largest_of(x, in.inputs);
    const float scale = in.scale ? *in.scale : std::max(largest, kLeastLargest) / 127.0f;
    out.scales[row] = std::isnan(largest) ? largest : scale;  // no code stands for NaN
    round_row(x, in.inputs, scale, out.codes + row * in.inputs);
  }
}

struct Job {
  Rows rows;
  const Int8Weight &weight;
  int64_t inputs;
  bool is_bfloat16;

  const int8_t *codes(int64_t panel, int64_t input) const { return weight.codes + (panel * inputs + input) * kPanel; }

  // `kLanes` sums of a row to its outputs.
  void store(int64_t row, int64_t panel, int column, I sum) const {
    const int64_t first = panel * kPanel + column, left = weight.outputs - first;
    if (left <= 0) return;
    const I added = Lanes::times_power(Lanes::load(weight.sums + first, Lanes::first(kLanes)), kMiddlePower);
    F y = Lanes::whole(Lanes::sub(sum, added));
    y = Lanes::mul(Lanes::mul(y, Lanes::load(weight.scales + first)), Lanes::set(rows.scales[row]));
    if (weight.bias) y = Lanes::add(y, Lanes::load(weight.bias + first));
    const int64_t place = row * weight.outputs + first, count = std::min<int64_t>(left, kLanes);
    if (is_bfloat16) return Lanes::store_bfloat16((uint16_t *)weight.y + place, y, (int)count);
    Lanes::store((float *)weight.y + place, y, Lanes::first((int)count));
  }
};

// Some inputs of neighbouring vectors of panels.
struct Part {
  int64_t panel, input, count;
  int vector;        // of the panel
  int64_t first;     // row of the first sums
  int *sums;         // [rows][vectors][kLanes] of unfinished rows
  int64_t stride;    // of a row
};

template <int MR, int NV>
void pass(const Job &job, const Part &part, int64_t row) {
  I sum[MR][NV];
  const bool is_first_pass = row == part.first;
  const bool is_first = !part.input, is_last = part.input + part.count == job.inputs;
  int *held = part.sums + (row - part.first) * part.stride;
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n)
      sum[m][n] = is_first ? Lanes::set(0) : Lanes::load(held + m * part.stride + n * kLanes, Lanes::first(kLanes));
  const Item *x = job.rows.codes + row * job.inputs + part.input;
  const int8_t *from[NV];
#pragma GCC unroll 8
  for (int n = 0; n < NV; ++n) {
    const int vector = part.vector + n;
    from[n] = job.codes(part.panel + vector / kVectors, part.input) + vector % kVectors * Dot::kBytes;
  }
  for (int64_t input = 0; input < part.count; input += kInputs, x += kInputs) {
    typename Dot::W right[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) {
      right[n] = Dot::weight(from[n]);
      if (is_first_pass && n % (64 / Dot::kBytes) == 0) __builtin_prefetch(from[n] + 4096, 0, 2);
      from[n] += kStepBytes;
    }
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m) {
      const auto left = Dot::inputs(x + m * job.inputs);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[m][n] = Dot::add(sum[m][n], right[n], left);
    }
  }
  if (!is_last) {
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) Lanes::store(held + m * part.stride + n * kLanes, sum[m][n]);
    return;
  }
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NV; n += kVectorsOfOutputs) {
      const int column = (part.vector + n) / kVectorsOfOutputs * kLanes;
      const I both[2] = {sum[m][n], sum[m][n + kVectorsOfOutputs - 1]};
      job.store(row + m, part.panel + column / kPanel, column % kPanel, Dot::outputs(both));
    }
}

#if HPU_DUO_LANES == 8
constexpr int kStreams = 4;      // panels that a few rows read side by side
constexpr int64_t kFewRows = 4;
constexpr int64_t kWideRows = 8;  // rows that meet four vectors at a time: more rows meet two, five at a time

// `MR` rows of the only block with kStreams panels, which a CPU fetches on its own, as sequential streams, faster than one whose lines are
// prefetched. Of each panel, VECTORS vectors at a time meet the same few inputs.
template <int MR, int VECTORS>
__attribute__((noinline)) void few(const Job &job, int64_t row, int64_t panel) {
  constexpr int kTurns = kVectors / VECTORS, NV = kStreams * VECTORS;
  I sums[kTurns][MR][NV];
  for (auto &turn_sums : sums)
    for (auto &row_sums : turn_sums)
      for (I &each : row_sums) each = Lanes::set(0);
  for (int64_t first = 0; first < job.inputs; first += kDepth)
    for (int turn = 0; turn < kTurns; ++turn) {
      const int8_t *codes = job.codes(panel, first) + turn * VECTORS * Dot::kBytes;
      const Item *x = job.rows.codes + row * job.inputs + first;
      I sum[MR][NV];
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) sum[m][n] = sums[turn][m][n];
      for (int input = 0; input < kDepth; input += kInputs, x += kInputs, codes += kStepBytes) {
        Dot::W left[MR];
#pragma GCC unroll 4
        for (int m = 0; m < MR; ++m) left[m] = Dot::inputs(x + m * job.inputs);
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) {
          const auto right = Dot::weight(codes + n / VECTORS * job.inputs * kPanel + n % VECTORS * Dot::kBytes);
#pragma GCC unroll 4
          for (int m = 0; m < MR; ++m) sum[m][n] = Dot::add(sum[m][n], right, left[m]);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) sums[turn][m][n] = sum[m][n];
    }
  for (int m = 0; m < MR; ++m)
    for (int p = 0; p < kStreams; ++p)
      for (int vector = 0; vector < kVectors; vector += kVectorsOfOutputs) {
        const auto sum_of = [&](int v) { return sums[v / VECTORS][m][p * VECTORS + v % VECTORS]; };
        const I both[2] = {sum_of(vector), sum_of(vector + 1)};
        job.store(row + m, panel + p, vector / kVectorsOfOutputs * kLanes, Dot::outputs(both));
      }
}

void few_rows(const Job &job, int64_t rows, int64_t panel) {
  for_even_parts(rows, 3, [&](int64_t row, int64_t count) {
    switch (count) {
      case 1: return few<1, 2>(job, row, panel);
      case 2: return few<2, 1>(job, row, panel);
      default: return few<3, 1>(job, row, panel);
    }
  });
}
#else
constexpr int kStreams = 2;
constexpr int64_t kFewRows = 0, kWideRows = kRowBlock;

void few_rows(const Job &, int64_t, int64_t) {}
#endif

template <int NV>
void passes(const Job &job, const Part &part, int64_t rows) {
  constexpr int kMost = std::min(Dot::kRows, Dot::kMost / NV);
  const int64_t step = even_step(rows, kMost, 1);
  for (int64_t row = 0; row < rows; row += step) {
    const int64_t first = part.first + row;
    switch (std::min(step, rows - row)) {
      case 1: pass<1, NV>(job, part, first); break;
      case 2: pass<std::min(2, kMost), NV>(job, part, first); break;
      case 3: pass<std::min(3, kMost), NV>(job, part, first); break;
      case 4: pass<std::min(4, kMost), NV>(job, part, first); break;
      case 5: pass<std::min(5, kMost), NV>(job, part, first); break;
      default: pass<kMost, NV>(job, part, first);
    }
  }
}

// A block of rows with up to kStreams panels.
void multiply_block(const Job &job, int64_t first, int64_t rows, int64_t panel, int num_panels) {
  if (rows <= kFewRows && num_panels == kStreams) return few_rows(job, rows, panel);
  static thread_local Buffer<int> buffer;
  const int64_t stride = kStreams * kVectors * kLanes;
  int *sums = buffer.reserve(rows * stride);
  const int together = rows > kWideRows || num_panels * kVectors % 4 ? 2 : 4;  // vectors
  const bool is_one_pass = rows <= std::min<int64_t>(Dot::kRows, Dot::kMost / together);
  const int64_t step = is_one_pass ? job.inputs : even_step(job.inputs, kPart, kDepth);
  for (int64_t input = 0; input < job.inputs; input += step)
    for (int vector = 0; vector < num_panels * kVectors; vector += together) {
      const int64_t count = std::min(step, job.inputs - input);
      const Part part{panel, input, count, vector, first, sums + vector * kLanes, stride};
      together == 4 ? passes<4>(job, part, rows) : passes<2>(job, part, rows);
    }
}

}  // namespace

// y[rows, outputs] = x * weight^T + bias for each weight, x rounded to int8 first. `inputs` are a multiple of 32 and at
// most 65,536; `live` is as in quantised.cpp.
void int8_linears(const Int8Inputs &in, const Int8Weight *weights, int64_t num_weights, const int *live, int64_t rows,
                  int num_threads) {
  if (live && rows == live[0] && live[1] < rows) {
    const int64_t size = in.is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
    for (const Int8Weight *weight = weights; weight < weights + num_weights; ++weight)
      std::memset((char *)weight->y + live[1] * weight->outputs * size, 0, (rows - live[1]) * weight->outputs * size);
    rows = live[1];
  }
  if (!rows) return;
  static thread_local Buffer<Item> codes;
  static thread_local Buffer<float> scales;
  const Rows rounded{codes.reserve(rows * in.inputs), scales.reserve(rows)};
  round_rows(in, rows, rounded, num_threads);
  std::vector<Job> jobs;
  std::vector<int64_t> ends;  // units of panels up to the end of each weight
  int64_t panels = 0, units = 0;
  for (int64_t n = 0; n < num_weights; ++n) panels += divide_up(weights[n].outputs, kPanel);
  // Fewer and larger units leave threads with less equal shares.
  const int64_t unit_panels = rows <= kFewRows && panels >= 2 * kStreams * num_threads ? kStreams : 2;
  for (int64_t n = 0; n < num_weights; ++n) {
    jobs.push_back({rounded, weights[n], in.inputs, in.is_bfloat16});
    ends.push_back(units += divide_up(weights[n].outputs, unit_panels * kPanel));
  }
  const int64_t most = std::clamp<int64_t>(kRowItems / (in.inputs * (int64_t)sizeof(Item)), Dot::kRows, kRowBlock);
  const int64_t step = even_step(rows, most, Dot::kRows), blocks = divide_up(rows, step);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t item = 0; item < blocks * units; ++item) {
    const int64_t unit = item % units, first = item / units * step;
    const size_t n = std::upper_bound(ends.begin(), ends.end(), unit) - ends.begin();
    const int64_t panel = (unit - (n ? ends[n - 1] : 0)) * unit_panels;
    const int count = (int)std::min(unit_panels, divide_up(weights[n].outputs, kPanel) - panel);
    multiply_block(jobs[n], first, std::min(step, rows - first), panel, count);
  }
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
