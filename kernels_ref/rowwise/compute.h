// What the instructions of a fused elementwise program compute.
//
// The instructions that most steps consist of read and write floats and bfloat16 where they lie; all others see
// floats side by side, which are made for them where values lie otherwise.

#pragma once

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <stdexcept>

#include "functions.h"
#include "rows.h"

namespace hpu_duo {
namespace {

// Floats for values that are not floats side by side: three operands and a result.
class Scratch {
 public:
  Scratch(float *memory, int64_t items) : memory_(memory), items_(items) {}
  float *part(int number) const { return memory_ + number * items_; }

  static constexpr int kParts = 4;

 private:
  float *memory_;
  int64_t items_;
};

// One instruction, and the rows that it works on.
struct Work {
  const Program &program;
  const Instruction &instruction;
  const View *slots;
  int64_t rows;
  Scratch scratch;

  int64_t width_of(int64_t slot) const { return program.slots[slot].width; }
  int64_t width() const { return width_of(instruction.to); }
  const View &to() const { return slots[instruction.to]; }

  // A slot as floats side by side.
  const float *floats(int64_t slot, int part) const {
    const View &view = slots[slot];
    const int64_t width = width_of(slot);
    if (!view.is_half && view.stride == width) return (const float *)view.data;
    float *copy = scratch.part(part);
    with_items(view, [&](const auto *from) {
      if (width == 1)
        convert_apart(from, view.stride, copy, 1, rows);
      else
        for (int64_t r = 0; r < rows; ++r) convert(from + r * view.stride, copy + r * width, width);
    });
    return copy;
  }

  // Lets f write floats side by side, and rounds and puts them where the result lies.
  template <class F> void write(F f) const {
    const View &view = to();
    const int64_t items = width();
    const bool is_there = !view.is_half && view.stride == items;
    float *result = is_there ? (float *)view.data : scratch.part(3);
    f(result);
    if (instruction.rounds && !view.is_half) round_items(result, rows * items);
    if (is_there) return;
    with_items(view, [&](auto *at) {
      for (int64_t r = 0; r < rows; ++r) convert(result + r * items, at + r * view.stride, items);
    });
  }
};

// Calls f(i) for every kLanes items of a row, then g(i) for each item that is left.
template <class F, class G> inline __attribute__((always_inline)) void for_each_lanes(int64_t count, F f, G g) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    f(i);
    f(i + kLanes);
    f(i + 2 * kLanes);
    f(i + 3 * kLanes);
  }
  for (; i + kLanes <= count; i += kLanes) f(i);
  for (; i < count; ++i) g(i);
}

template <class A, class To, class F> void map(F f, const A *__restrict a, To *__restrict to, int64_t count) {
  for_each_lanes(
      count, [&](int64_t i) { put(to + i, f(get(a + i))); },
      [&](int64_t i) { put_one(to + i, first_of(f(every(get_one(a + i))))); });
}

template <class A, class B, class To, class F> void map(F f, const A *__restrict a, const B *__restrict b,
                                                        To *__restrict to, int64_t count) {
  for_each_lanes(
      count, [&](int64_t i) { put(to + i, f(get(a + i), get(b + i))); },
      [&](int64_t i) { put_one(to + i, first_of(f(every(get_one(a + i)), every(get_one(b + i))))); });
}

// A function of each item, where it lies.
template <class F> void in_place(const Work &work, F f) {
  const View &a = work.slots[work.instruction.a], &to = work.to();
  const int64_t width = work.width();
  const bool is_dense = a.stride == width && to.stride == width;
  const int64_t lines = is_dense ? 1 : work.rows, count = is_dense ? work.rows * width : width;
  with_items(a, [&](const auto *from) {
    with_items(to, [&](auto *result) {
      for (int64_t r = 0; r < lines; ++r) map(f, from + r * a.stride, result + r * to.stride, count);
    });
  });
  // A half is rounded as it is put.
  if (work.instruction.rounds && !to.is_half)
    for (int64_t r = 0; r < work.rows; ++r) round_items(to.row<float>(r), width);
}

