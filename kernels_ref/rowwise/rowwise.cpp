// Small operators of a step, run together: a program is loaded, computed and stored row by row.
//
// A row is the last dimension of the values of a program, all other dimensions count rows. As many rows as stay
// in the first-level cache go through the whole program before the next ones, in float32, so what a list of
// operators would write to memory and read again never leaves the cache. Nothing is compiled for a program.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace hpu_duo {
namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int kMaxDims = 8;
constexpr int64_t kTileItems = 4096;  // of all slots together, so that they stay in the first-level cache
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
  int64_t num_dims, num_rows = 1, slot_items = 0, max_width = 1;
  int64_t sizes[kMaxDims];
  std::vector<int64_t> widths;         // of slots
  std::vector<Layout> inputs;
  std::vector<Output> outputs;
  std::vector<Instruction> prologue, body;

  int64_t tile_rows() const {
    return std::max<int64_t>(1, std::min(kMaxTileRows, kTileItems / std::max<int64_t>(1, slot_items)));
  }
};

// Rounded as a bfloat16 would be, to even.
inline float rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000;
  bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : even;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline void round_items(float *x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = rounded(x[i]);
}

// Walks over rows and knows where each one begins.
class RowCursor {
 public:
  RowCursor(const Program &program, const Layout &layout, int64_t row, const void *index)
      : program_(program), layout_(layout), index_(index) {
    offset_ = layout.offset;
    for (int64_t d = program.num_dims - 1; d >= 0; --d) {
      at_[d] = row % program.sizes[d];
      row /= program.sizes[d];
      offset_ += at_[d] * layout.strides[d];
    }
  }
  int64_t offset() const {
    if (!index_) return offset_;
    const int64_t d = layout_.index_dim;
    const int64_t place = layout_.index_offset + (d < 0 ? 0 : at_[d] * layout_.index_step);
    const int64_t chosen =
        layout_.index_is_long ? ((const int64_t *)index_)[place] : ((const int32_t *)index_)[place];
    return offset_ + chosen * layout_.index_stride;
  }
  void next() {
    for (int64_t d = program_.num_dims - 1; d >= 0; --d) {
      offset_ += layout_.strides[d];
      if (++at_[d] < program_.sizes[d]) return;
      offset_ -= layout_.strides[d] * program_.sizes[d];
      at_[d] = 0;
    }
  }

 private:
  const Program &program_;
  const Layout &layout_;
  const void *index_;
  int64_t offset_, at_[kMaxDims];
};

template <class T> inline float widen(T x) { return (float)x; }
template <> inline float widen<uint16_t>(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

template <class T> inline T narrow(float x) { return (T)x; }
template <> inline uint16_t narrow<uint16_t>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (uint16_t)rounded;
}
struct Rounded {
  uint16_t bits;
};
template <> inline Rounded narrow<Rounded>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return {(uint16_t)(bits >> 16)};
}
template <> inline bool narrow<bool>(float x) { return x != 0; }

template <class T> void load_rows(const Program &program, const Layout &in, const T *base, const void *index,
                                  float *to, int64_t row, int64_t rows) {
  RowCursor cursor(program, in, row, index);
  const int64_t width = in.width;
  if (!index && in.step == 1 && program.num_dims == 1 && in.strides[0] == width) {
    const T *from = base + cursor.offset();
    for (int64_t i = 0; i < rows * width; ++i) to[i] = widen(from[i]);
    return;
  }
  for (int64_t r = 0; r < rows; ++r, to += width, cursor.next()) {
    const T *from = base + cursor.offset();
    if (in.step == 1)
      for (int64_t i = 0; i < width; ++i) to[i] = widen(from[i]);
    else
      for (int64_t i = 0; i < width; ++i) to[i] = widen(from[i * in.step]);
  }
}

template <class T> void store_rows(const Program &program, const Layout &out, T *base, const float *from,
                                   int64_t row, int64_t rows) {
  RowCursor cursor(program, out, row, nullptr);
  const int64_t width = out.width;
  if (out.step == 1 && program.num_dims == 1 && out.strides[0] == width) {
    T *to = base + cursor.offset();
    for (int64_t i = 0; i < rows * width; ++i) to[i] = narrow<T>(from[i]);
    return;
  }
  for (int64_t r = 0; r < rows; ++r, from += width, cursor.next()) {
    T *to = base + cursor.offset();
    if (out.step == 1)
      for (int64_t i = 0; i < width; ++i) to[i] = narrow<T>(from[i]);
    else
      for (int64_t i = 0; i < width; ++i) to[i * out.step] = narrow<T>(from[i]);
  }
}

template <class F> void unary(F f, const float *a, float *to, int64_t count) {
  int64_t i = 0;
  for (; i + Vec::size() <= count; i += Vec::size()) f(Vec::loadu(a + i)).store(to + i);
  if (i < count) f(Vec::loadu(a + i, count - i)).store(to + i, count - i);
}

