// Rows of tensors: where they begin, and how they are read and written.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "program.h"

namespace hpu_duo {
namespace {

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
  // Rows from here on, at one distance from each other, that do not leave the last dimension.
  int64_t rows_of_line() const {
    const int64_t last = program_.num_dims - 1;
    return last < 0 || (index_ && layout_.index_dim == last) ? 1 : program_.sizes[last] - at_[last];
  }
  int64_t stride() const { return program_.num_dims ? layout_.strides[program_.num_dims - 1] : 0; }
  // Goes on by rows of the same line, or to the next line.
  void skip(int64_t rows) {
    for (int64_t d = program_.num_dims - 1; d >= 0; --d, rows = 1) {
      offset_ += rows * layout_.strides[d];
      at_[d] += rows;
      if (at_[d] < program_.sizes[d]) return;
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

// Calls f(first, count, stride) for rows that begin at items first, first + stride, ... of a tensor.
template <class F> void for_each_line(const Program &program, const Layout &layout, const void *index, int64_t row,
                                      int64_t rows, F f) {
  for (RowCursor cursor(program, layout, row, index); rows > 0;) {
    const int64_t count = std::min(rows, cursor.rows_of_line());
    f(cursor.offset(), count, cursor.stride());
    cursor.skip(count);
    rows -= count;
  }
}

template <class T> void widen_items(const T *__restrict from, float *__restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}

template <class T> void narrow_items(const float *__restrict from, T *__restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = narrow<T>(from[i]);
}

template <class T> void load_rows(const Program &program, const Layout &in, const T *base, const void *index,
                                  float *to, int64_t row, int64_t rows) {
  const int64_t width = in.width;
  if (in.is_flat) return widen_items(base + in.offset + row * width, to, rows * width);
  for_each_line(program, in, index, row, rows, [&](int64_t first, int64_t count, int64_t stride) {
    const T *from = base + first;
    if (width == 1)
      for (int64_t r = 0; r < count; ++r) to[r] = widen(from[r * stride]);
    else if (in.step == 1)
      for (int64_t r = 0; r < count; ++r) widen_items(from + r * stride, to + r * width, width);
    else
      for (int64_t r = 0; r < count; ++r)
        for (int64_t i = 0; i < width; ++i) to[r * width + i] = widen(from[r * stride + i * in.step]);
    to += count * width;
  });
}

template <class T> void store_rows(const Program &program, const Layout &out, T *base, const float *from,
                                   int64_t row, int64_t rows) {
  const int64_t width = out.width;
  if (out.is_flat) return narrow_items(from, base + out.offset + row * width, rows * width);
  for_each_line(program, out, nullptr, row, rows, [&](int64_t first, int64_t count, int64_t stride) {
    T *to = base + first;
    if (width == 1)
      for (int64_t r = 0; r < count; ++r) to[r * stride] = narrow<T>(from[r]);
    else if (out.step == 1)
      for (int64_t r = 0; r < count; ++r) narrow_items(from + r * width, to + r * stride, width);
    else
      for (int64_t r = 0; r < count; ++r)
        for (int64_t i = 0; i < width; ++i) to[r * stride + i * out.step] = narrow<T>(from[r * width + i]);
    from += count * width;
  });
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

}  // namespace
}  // namespace hpu_duo
