// Products of rows with packed panels by tiles: AMX, or the model of it.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panels.h"
#include "tiles.h"

namespace hpu_duo {
namespace {

template <class Tiles>
class TileProduct {
 public:
  static constexpr int kRowStep = 2 * kTileRows;  // rows of a pass: two tiles of rows by two of outputs
  static constexpr int64_t kMaxRows = 256;
  static constexpr int64_t kBlockItems = 1 << 19;

  // Rows as tiles [rows / 16][inputs / 32][16][32]; rows behind the last one are 0.
  void lay_out(const bf16 *x, int64_t stride, int rows, int inputs) {
    static thread_local Buffer<bf16> buffer;
    rows_ = rows, steps_ = inputs / kDepth, num_tiles_ = (rows + kTileRows - 1) / kTileRows;
    bf16 *to = buffer.reserve((int64_t)num_tiles_ * steps_ * kTileItems);
    tiles_ = to;
    for (int first = 0; first < rows; first += kTileRows, to += (int64_t)steps_ * kTileItems)
      for (int row = 0; row < kTileRows; ++row) {
        const bf16 *from = x + (first + row) * stride;
        const bool is_there = first + row < rows;
        for (int step = 0; step < steps_; ++step)
          _mm512_store_si512(to + step * kTileItems + row * kDepth,
                             is_there ? _mm512_loadu_si512(from + step * kDepth) : _mm512_setzero_si512());
      }
  }

  // Panels lie `panel_items` apart.
  void multiply(const bf16 *weight, int64_t panel_items, int panels, const Outputs &out) const {
    const int passes = (num_tiles_ + 1) / 2;
    // Each pass fetches its share of the panel that follows; a single pass, what it will need soon.
    const int lines = (2 * kTileRows + passes - 1) / passes;
    for (int panel = 0; panel < panels; ++panel, weight += panel_items)
      for (int pass = 0; pass < passes; ++pass) {
        const bf16 *ahead = weight + (passes == 1 ? kAhead : panel_items + (int64_t)pass * steps_ * lines * kLineItems);
        if (2 * pass + 1 < num_tiles_)
          multiply_pair<2>(2 * pass, weight, panel, ahead, lines, out);
        else
          multiply_pair<1>(2 * pass, weight, panel, ahead, lines, out);
      }
  }

 private:
  static constexpr int kLineItems = 64 / (int)sizeof(bf16);
  static constexpr int kTileSums = kTileRows * kLanes;
  static constexpr int64_t kAhead = (16 << 10) / (int)sizeof(bf16);

  // Adds all inputs of one or two tiles of rows to the sums in the registers 0 to 3.
  template <int M>
  __attribute__((noinline)) static void add_steps(const bf16 *upper, const bf16 *lower, const bf16 *weight, int steps,
                                                  const bf16 *ahead, int lines) {
    for (int step = 0; step < steps; ++step) {
      for (int line = 0; line < lines; ++line, ahead += kLineItems) _mm_prefetch((const char *)ahead, _MM_HINT_T1);
      Tiles::template load<6>(weight, kTileBytes);
      Tiles::template load<4>(upper, kTileBytes);
      Tiles::template load<7>(weight + kTileItems, kTileBytes);
      if (M == 2) Tiles::template load<5>(lower, kTileBytes);
      Tiles::template multiply<0, 4, 6>();
      Tiles::template multiply<1, 4, 7>();
      if (M == 2) Tiles::template multiply<2, 5, 6>();
      if (M == 2) Tiles::template multiply<3, 5, 7>();
      weight += 2 * kTileItems, upper += kTileItems, lower += kTileItems;
    }
  }

  // One or two tiles of rows, from `tile` on, with one panel.
  template <int M>
  void multiply_pair(int tile, const bf16 *weight, int panel, const bf16 *ahead, int lines, const Outputs &out) const {
    const bf16 *upper = tiles_ + (int64_t)tile * steps_ * kTileItems, *lower = upper + (int64_t)steps_ * kTileItems;
    const int row = tile * kTileRows;
    if (out.is_first) {
      Tiles::template zero<0>();
      Tiles::template zero<1>();
      if (M == 2) Tiles::template zero<2>();
      if (M == 2) Tiles::template zero<3>();
    } else {
      const int64_t stride = out.sums_stride * (int64_t)sizeof(float);
      Tiles::template load<0>(out.sums_at(row, panel), stride);
      Tiles::template load<1>(out.sums_at(row, panel) + kLanes, stride);
      if (M == 2) Tiles::template load<2>(out.sums_at(row + kTileRows, panel), stride);
      if (M == 2) Tiles::template load<3>(out.sums_at(row + kTileRows, panel) + kLanes, stride);
    }
    add_steps<M>(upper, lower, weight, steps_, ahead, lines);
    if (!out.is_last) {
      const int64_t stride = out.sums_stride * (int64_t)sizeof(float);
      Tiles::template store<0>(out.sums_at(row, panel), stride);
      Tiles::template store<1>(out.sums_at(row, panel) + kLanes, stride);
      if (M == 2) Tiles::template store<2>(out.sums_at(row + kTileRows, panel), stride);
      if (M == 2) Tiles::template store<3>(out.sums_at(row + kTileRows, panel) + kLanes, stride);
      return;
    }
    // Little memory, used again at once: it has to stay in the first-level cache beside what streams through.
    Tiles::template store<0>(scratch(), kTileBytes);
    Tiles::template store<1>(scratch() + kTileSums, kTileBytes);
    finish(row, panel, out);
    if (M == 1) return;
    Tiles::template store<2>(scratch(), kTileBytes);
    Tiles::template store<3>(scratch() + kTileSums, kTileBytes);
    finish(row + kTileRows, panel, out);
  }

  void finish(int row, int panel, const Outputs &out) const {
    const float *sums = scratch();
    const int count = std::min(kTileRows, rows_ - row);
    for (int r = 0; r < count; ++r)
      out.finish(row + r, panel, _mm512_load_ps(sums + r * kLanes), _mm512_load_ps(sums + kTileSums + r * kLanes));
  }

  static float *scratch() {
    alignas(64) static thread_local float sums[2 * kTileSums];
    return sums;
  }

  Tiles registers_;
  const bf16 *tiles_ = nullptr;
  int rows_ = 0, steps_ = 0, num_tiles_ = 0;
};

}  // namespace
}  // namespace hpu_duo
