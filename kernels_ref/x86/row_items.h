// What decode rows read, by their plan.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace hpu_duo {
namespace {

// A unit that a row reads, and how much of it.
struct Item {
  int64_t unit;
  int count;          // leading slots that some token sees
  const int *limits;  // of each token; null where all see the same
};

// What each row reads, in the order of the store, its tails last.
std::vector<std::vector<Item>> items_of(const RowPlan &plan, int num_rows, int num_tokens, int num_slots) {
  std::vector<std::vector<Item>> items(num_rows);
  for (int unit = 0; unit < plan.num_owned; ++unit)
    if (plan.owner[unit] >= 0 && plan.owner[unit] < num_rows)
      items[plan.owner[unit]].push_back({unit, num_slots, nullptr});
  for (int row = 0; row < num_rows; ++row)
    for (int tail = 0; tail < plan.num_tails; ++tail) {
      const int place = row * plan.num_tails + tail;
      const int *limits = plan.visible + place * num_tokens;
      const int count = std::min(*std::max_element(limits, limits + num_tokens), num_slots);
      if (count > 0) items[row].push_back({plan.tail ? plan.tail[place] : row, count, num_tokens > 1 ? limits : nullptr});
    }
  if (plan.position)
    for (int row = 0; row < num_rows; ++row) {
      // Behind the last slot that holds something in any head, nothing is read.
      int count = 0;
      for (int head = 0; head < plan.position_heads; ++head) {
        const int *position = plan.position + ((int64_t)row * plan.position_heads + head) * num_slots;
        for (int slot = num_slots; slot > count; --slot)
          if (position[slot - 1] >= 0) count = slot;
      }
      const int *end = plan.end + row * num_tokens;
      if (*std::max_element(end, end + num_tokens) > 0 && count) items[row].push_back({row, count, nullptr});
    }
  return items;
}

// Parts of the passes over the query heads of a row and key/value head: with fewer of those than threads, more than one.
inline int parts_of(int num_passes, int num_lines, const RowPlan &plan, int num_threads) {
  // Heads add to one mass.
  if (plan.mass || num_lines < 1) return 1;
  return std::max(1, std::min(num_passes, (num_threads + num_lines - 1) / num_lines));
}

}  // namespace
}  // namespace hpu_duo
