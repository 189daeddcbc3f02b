// What this machine runs of a library that may have more; kernels_ref/x86/library.py tells it once.

#pragma once

#include <string_view>

#include "floats.h"

namespace hpu_duo {

struct Machine {
  int lanes = 0;  // of float32, at most
  bool has_pairs = false;  // products of pairs of bfloat16: AVX512-BF16
};

inline Machine machine;

// Null in a library that was built for a machine without them.
extern const FloatKernels kEightLanes __attribute__((weak));
extern const FloatKernels kSixteenLanes __attribute__((weak));

// The kernels of float32 arithmetic of a name that this machine runs, or null.
inline const FloatKernels *find_float_kernels(std::string_view name) {
  if (machine.lanes >= 16 && (name == "best" || name == "avx512")) return &kSixteenLanes;
  if (machine.lanes >= 8 && (name == "best" || name == "avx2")) return &kEightLanes;
  return name == "model" ? &kModelOfLanes : nullptr;
}

// Products of int8 with VNNI; null as above.
namespace lanes16_vnni {
void int8_linears(const Int8Inputs &in, const Int8Weight *weights, int64_t num_weights, const int *live, int64_t rows,
                  int num_threads) __attribute__((weak));
}

inline bool have_vnni() {
  return machine.lanes >= 16 && &lanes16_vnni::int8_linears && __builtin_cpu_supports("avx512vnni");
}

}  // namespace hpu_duo
