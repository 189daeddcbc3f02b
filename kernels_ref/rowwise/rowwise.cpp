// Small operators of a step, run together: a program is loaded, computed and stored row by row.
//
// A row is the last dimension of the values of a program, all other dimensions count rows. As many rows as stay
// in the first-level cache go through the whole program before the next ones, in float32, so what a list of
// operators would write to memory and read again never leaves the cache. Nothing is compiled for a program.

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

float *scratch(int64_t items) {
  static thread_local std::unique_ptr<float[]> memory;
  static thread_local int64_t size = 0;
  if (size < items + 16) {
    memory = std::make_unique<float[]>(items + 16);
    size = items + 16;
  }
  return (float *)(((uintptr_t)memory.get() + 63) & ~(uintptr_t)63);
}

void run_rows(const Program &p, const Source *inputs, void *const *outputs, int64_t begin, int64_t end) {
  const int64_t tile = std::min(p.tile_rows(), end - begin);
  c10::SmallVector<float *, 32> own(p.widths.size());
  float *next = scratch(tile * p.slot_items + 16 * (int64_t)p.widths.size());
  for (size_t slot = 0; slot < own.size(); ++slot) {
    own[slot] = next;
    next += (tile * p.widths[slot] + 15) & ~(int64_t)15;
  }
  auto at = own;
  auto run = [&](const Instruction &x, int64_t row, int64_t rows) {
    if (x.code == kStore) return store(p, p.outputs[x.to].layout, outputs[x.to], at[x.a], row, rows);
    if (x.code == kLoad && p.inputs[x.a].is_flat && p.inputs[x.a].type == kFloat) {
      // They are there already. Nobody writes to a slot before it is its own again.
      const Layout &in = p.inputs[x.a];
      at[x.to] = (float *)inputs[x.a].data + in.offset + row * in.width;
      return;
    }
    at[x.to] = own[x.to];
    if (x.code == kLoad)
      load(p, p.inputs[x.a], inputs[x.a], at[x.to], row, rows);
    else
      compute(p, x, at.data(), rows);
  };
  for (const Instruction &x : p.prologue) run(x, begin, tile);
  for (int64_t row = begin; row < end; row += tile)
    for (const Instruction &x : p.body) run(x, row, std::min(tile, end - row));
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

Layout read_layout(Reader &read, const Program &program) {
  const int64_t num_dims = program.num_dims;
  Layout layout{};
  for (int64_t *field : {&layout.tensor, &layout.type, &layout.offset, &layout.width, &layout.step}) *field = read();
  for (int64_t d = 0; d < num_dims; ++d) layout.strides[d] = read();
  for (int64_t *field : {&layout.index, &layout.index_is_long, &layout.index_offset, &layout.index_step,
                         &layout.index_dim, &layout.index_stride})
    *field = read();
  layout.is_flat = layout.index < 0 && (layout.step == 1 || layout.width == 1);
  int64_t distance = layout.width;
  for (int64_t d = num_dims - 1; d >= 0; distance *= program.sizes[d--])
    layout.is_flat &= layout.strides[d] == distance || program.sizes[d] == 1;
  return layout;
}

std::vector<Instruction> read_instructions(Reader &read, at::ArrayRef<double> constants) {
  std::vector<Instruction> list(read());
  for (Instruction &x : list) {
    for (int64_t *field : {&x.code, &x.to, &x.a, &x.b, &x.c}) *field = read();
    x.rounds = read() != 0;
    x.number = x.code == kConstant ? (float)constants[x.c] : 0;
  }
  return list;
}

int64_t build(at::IntArrayRef code, at::ArrayRef<double> constants) {
  Reader read(code);
  auto program = std::make_shared<Program>();
  const auto sizes = read.list();
  program->num_dims = (int64_t)sizes.size();
  TORCH_CHECK(program->num_dims <= kMaxDims, "expected at most ", kMaxDims, " dimensions of rows");
  for (size_t d = 0; d < sizes.size(); ++d) program->num_rows *= program->sizes[d] = sizes[d];
  program->widths = read.list();
  for (int64_t width : program->widths) program->slot_items += width;
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
  constexpr at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kBool, at::kBFloat16};
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
  const int64_t grain = std::max<int64_t>(1, kParallelItems / std::max<int64_t>(1, program->slot_items));
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