// A function of two items, where they lie. An operand of width 1 counts for its whole row.
template <class F> void pair_in_place(const Work &work, F f) {
  const Instruction &x = work.instruction;
  const View &a = work.slots[x.a], &b = work.slots[x.b], &to = work.to();
  const int64_t width = work.width(), wa = work.width_of(x.a), wb = work.width_of(x.b), rows = work.rows;
  if (width == 1) {
    const float *left = (const float *)a.data, *right = (const float *)b.data;
    float *result = (float *)to.data;
    for (int64_t r = 0; r < rows; ++r) {
      const float value = first_of(f(every(left[r * a.stride]), every(right[r * b.stride])));
      put_one(result + r * to.stride, x.rounds ? rounded(value) : value);
    }
    return;
  }
  with_items(to, [&](auto *result) {
    if (wa == wb) {
      const bool is_dense = a.stride == width && b.stride == width && to.stride == width;
      const int64_t lines = is_dense ? 1 : rows, count = is_dense ? rows * width : width;
      with_items(a, [&](const auto *left) {
        with_items(b, [&](const auto *right) {
          for (int64_t r = 0; r < lines; ++r)
            map(f, left + r * a.stride, right + r * b.stride, result + r * to.stride, count);
        });
      });
      return;
    }
    const View &wide = wa == 1 ? b : a, &single = wa == 1 ? a : b;
    with_items(wide, [&](const auto *from) {
      for (int64_t r = 0; r < rows; ++r) {
        const Lanes one = every(*single.row<float>(r));
        if (wa == 1)
          map([&](Lanes y) { return f(one, y); }, from + r * wide.stride, result + r * to.stride, width);
        else
          map([&](Lanes y) { return f(y, one); }, from + r * wide.stride, result + r * to.stride, width);
      }
    });
  });
}

// A function of floats side by side, by vectors.
template <class F> void unary(const Work &work, F f) {
  const float *a = work.floats(work.instruction.a, 0);
  const int64_t count = work.rows * work.width();
  work.write([&](float *to) {
    int64_t i = 0;
    for (; i + Vec::size() <= count; i += Vec::size()) f(Vec::loadu(a + i)).store(to + i);
    if (i < count) f(Vec::loadu(a + i, count - i)).store(to + i, count - i);
  });
}

template <class F> void binary(const Work &work, F f) {
  const Instruction &x = work.instruction;
  const float *a = work.floats(x.a, 0), *b = work.floats(x.b, 1);
  const int64_t width = work.width(), wa = work.width_of(x.a), wb = work.width_of(x.b);
  work.write([&](float *__restrict to) {
    if (wa == wb) {
      for (int64_t i = 0; i < work.rows * width; ++i) to[i] = f(a[i], b[i]);
      return;
    }
    for (int64_t r = 0; r < work.rows; ++r, to += width) {
      const float *left = a + r * wa, *right = b + r * wb;
      if (wb == 1)
        for (int64_t i = 0; i < width; ++i) to[i] = f(left[i], *right);
      else
        for (int64_t i = 0; i < width; ++i) to[i] = f(*left, right[i]);
    }
  });
}

void where(const Work &work) {
  const Instruction &x = work.instruction;
  const float *c = work.floats(x.a, 0), *a = work.floats(x.b, 1), *b = work.floats(x.c, 2);
  const int64_t width = work.width(), wc = work.width_of(x.a), wa = work.width_of(x.b), wb = work.width_of(x.c);
  work.write([&](float *to) {
    for (int64_t r = 0; r < work.rows; ++r, to += width, c += wc, a += wa, b += wb) {
      if (wc == 1) {
        const float *from = *c != 0 ? a : b;
        if ((*c != 0 ? wa : wb) == 1)
          std::fill(to, to + width, *from);
        else
          convert(from, to, width);
        continue;
      }
      for (int64_t i = 0; i < width; ++i) to[i] = c[i] != 0 ? a[wa == 1 ? 0 : i] : b[wb == 1 ? 0 : i];
    }
  });
}

// One number for each row.
template <class F> void reduce(const Work &work, F f) {
  const View &a = work.slots[work.instruction.a];
  const int64_t width = work.width_of(work.instruction.a);
  work.write([&](float *to) {
    with_items(a, [&](const auto *from) {
      for (int64_t r = 0; r < work.rows; ++r) to[r] = f(from + r * a.stride, width);
    });
  });
}

