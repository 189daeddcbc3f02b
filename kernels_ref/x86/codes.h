// Keys or values of few bits, as they lie in a store.

#pragma once

#include <cstdint>

namespace hpu_duo {

// int8; nibbles, those of the first half of a vector in the low halves of its bytes; e4m3.
enum class Code { kInt8, kInt4, kFp8 };

// A vector is its codes times a scale, and a zero if they are nibbles. Bytes of a vector lie side by side, and so do
// scales, or pairs of a scale and a zero, of neighbouring slots: bfloat16.
struct CodedVectors {
  const uint8_t *codes;
  const uint16_t *meta;  // null: scale 1
  Code code;
  int64_t unit, head, slot;      // strides of codes, in bytes
  int64_t meta_unit, meta_head;  // strides of scales or pairs, in numbers of 16 bits
};

}  // namespace hpu_duo