// A factor of width 1 counts for its whole row.
template <bool kRounds, class F> void binary(F f, const float *__restrict a, int64_t wa, const float *__restrict b,
                                             int64_t wb, float *__restrict to, int64_t width, int64_t rows) {
  auto finish = [](float x) { return kRounds ? rounded(x) : x; };
  if (wa == wb) {
    for (int64_t i = 0; i < rows * width; ++i) to[i] = finish(f(a[i], b[i]));
    return;
  }
  for (int64_t r = 0; r < rows; ++r, to += width) {
    if (wb == 1) {
      const float *left = a + r * wa, right = b[r];
      for (int64_t i = 0; i < width; ++i) to[i] = finish(f(left[i], right));
    } else {
      const float left = a[r], *right = b + r * wb;
      for (int64_t i = 0; i < width; ++i) to[i] = finish(f(left, right[i]));
    }
  }
}

template <class F> void binary(bool rounds, F f, const float *a, int64_t wa, const float *b, int64_t wb, float *to,
                               int64_t width, int64_t rows) {
  if (rounds)
    binary<true>(f, a, wa, b, wb, to, width, rows);
  else
    binary<false>(f, a, wa, b, wb, to, width, rows);
}

void copy_row(const float *from, int64_t width_of_source, float *to, int64_t width) {
  if (width_of_source == 1)
    std::fill(to, to + width, *from);
  else
    std::memcpy(to, from, width * sizeof(float));
}

void where(const float *c, int64_t wc, const float *a, int64_t wa, const float *b, int64_t wb, float *to,
           int64_t width, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, to += width, a += wa, b += wb) {
    if (wc == 1) {
      if (c[r] != 0)
        copy_row(a, wa, to, width);
      else
        copy_row(b, wb, to, width);
      continue;
    }
    const float *seen = c + r * wc;
    for (int64_t i = 0; i < width; ++i) to[i] = seen[i] != 0 ? a[wa == 1 ? 0 : i] : b[wb == 1 ? 0 : i];
  }
}

float sum_row(const float *a, int64_t width) {
  Vec sums[4] = {Vec(0), Vec(0), Vec(0), Vec(0)};
  int64_t i = 0;
  for (; i + 4 * Vec::size() <= width; i += 4 * Vec::size())
    for (int k = 0; k < 4; ++k) sums[k] = sums[k] + Vec::loadu(a + i + k * Vec::size());
  float lanes[Vec::size()];
  ((sums[0] + sums[1]) + (sums[2] + sums[3])).store(lanes);
  float total = 0;
  for (float lane : lanes) total += lane;
  for (; i < width; ++i) total += a[i];
  return total;
}

float largest_of_row(const float *a, int64_t width) {
  float largest = a[0];
  for (int64_t i = 1; i < width; ++i) largest = a[i] > largest || std::isnan(a[i]) ? a[i] : largest;
  return largest;
}

Vec sigmoid(Vec x) { return Vec(1) / (Vec(1) + x.neg().exp()); }
Vec gelu(Vec x) { return x * Vec(0.5f) * (Vec(1) + (x * Vec((float)M_SQRT1_2)).erf()); }
Vec gelu_tanh(Vec x) {
  const Vec inner = Vec((float)(M_SQRT2 * M_2_SQRTPI * 0.5)) * (x + Vec(0.044715f) * x * x * x);
  return Vec(0.5f) * x * (Vec(1) + inner.tanh());
}

