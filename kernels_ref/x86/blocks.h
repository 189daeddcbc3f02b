// How work is cut into blocks, and memory for them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace hpu_duo {
namespace {

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// The largest step up to `most` that cuts `total` into nearly equal parts, as a multiple of `unit`.
inline int64_t even_step(int64_t total, int64_t most, int64_t unit) {
  const int64_t parts = divide_up(total, std::max(most / unit * unit, unit));
  return divide_up(divide_up(total, std::max<int64_t>(parts, 1)), unit) * unit;
}

// Calls `function` with the first row and the number of rows of each of the fewest parts of at most `most` rows, which
// are as even as can be: a pass over very few rows waits for its own sums.
template <class Function>
inline void for_even_parts(int64_t rows, int64_t most, const Function &function) {
  const int64_t parts = divide_up(rows, most);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = rows * part / parts;
    function(first, rows * (part + 1) / parts - first);
  }
}

// Memory of a thread that grows to what was asked for, aligned to cache lines.
template <typename T>
class Buffer {
 public:
  T *reserve(int64_t count) {
    if (count > count_) {
      const int64_t bytes = (count * (int64_t)sizeof(T) + 63) / 64 * 64;
      items_.reset((T *)std::aligned_alloc(64, bytes));
      if (!items_) std::abort();
      count_ = count;
    }
    return items_.get();
  }

 private:
  struct Free {
    void operator()(T *items) const { std::free(items); }
  };
  std::unique_ptr<T, Free> items_;
  int64_t count_ = 0;
};

}  // namespace
}  // namespace hpu_duo
