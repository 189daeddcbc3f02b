// Small operators of a step, run together: a program is loaded, computed and stored row by row.
//
// A row is the last dimension of the values of a program, all other dimensions count rows. As many rows as stay
// in the first-level cache go through the whole program before the next ones, so what a list of operators would write
// to memory and read again never leaves the cache. What is computed is float32; what is rounded is kept as bfloat16.
// Operands are read, and results written, where they lie in memory if their rows are evenly spaced there. Nothing is
// compiled for a program.

#include <memory>
#include <vector>

#include "compute.h"
#include "program.h"
#include "rows.h"

namespace hpu_duo {
namespace {

char *scratch(int64_t bytes) {
  static thread_local std::unique_ptr<char[]> memory;
  static thread_local int64_t size = 0;
  if (size < bytes + 64) {
    memory = std::make_unique<char[]>(bytes + 64);
    size = bytes + 64;
  }
  return (char *)(((uintptr_t)memory.get() + 63) & ~(uintptr_t)63);
}

int64_t whole_lines(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

// Some rows of a program: its slots, where they are now, and what they are loaded from and stored to.
class Tile {
 public:
  Tile(const Program &program, const Source *inputs, void *const *outputs, int64_t rows)
      : program_(program), inputs_(inputs), outputs_(outputs) {
    const int64_t floats = whole_lines(rows * program.most_items * (int64_t)sizeof(float));
    int64_t bytes = floats * Scratch::kParts;
    for (const Slot &slot : program.slots) bytes += whole_lines(rows * slot.bytes());
    char *next = scratch(bytes);
    scratch_ = (float *)next, scratch_items_ = floats / (int64_t)sizeof(float);
    next += floats * Scratch::kParts;
    for (const Slot &slot : program.slots) {
      own_.push_back({next, slot.width, slot.is_half});
      next += whole_lines(rows * slot.bytes());
    }
    slots_ = own_;
  }

  void run(const Instruction &x, int64_t row, int64_t rows) {
    if (x.code == kStore) {
      if (x.output < 0) store(program_, program_.outputs[x.to].layout, outputs_[x.to], slots_[x.a], row, rows);
      return;
    }
    View &to = slots_[x.to];
    to = own_[x.to];
    if (x.code == kLoad) {
      const Layout &in = program_.inputs[x.a];
      const bool is_as_needed = in.type == (to.is_half ? kBfloat16 : kFloat) && in.spacing != kUneven;
      // It is there already, and nobody writes to a slot before it is its own again.
      if (is_as_needed)
        to = lying(in, inputs_[x.a].data, row, to.is_half);
      else
        load(program_, in, inputs_[x.a], to, row, rows);
      return;
    }
    if (x.output >= 0) to = lying(program_.outputs[x.output].layout, outputs_[x.output], row, to.is_half);
    if (x.code == kConstant) to.stride = 0;
    compute({program_, x, slots_.data(), rows, Scratch(scratch_, scratch_items_)});
  }

 private:
  View lying(const Layout &layout, const void *data, int64_t row, bool is_half) const {
    const int64_t offset = RowCursor(program_, layout, row, nullptr).offset();
    return {(char *)data + offset * (is_half ? 2 : 4), layout.spacing, is_half};
  }

  const Program &program_;
  const Source *inputs_;
  void *const *outputs_;
  std::vector<View> own_, slots_;
  float *scratch_;
  int64_t scratch_items_;
};

}  // namespace

// Rows of a program, in a namespace for each set of instructions.
namespace HPU_DUO_VARIANT {

void run_rows(const Program &p, const Source *inputs, void *const *outputs, int64_t begin, int64_t end) {
  const int64_t most = std::min(p.tile_rows(), end - begin), line = p.has_lines() ? p.sizes[p.num_dims - 1] : end;
  Tile tile(p, inputs, outputs, most);
  for (const Instruction &x : p.prologue) tile.run(x, begin, most);
  for (int64_t row = begin, rows; row < end; row += rows) {
    rows = std::min({most, end - row, line - row % line});
    for (const Instruction &x : p.body) tile.run(x, row, rows);
  }
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
