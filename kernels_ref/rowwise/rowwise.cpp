// Small operators of a step, run together: a program is loaded, computed and stored row by row.
//
// A row is the last dimension of the values of a program, all other dimensions count rows. As many rows as stay
// in the first-level cache go through the whole program before the next ones, so what a list of operators would write
// to memory and read again never leaves the cache. What is computed is float32; what is rounded is kept as bfloat16.
// Operands are read, and results written, where they lie in memory if their rows are evenly spaced there. Nothing is
// compiled for a program.

#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
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
  c10::SmallVector<View, 32> own_, slots_;
  float *scratch_;
  int64_t scratch_items_;
};

void run_rows(const Program &p, const Source *inputs, void *const *outputs, int64_t begin, int64_t end) {
  const int64_t most = std::min(p.tile_rows(), end - begin), line = p.has_lines() ? p.sizes[p.num_dims - 1] : end;
  Tile tile(p, inputs, outputs, most);
  for (const Instruction &x : p.prologue) tile.run(x, begin, most);
  for (int64_t row = begin, rows; row < end; row += rows) {
    rows = std::min({most, end - row, line - row % line});
    for (const Instruction &x : p.body) tile.run(x, row, rows);
  }
}

std::shared_mutex mutex;
std::unordered_map<int64_t, std::shared_ptr<const Program>> programs;
int64_t next_number = 0;

class Reader {
 public:
  explicit Reader(at::IntArrayRef numbers) : numbers_(numbers) {}
  int64_t operator()() {
    TORCH_CHECK(at_ < numbers_.size(), "expected a whole program, got ", numbers_.size(), " numbers of it");
    return numbers_[at_++];
  }
  std::vector<int64_t> list() {
    std::vector<int64_t> items((*this)());
    for (int64_t &item : items) item = (*this)();
    return items;
  }

 private:
  at::IntArrayRef numbers_;
  size_t at_ = 0;
};

int64_t spacing(const Program &program, const Layout &layout) {
  if (layout.index >= 0 || (layout.step != 1 && layout.width != 1)) return kUneven;
  if (program.has_lines()) return layout.strides[program.num_dims - 1];
  bool is_flat = true, is_same = true;
  int64_t distance = layout.width;
  for (int64_t d = program.num_dims - 1; d >= 0; distance *= program.sizes[d--]) {
    is_flat &= layout.strides[d] == distance || program.sizes[d] == 1;
    is_same &= layout.strides[d] == 0 || program.sizes[d] == 1;
  }
  return is_same ? 0 : is_flat ? layout.width : kUneven;
}

Layout read_layout(Reader &read, const Program &program) {
  const int64_t num_dims = program.num_dims;
  Layout layout{};
  for (int64_t *field : {&layout.tensor, &layout.type, &layout.offset, &layout.width, &layout.step}) *field = read();
  for (int64_t d = 0; d < num_dims; ++d) layout.strides[d] = read();
  for (int64_t *field : {&layout.index, &layout.index_is_long, &layout.index_offset, &layout.index_step,
                         &layout.index_dim, &layout.index_stride})
    *field = read();
  layout.spacing = spacing(program, layout);
  return layout;
}

std::vector<Instruction> read_instructions(Reader &read, at::ArrayRef<double> constants) {
  std::vector<Instruction> list(read());
  for (Instruction &x : list) {
    for (int64_t *field : {&x.code, &x.to, &x.a, &x.b, &x.c}) *field = read();
    x.rounds = read() != 0;
    x.output = read();
    x.number = x.code == kConstant ? (float)constants[x.c] : 0;
  }
  return list;
}

// Leaves a result where its output is, if it can be written there; see Instruction.
void lay_result(const Program &program, Instruction &x) {
  if (x.output < 0) return;
  const Slot &slot = program.slots[x.code == kStore ? x.a : x.to];
  const Layout &layout = program.outputs[x.output].layout;
  if (layout.spacing == kUneven || layout.type != (slot.is_half ? kBfloat16 : kFloat)) x.output = -1;
}

int64_t build(at::IntArrayRef code, at::ArrayRef<double> constants) {
  Reader read(code);
  auto program = std::make_shared<Program>();
  const auto sizes = read.list();
  program->num_dims = (int64_t)sizes.size();
  TORCH_CHECK(program->num_dims <= kMaxDims, "expected at most ", kMaxDims, " dimensions of rows");
  for (size_t d = 0; d < sizes.size(); ++d) program->num_rows *= program->sizes[d] = sizes[d];
  for (int64_t left = read(); left > 0; --left) {
    const int64_t width = read();
    const Slot slot{width, read() != 0};
    program->slots.push_back(slot);
    program->row_bytes += slot.bytes();
    program->most_items = std::max(program->most_items, width);
  }
  for (int64_t left = read(); left > 0; --left) program->inputs.push_back(read_layout(read, *program));
  for (int64_t left = read(); left > 0; --left) {
    Output output;
    output.shape = read.list();
    output.strides = read.list();
    output.layout = read_layout(read, *program);
    program->outputs.push_back(output);
  }
  program->prologue = read_instructions(read, constants);
  program->body = read_instructions(read, constants);
  for (Instruction &x : program->body) lay_result(*program, x);
  std::unique_lock lock(mutex);
  programs[next_number] = program;
  return next_number++;
}

void release(int64_t number) {
  std::unique_lock lock(mutex);
  programs.erase(number);
}

std::vector<at::Tensor> run(int64_t number, at::TensorList tensors) {
  std::shared_ptr<const Program> program;
  {
    std::shared_lock lock(mutex);
    const auto found = programs.find(number);
    TORCH_CHECK(found != programs.end(), "expected the number of a program, got ", number);
    program = found->second;
  }
  constexpr at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kBool};
  c10::SmallVector<Source, 16> inputs;
  c10::SmallVector<void *, 16> outputs;
  for (const Layout &in : program->inputs)
    inputs.push_back({tensors[in.tensor].const_data_ptr(), in.index < 0 ? nullptr : tensors[in.index].const_data_ptr()});
  std::vector<at::Tensor> results;
  for (const Output &out : program->outputs) {
    results.push_back(at::empty_strided(out.shape, out.strides, at::TensorOptions(types[out.layout.type])));
    outputs.push_back(results.back().data_ptr());
  }
  if (!program->num_rows) return results;
  const int64_t grain = std::max<int64_t>(1, kParallelBytes / std::max<int64_t>(1, program->row_bytes));
  at::parallel_for(0, program->num_rows, grain, [&](int64_t begin, int64_t end) {
    run_rows(*program, inputs.data(), outputs.data(), begin, end);
  });
  return results;
}

}  // namespace
}  // namespace hpu_duo

TORCH_LIBRARY(hpu_duo_rowwise, m) {
  m.def("build(int[] code, float[] constants) -> int", &hpu_duo::build);
  m.def("release(int number) -> ()", &hpu_duo::release);
  m.def("run(int number, Tensor[] tensors) -> Tensor[]", &hpu_duo::run);
}
