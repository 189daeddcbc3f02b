// The place of the largest item of each row, and the slot of a budget that is given up: as largest.cpp and slots.cpp.

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>

#include "float_kernels.h"
#include "lanes.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int64_t kBlock = 1024;  // items that are looked through again for the place

// The largest of some items, not a number if one is none.
float largest_of(const float *items, int64_t count) {
  F most = Lanes::set(-INFINITY);
  bool has_nan = false;
  for (int64_t i = 0; i < count; i += kLanes) {
    const M there = Lanes::first((int)std::min<int64_t>(count - i, kLanes));
    const F x = Lanes::select(there, Lanes::load(items + i, there), Lanes::set(-INFINITY));
    has_nan |= Lanes::any(Lanes::is_nan(x));
    most = Lanes::max(most, x);
  }
  return has_nan ? NAN : Lanes::most(most);
}

}  // namespace

// Of equal items the first one, and the first one that is not a number where there is one, as argmax of torch has it.
void place_of_largest(const float *rows, int *place, int64_t num_rows, int64_t width, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    const float *items = rows + row * width;
    float most = -INFINITY;
    int64_t best = 0;
    for (int64_t first = 0; first < width && !std::isnan(most); first += kBlock) {
      const float largest = largest_of(items + first, std::min(kBlock, width - first));
      if (largest > most || std::isnan(largest)) most = largest, best = first;
    }
    const auto is_it = [&](float x) { return x == most || (std::isnan(x) && std::isnan(most)); };
    const float *stop = items + std::min(best + kBlock, width), *found = std::find_if(items + best, stop, is_it);
    place[row] = (int)(found == stop ? best : found - items);
  }
}

// As `eviction_victims` of slots.cpp.
void eviction_victims(const float *score, const int *position, const bool *is_protected, int *slot, int64_t num_lines,
                      int num_slots, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t line = 0; line < num_lines; ++line) {
    F lowest = Lanes::set(INFINITY);
    I lowest_position = Lanes::set(INT_MAX), lowest_first = Lanes::set(0);
    for (int first = 0; first < num_slots; first += kLanes) {
      const int64_t place = line * num_slots + first;
      const M there = Lanes::first(num_slots - first);
      int may_go[kLanes];
      for (int lane = 0; lane < kLanes; ++lane)
        may_go[lane] = first + lane < num_slots && !(is_protected && is_protected[place + lane]);
      const M goes = Lanes::less(Lanes::set(0), Lanes::load(may_go, Lanes::first(kLanes)));
      const F scores = score ? Lanes::load(score + place, there) : Lanes::set(0.0f);
      const I positions = Lanes::load(position + place, there);
      const M is_before = Lanes::both(Lanes::equal(scores, lowest), Lanes::less(positions, lowest_position));
      const M is_lower = Lanes::both(goes, Lanes::either(Lanes::less(scores, lowest), is_before));
      lowest = Lanes::select(is_lower, scores, lowest);
      lowest_position = Lanes::select(is_lower, positions, lowest_position);
      lowest_first = Lanes::select(is_lower, Lanes::set(first), lowest_first);
    }
    float scores[kLanes];
    int positions[kLanes], firsts[kLanes], best = 0;
    Lanes::store(scores, lowest);
    Lanes::store(positions, lowest_position);
    Lanes::store(firsts, lowest_first);
    for (int lane = 1; lane < kLanes; ++lane)
      if (scores[lane] < scores[best] || (scores[lane] == scores[best] && positions[lane] < positions[best]))
        best = lane;
    slot[line] = firsts[best] + best;
  }
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