// One instruction on some rows of the slots that begin at `at`.
void compute(const Program &p, const Instruction &x, float *const *at, int64_t rows) {
  float *to = at[x.to];
  const float *a = at[x.a], *b = at[x.b];
  const int64_t width = p.widths[x.to], wa = p.widths[x.a], wb = p.widths[x.b], count = rows * width;
  auto pair = [&](auto f) { binary(x.rounds, f, a, wa, b, wb, to, width, rows); };
  const bool is_pair = x.code >= kAdd && x.code <= kNotEqual;
  switch (x.code) {
    case kConstant: std::fill(to, to + count, x.number); break;
    case kPlace:
      for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * width + x.c, a + r * wa, wa * sizeof(float));
      break;
    case kCopy: std::memcpy(to, a, count * sizeof(float)); break;
    case kNeg: unary([](Vec v) { return v.neg(); }, a, to, count); break;
    case kAbs: unary([](Vec v) { return v.abs(); }, a, to, count); break;
    case kExp: unary([](Vec v) { return v.exp(); }, a, to, count); break;
    case kLog: unary([](Vec v) { return v.log(); }, a, to, count); break;
    case kSqrt: unary([](Vec v) { return v.sqrt(); }, a, to, count); break;
    case kRsqrt: unary([](Vec v) { return Vec(1) / v.sqrt(); }, a, to, count); break;
    case kReciprocal: unary([](Vec v) { return Vec(1) / v; }, a, to, count); break;
    case kSigmoid: unary(sigmoid, a, to, count); break;
    case kTanh: unary([](Vec v) { return v.tanh(); }, a, to, count); break;
    case kSilu:
      // What is rounded to 8 bits needs no more than 20.
      if (x.rounds)
        unary([](Vec v) { return v / (Vec(1) + v.neg().exp_u20()); }, a, to, count);
      else
        unary([](Vec v) { return v / (Vec(1) + v.neg().exp()); }, a, to, count);
      break;
    case kRelu: unary([](Vec v) { return at::vec::maximum(v, Vec(0)); }, a, to, count); break;
    case kGelu: unary(gelu, a, to, count); break;
    case kGeluTanh: unary(gelu_tanh, a, to, count); break;
    case kCos: unary([](Vec v) { return v.cos(); }, a, to, count); break;
    case kSin: unary([](Vec v) { return v.sin(); }, a, to, count); break;
    case kAdd: pair([](float u, float v) { return u + v; }); break;
    case kSub: pair([](float u, float v) { return u - v; }); break;
    case kMul: pair([](float u, float v) { return u * v; }); break;
    case kDiv: pair([](float u, float v) { return u / v; }); break;
    case kMax: pair([](float u, float v) { return u > v || u != u ? u : v; }); break;
    case kMin: pair([](float u, float v) { return u < v || u != u ? u : v; }); break;
    case kLess: pair([](float u, float v) { return u < v ? 1.f : 0.f; }); break;
    case kLessEqual: pair([](float u, float v) { return u <= v ? 1.f : 0.f; }); break;
    case kGreater: pair([](float u, float v) { return u > v ? 1.f : 0.f; }); break;
    case kGreaterEqual: pair([](float u, float v) { return u >= v ? 1.f : 0.f; }); break;
    case kEqual: pair([](float u, float v) { return u == v ? 1.f : 0.f; }); break;
    case kNotEqual: pair([](float u, float v) { return u != v ? 1.f : 0.f; }); break;
    case kWhere: where(a, wa, b, wb, at[x.c], p.widths[x.c], to, width, rows); break;
    case kSum:
      for (int64_t r = 0; r < rows; ++r) to[r] = sum_row(a + r * wa, wa);
      break;
    case kMean:
      for (int64_t r = 0; r < rows; ++r) to[r] = sum_row(a + r * wa, wa) / (float)wa;
      break;
    case kAmax:
      for (int64_t r = 0; r < rows; ++r) to[r] = largest_of_row(a + r * wa, wa);
      break;
    default: TORCH_CHECK(false, "expected an instruction, got ", x.code);
  }
  if (x.rounds && !is_pair) round_items(to, count);
}

struct Source {
  const void *data, *index;
};

void load(const Program &p, const Layout &in, Source from, float *to, int64_t row, int64_t rows) {
  switch (in.type) {
    case kFloat: load_rows(p, in, (const float *)from.data, from.index, to, row, rows); break;
    case kBfloat16: load_rows(p, in, (const uint16_t *)from.data, from.index, to, row, rows); break;
    default: load_rows(p, in, (const bool *)from.data, from.index, to, row, rows);
  }
}

void store(const Program &p, const Layout &out, void *data, const float *from, int64_t row, int64_t rows) {
  switch (out.type) {
    case kFloat: store_rows(p, out, (float *)data, from, row, rows); break;
    case kBfloat16: store_rows(p, out, (uint16_t *)data, from, row, rows); break;
    case kRounded: store_rows(p, out, (Rounded *)data, from, row, rows); break;
    default: store_rows(p, out, (bool *)data, from, row, rows);
  }
}

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
  std::vector<float *> at(p.widths.size());
  float *next = scratch(tile * p.slot_items + 16 * (int64_t)p.widths.size());
  for (size_t slot = 0; slot < at.size(); ++slot) {
    at[slot] = next;
    next += (tile * p.widths[slot] + 15) & ~(int64_t)15;
  }
  auto run = [&](const Instruction &x, int64_t row, int64_t rows) {
    if (x.code == kLoad)
      load(p, p.inputs[x.a], inputs[x.a], at[x.to], row, rows);
    else if (x.code == kStore)
      store(p, p.outputs[x.to].layout, outputs[x.to], at[x.a], row, rows);
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

Layout read_layout(Reader &read, int64_t num_dims) {
  Layout layout{};
  for (int64_t *field : {&layout.tensor, &layout.type, &layout.offset, &layout.width, &layout.step}) *field = read();
  for (int64_t d = 0; d < num_dims; ++d) layout.strides[d] = read();
  for (int64_t *field : {&layout.index, &layout.index_is_long, &layout.index_offset, &layout.index_step,
                         &layout.index_dim, &layout.index_stride})
    *field = read();
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
  for (int64_t left = read(); left > 0; --left) program->inputs.push_back(read_layout(read, program->num_dims));
  for (int64_t left = read(); left > 0; --left) {
    Output output;
    output.shape = read.list();
    output.strides = read.list();
    output.layout = read_layout(read, program->num_dims);
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
