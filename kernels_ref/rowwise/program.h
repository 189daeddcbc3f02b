// What a row program is made of; kernels_ref/rowwise/program.py writes it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hpu_duo {
namespace {

constexpr int kMaxDims = 8;
constexpr int64_t kTileItems = 8192;  // of all slots together: most of a first-level cache
constexpr int64_t kMaxTileRows = 64;
constexpr int64_t kParallelItems = 16384;

enum Type { kFloat = 0, kBfloat16 = 1, kBool = 2, kRounded = 3 };  // the last one: bfloat16, stored as it is

// The numbers are those of kernels_ref/rowwise/program.py.
enum Code {
  kLoad, kConstant, kStore, kPlace, kCopy, kNeg, kAbs, kExp, kLog, kSqrt, kRsqrt, kReciprocal, kSigmoid, kTanh,
  kSilu, kRelu, kGelu, kGeluTanh, kCos, kSin, kAdd, kSub, kMul, kDiv, kMax, kMin, kLess, kLessEqual, kGreater,
  kGreaterEqual, kEqual, kNotEqual, kWhere, kSum, kMean, kAmax
};

// One tensor as rows: where row r begins, and how its items follow each other.
struct Layout {
  int64_t tensor, type, offset, width, step;
  int64_t strides[kMaxDims];
  // Numbers that choose rows; no tensor is -1, and a single number has no dimension, -1.
  int64_t index, index_is_long, index_offset, index_step, index_dim, index_stride;
  bool is_flat;  // all items follow each other, row after row
};

struct Output {
  std::vector<int64_t> shape, strides;
  Layout layout;
};

struct Instruction {
  int64_t code, to, a, b, c;
  bool rounds;
  float number;
};

struct Program {
  int64_t num_dims, num_rows = 1, slot_items = 0;
  int64_t sizes[kMaxDims];
  std::vector<int64_t> widths;         // of slots
  std::vector<Layout> inputs;
  std::vector<Output> outputs;
  std::vector<Instruction> prologue, body;

  int64_t tile_rows() const {
    return std::max<int64_t>(1, std::min(kMaxTileRows, kTileItems / std::max<int64_t>(1, slot_items)));
  }
};

}  // namespace
}  // namespace hpu_duo
