// What a fused elementwise program is made of; kernels_ref/rowwise/__init__.py writes it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hpu_duo {

constexpr int kMaxDims = 8;
constexpr int64_t kTileBytes = 24 << 10;  // of all slots together: most of a first-level cache
constexpr int64_t kMaxTileRows = 64;
constexpr int64_t kLeastLine = 8;  // rows of a line that are worth a tile of their own
constexpr int64_t kParallelBytes = 32 << 10;  // of slots, that are worth a thread
constexpr int64_t kUneven = -1;

enum Type { kFloat = 0, kBfloat16 = 1, kBool = 2 };

// The numbers are those of kernels_ref/rowwise/__init__.py.
enum Code {
  kLoad, kConstant, kStore, kPlace, kCopy, kNeg, kAbs, kExp, kLog, kSqrt, kRsqrt, kReciprocal, kSigmoid, kTanh,
  kSilu, kRelu, kGelu, kGeluTanh, kCos, kSin, kAdd, kSub, kMul, kDiv, kMax, kMin, kLess, kLessEqual, kGreater,
  kGreaterEqual, kEqual, kNotEqual, kWhere, kSum, kMean, kMeanOfSquares, kAmax
};

// One tensor as rows: where row r begins, and how its items follow each other.
struct Layout {
  int64_t tensor, type, offset, width, step;
  int64_t strides[kMaxDims];
  // Numbers that choose rows; no tensor is -1, and a single number has no dimension, -1.
  int64_t index, index_is_long, index_offset, index_step, index_dim, index_stride;
  // From a row of a tile to the next one, if it is always the same and the items of a row are side by side; or kUneven.
  int64_t spacing;
};

struct Output {
  std::vector<int64_t> shape, strides;
  Layout layout;
};

struct Instruction {
  int64_t code, to, a, b, c;
  bool rounds;
  int64_t output;  // that the result is written to at once, and so need not be stored; or -1
  float number;
};

// A value that several rows have: floats or bfloat16.
struct Slot {
  int64_t width;
  bool is_half;

  int64_t bytes() const { return width * (is_half ? 2 : 4); }
};

struct Program {
  int64_t num_dims, num_rows = 1, row_bytes = 0, most_items = 1;
  int64_t sizes[kMaxDims];
  std::vector<Slot> slots;
  std::vector<Layout> inputs;
  std::vector<Output> outputs;
  std::vector<Instruction> prologue, body;

  int64_t tile_rows() const {
    return std::max<int64_t>(1, std::min(kMaxTileRows, kTileBytes / std::max<int64_t>(1, row_bytes)));
  }
  // Whether tiles end where the last dimension does, so that the rows of a tile are evenly spaced in every layout.
  bool has_lines() const { return num_dims == 1 || (num_dims > 1 && sizes[num_dims - 1] >= kLeastLine); }
};

// A tensor, and the numbers that choose its rows or null.
struct Source {
  const void *data, *index;
};

// Runs rows [begin, end) of a program; there is one for each set of instructions.
using RunRows = void(const Program &program, const Source *inputs, void *const *outputs, int64_t begin, int64_t end);

}  // namespace hpu_duo
