// Fused elementwise programs as operators: built from their numbers, run with tensors, and released.

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../torch_operators.h"
#include "program.h"

namespace hpu_duo {

// Null in a library that was built for a machine without them.
namespace pairs { __attribute__((weak)) RunRows run_rows; }
namespace avx512 { __attribute__((weak)) RunRows run_rows; }
namespace avx2 { __attribute__((weak)) RunRows run_rows; }
namespace plain { __attribute__((weak)) RunRows run_rows; }

namespace {

using stable::Tensor;

RunRows *run_rows = nullptr;
std::shared_mutex mutex;
std::unordered_map<int64_t, std::shared_ptr<const Program>> programs;
int64_t next_number = 0;

// Chooses a set of instructions: 0 for none to 3, the numbers of kernels_ref/rowwise/__init__.py.
void use(int64_t number) {
  RunRows *const all[] = {plain::run_rows, avx2::run_rows, avx512::run_rows, pairs::run_rows};
  TORCH_CHECK_VALUE(number >= 0 && number < 4 && all[number], "expected instructions of this library, got ", number);
  run_rows = all[number];
}

class Reader {
 public:
  explicit Reader(const Tensor &numbers) : at_(numbers.const_data_ptr<int64_t>()), end_(at_ + numbers.numel()) {}
  int64_t operator()() {
    TORCH_CHECK_VALUE(at_ < end_, "expected a whole program, got a part of its numbers");
    return *at_++;
  }
  std::vector<int64_t> list() {
    std::vector<int64_t> items((*this)());
    for (int64_t &item : items) item = (*this)();
    return items;
  }

 private:
  const int64_t *at_, *end_;
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

std::vector<Instruction> read_instructions(Reader &read, const double *constants) {
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

int64_t build(const Tensor &code, const Tensor &constants) {
  Reader read(code);
  const double *const numbers = constants.const_data_ptr<double>();
  auto program = std::make_shared<Program>();
  const auto sizes = read.list();
  program->num_dims = (int64_t)sizes.size();
  TORCH_CHECK_VALUE(program->num_dims <= kMaxDims, "expected at most ", kMaxDims, " dimensions of rows");
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
  program->prologue = read_instructions(read, numbers);
  program->body = read_instructions(read, numbers);
  for (Instruction &x : program->body) lay_result(*program, x);
  std::unique_lock lock(mutex);
  programs[next_number] = program;
  return next_number++;
}

void release(int64_t number) {
  std::unique_lock lock(mutex);
  programs.erase(number);
}

// Calls f(begin, end) for parts of [0, count) of at least `grain`, in torch's number of threads.
template <class F> void for_each_part(int64_t count, int64_t grain, F f) {
  const int64_t parts = std::min<int64_t>(stable::get_num_threads(), (count + grain - 1) / grain);
  const int64_t size = parts > 0 ? (count + parts - 1) / parts : 0;
  if (parts <= 1) return f(0, count);
#pragma omp parallel for schedule(static) num_threads((int)parts)
  for (int64_t part = 0; part < parts; ++part)
    if (part * size < count) f(part * size, std::min(count, (part + 1) * size));
}

std::vector<Tensor> run(int64_t number, const std::vector<Tensor> &tensors) {
  std::shared_ptr<const Program> program;
  {
    std::shared_lock lock(mutex);
    const auto found = programs.find(number);
    TORCH_CHECK_VALUE(found != programs.end(), "expected the number of a program, got ", number);
    program = found->second;
  }
  constexpr stable::ScalarType types[] = {stable::kFloat, stable::kBFloat16, stable::kBool};
  std::vector<Source> inputs;
  std::vector<void *> outputs;
  inputs.reserve(program->inputs.size()), outputs.reserve(program->outputs.size());
  for (const Layout &in : program->inputs)
    inputs.push_back({tensors[in.tensor].data_ptr(), in.index < 0 ? nullptr : tensors[in.index].data_ptr()});
  std::vector<Tensor> results;
  results.reserve(program->outputs.size());
  for (const Output &out : program->outputs) {
    results.push_back(stable::empty_strided(out.shape, out.strides, {types[out.layout.type]}));
    outputs.push_back(results.back().data_ptr());
  }
  if (!program->num_rows) return results;
  const int64_t grain = std::max<int64_t>(1, kParallelBytes / std::max<int64_t>(1, program->row_bytes));
  for_each_part(program->num_rows, grain, [&](int64_t begin, int64_t end) {
    run_rows(*program, inputs.data(), outputs.data(), begin, end);
  });
  return results;
}

void offer(int64_t items, int64_t results);

Operators operators = Operators("hpu_duo_rowwise_v2")
                          .add<build>("build(Tensor code, Tensor constants) -> int")
                          .add_plain<use>("use(int instructions) -> ()")
                          .add_plain<offer>("offer(int items, int results) -> ()")
                          .add_plain<release>("release(int number) -> ()");

// Makes `run.i3o2`, for 3 tensors and 2 results, if it is not there yet.
void offer(int64_t items, int64_t results) {
  static std::set<std::pair<int64_t, int64_t>> offered;
  std::unique_lock lock(mutex);
  if (offered.insert({items, results}).second)
    operators.add_sizes<run>("run(int number, Tensor[] tensors) -> Tensor[]", items, results);
}

}  // namespace
}  // namespace hpu_duo