void place(const Work &work) {
  const Instruction &x = work.instruction;
  const View &a = work.slots[x.a], &to = work.to();
  with_items(a, [&](const auto *from) {
    with_items(to, [&](auto *items) {
      for (int64_t r = 0; r < work.rows; ++r)
        convert(from + r * a.stride, items + r * to.stride + x.c, work.width_of(x.a));
    });
  });
}

void silu(const Work &work) {
  // What is rounded to 8 bits needs no more than 20.
#if defined(CPU_CAPABILITY_AVX512)
  if (work.to().is_half) return in_place(work, [](Lanes x) { return quick_silu(x); });
#else
  if (work.to().is_half) return unary(work, [](Vec v) { return v / (Vec(1) + v.neg().exp_u20()); });
#endif
  unary(work, [](Vec v) { return v / (Vec(1) + v.neg().exp()); });
}

void compute(const Work &work) {
  switch (work.instruction.code) {
    case kConstant: *work.to().row<float>(0) = work.instruction.number; break;
    case kPlace: place(work); break;
    case kCopy: in_place(work, [](auto v) { return v; }); break;
    case kNeg: in_place(work, [](auto v) { return -v; }); break;
    case kSilu: silu(work); break;
    case kAbs: unary(work, [](Vec v) { return v.abs(); }); break;
    case kExp: unary(work, [](Vec v) { return v.exp(); }); break;
    case kLog: unary(work, [](Vec v) { return v.log(); }); break;
    case kSqrt: unary(work, [](Vec v) { return v.sqrt(); }); break;
    case kRsqrt: unary(work, [](Vec v) { return Vec(1) / v.sqrt(); }); break;
    case kReciprocal: unary(work, [](Vec v) { return Vec(1) / v; }); break;
    case kSigmoid: unary(work, [](Vec v) { return Vec(1) / (Vec(1) + v.neg().exp()); }); break;
    case kTanh: unary(work, [](Vec v) { return v.tanh(); }); break;
    case kRelu: unary(work, [](Vec v) { return at::vec::maximum(v, Vec(0)); }); break;
    case kGelu: unary(work, gelu); break;
    case kGeluTanh: unary(work, gelu_tanh); break;
    case kCos: unary(work, [](Vec v) { return v.cos(); }); break;
    case kSin: unary(work, [](Vec v) { return v.sin(); }); break;
    case kAdd: pair_in_place(work, [](auto u, auto v) { return u + v; }); break;
    case kSub: pair_in_place(work, [](auto u, auto v) { return u - v; }); break;
    case kMul: pair_in_place(work, [](auto u, auto v) { return u * v; }); break;
    case kDiv: pair_in_place(work, [](auto u, auto v) { return u / v; }); break;
    case kMax: binary(work, [](float u, float v) { return u > v || u != u ? u : v; }); break;
    case kMin: binary(work, [](float u, float v) { return u < v || u != u ? u : v; }); break;
    case kLess: binary(work, [](float u, float v) { return u < v ? 1.f : 0.f; }); break;
    case kLessEqual: binary(work, [](float u, float v) { return u <= v ? 1.f : 0.f; }); break;
    case kGreater: binary(work, [](float u, float v) { return u > v ? 1.f : 0.f; }); break;
    case kGreaterEqual: binary(work, [](float u, float v) { return u >= v ? 1.f : 0.f; }); break;
    case kEqual: binary(work, [](float u, float v) { return u == v ? 1.f : 0.f; }); break;
    case kNotEqual: binary(work, [](float u, float v) { return u != v ? 1.f : 0.f; }); break;
    case kWhere: where(work); break;
    case kSum: reduce(work, [](const auto *a, int64_t n) { return sum(a, n); }); break;
    case kMean: reduce(work, [](const auto *a, int64_t n) { return sum(a, n) / (float)n; }); break;
    case kMeanOfSquares: reduce(work, [](const auto *a, int64_t n) { return sum_of_squares(a, n) / (float)n; }); break;
    case kAmax: reduce(work, [](const auto *a, int64_t n) { return largest(a, n); }); break;
    default: throw std::runtime_error("expected an instruction");
  }
}

}  // namespace
}  // namespace hpu_duo
