// Rows of tensors: where they begin, and how they are read and written.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "program.h"

namespace hpu_duo {
namespace {

// Rows of a tile, evenly spaced: a slot's, or those of a tensor where they lie.
struct View {
  void *data;
  int64_t stride;  // items from a row to the next one
  bool is_half;

  template <class T> T *row(int64_t r) const { return (T *)data + r * stride; }
};

// Calls f with a pointer to the first item, as what it is.
template <class F> void with_items(const View &view, F f) {
  if (view.is_half)
    f((Half *)view.data);
  else
    f((float *)view.data);
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

inline float get_one(const bool *from) { return *from; }
inline void put_one(bool *to, float x) { *to = x != 0; }

template <class From, class To> void convert(const From *__restrict from, To *__restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) put_one(to + i, get_one(from + i));
}
inline void convert(const Half *__restrict from, Half *__restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Items that lie `from_step` and `to_step` apart.
template <class From, class To> void convert_apart(const From *from, int64_t from_step, To *to, int64_t to_step,
                                                   int64_t count) {
  if (from_step == 1 && to_step == 1) return convert(from, to, count);
  for (int64_t i = 0; i < count; ++i) put_one(to + i * to_step, get_one(from + i * from_step));
}

// Calls f with a pointer to the items of a tensor.
template <class F> void with_type(int64_t type, const void *data, F f) {
  switch (type) {
    case kFloat: return f((float *)data);
    case kBfloat16: return f((Half *)data);
    default: return f((bool *)data);
  }
}

void load(const Program &p, const Layout &in, Source from, const View &to, int64_t row, int64_t rows) {
  with_type(in.type, from.data, [&](auto *base) {
    with_items(to, [&](auto *items) {
      for_each_line(p, in, from.index, row, rows, [&](int64_t first, int64_t count, int64_t stride) {
        if (in.width == 1)
          convert_apart(base + first, stride, items, to.stride, count);
        else
          for (int64_t r = 0; r < count; ++r)
            convert_apart(base + first + r * stride, in.step, items + r * to.stride, 1, in.width);
        items += count * to.stride;
      });
    });
  });
}

void store(const Program &p, const Layout &out, void *data, const View &from, int64_t row, int64_t rows) {
  with_type(out.type, data, [&](auto *base) {
    with_items(from, [&](const auto *items) {
      for_each_line(p, out, nullptr, row, rows, [&](int64_t first, int64_t count, int64_t stride) {
        if (out.width == 1)
          convert_apart(items, from.stride, base + first, stride, count);
        else
          for (int64_t r = 0; r < count; ++r)
            convert_apart(items + r * from.stride, 1, base + first + r * stride, out.step, out.width);
        items += count * from.stride;
      });
    });
  });
}

}  // namespace
}  // namespace hpu_duo
