// What products of float32 rows with panels of codes share; quantised.cpp explains the panels.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "blocks.h"
#include "lanes.h"
#include "quantised.h"

namespace hpu_duo {
namespace {

constexpr int kPanel = 32, kDepth = 32;      // outputs of a panel; inputs are a multiple of the second number
constexpr int kPairCodes = 2 * kPanel;       // of a panel, for a pair of inputs
constexpr bool kIsWide = Lanes::kRegisters == 32;
constexpr int kFewStep = 4;                  // rows of a pass that reads codes into registers
constexpr int kRowStep = 6;                  // rows of a pass over widened codes
constexpr int64_t kRowBlock = 240;           // rows for which codes are widened once
constexpr int kLine = 64;                    // bytes

// A weight, and the inputs that it is stored with.
struct Panels {
  const QuantisedWeight &weight;
  int64_t inputs;

  int64_t bytes_per_pair() const { return weight.kind == CodeKind::kInt4 ? kPairCodes / 2 : kPairCodes; }
  const uint8_t *codes(int64_t panel, int64_t input) const {
    return weight.codes + (panel * inputs + input) / 2 * bytes_per_pair();
  }
  int64_t place(int64_t panel, int64_t group, int column) const {
    return (panel * weight.groups + group) * kPanel + column;
  }
  F scale(int64_t place) const {
    switch (weight.scale_kind) {
      case ScaleKind::kFloat: return Lanes::load((const float *)weight.scales + place);
      case ScaleKind::kHalf: return Lanes::of_float16((const uint16_t *)weight.scales + place);
      default: return Lanes::of_bfloat16((const uint16_t *)weight.scales + place);
    }
  }
  void store(int64_t row, int64_t panel, int column, F sum) const {
    const int64_t first = panel * kPanel + column, left = weight.outputs - first;
    if (left <= 0) return;
    if (weight.bias) sum = Lanes::add(sum, Lanes::load(weight.bias + first));
    float *to = (float *)weight.y + row * weight.outputs + first;
    left >= kLanes ? Lanes::store(to, sum) : Lanes::store(to, sum, Lanes::first((int)left));
  }
};

// Some rows with neighbouring panels of weight number `weight`.
struct Share {
  int64_t weight, first, rows, panel;
  int num_panels;
};

// Shares out the panels of all weights, and blocks of rows. Each thread calls what `make` returns to it.
template <class Make>
void for_shares(const std::vector<QuantisedWeight> &weights, int64_t rows, int num_threads,
                const Make &make) {
  std::vector<int64_t> ends;  // units of panels up to the end of each weight
  int64_t panels = 0, units = 0;
  for (const QuantisedWeight &weight : weights) panels += divide_up(weight.outputs, kPanel);
  // A few rows read four panels at a time; larger units leave threads with less equal shares.
  const int64_t unit_panels = rows <= 2 * kFewStep && panels >= 8 * num_threads ? 4 : 2;
  for (const QuantisedWeight &weight : weights)
    ends.push_back(units += divide_up(weight.outputs, unit_panels * kPanel));
  const int64_t step = even_step(rows, kRowBlock, kRowStep), blocks = divide_up(rows, step);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    auto function = make();
#pragma omp for schedule(static)
    for (int64_t item = 0; item < blocks * units; ++item) {
      const int64_t unit = item % units, first = item / units * step;
      const int64_t n = std::upper_bound(ends.begin(), ends.end(), unit) - ends.begin();
      const int64_t panel = (unit - (n ? ends[n - 1] : 0)) * unit_panels;
      const int64_t left = divide_up(weights[n].outputs, kPanel) - panel;
      function(Share{n, first, std::min(step, rows - first), panel, (int)std::min(unit_panels, left)});
    }
  }
}

}  // namespace
}  // namespace hpu_duo
