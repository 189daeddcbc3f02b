// The kernels of float32 arithmetic as operators.cpp calls them: inputs and sums are float32, weights, keys and values
// are stored as bfloat16, float16 or float32. There is a table of them for each number of lanes.

#pragma once

#include <cstdint>

#include "codes.h"
#include "kernels.h"
#include "quantised.h"

namespace hpu_duo {

enum class Store { kBfloat16, kFloat16, kFloat32 };

// A packed weight, and where the products with it go.
struct FloatWeight {
  const void *packed;
  Store store;
  const float *bias;  // padded to whole panels, or null
  float *y;
  int64_t outputs;
};

struct FloatKernels {
  void (*linear)(const float *x, const FloatWeight *weights, int64_t num_weights, const int *live, int64_t rows,
                 int64_t inputs, int num_threads);
  void (*quantised_linears)(const float *x, const QuantisedWeight *weights, int64_t num_weights, const int *live,
                            int64_t rows, int64_t inputs, int num_threads);
  void (*int8_linears)(const Int8Inputs &in, const Int8Weight *weights, int64_t num_weights, const int *live,
                       int64_t rows, int num_threads);
  void (*attend_rows)(const float *q, const void *k, const void *v, Store store, const RowPlan &plan, float *attn,
                      float *largest, float *total, const int64_t *strides, const int *sizes, int num_threads);
  void (*attend_codes)(const float *q, bool is_rounded, const CodedVectors &k, const CodedVectors &v,
                       const RowPlan &plan, float *attn, float *largest, float *total, const int64_t *strides,
                       const int *sizes, int num_threads);
  void (*widen_codes)(const CodedVectors &from, const int64_t *unit, int64_t num_units, const int *sizes, void *to,
                      Store store, int num_threads);
  void (*attend)(const float *q, const void *k, const void *v, Store store, float *attn, float *largest, float *total,
                 float *workspace, const int64_t *strides, const int *sizes, int num_threads);
  void (*column_sums)(const float *q, const void *k, Store store, const float *lse, float *sums,
                      const int64_t *strides, const int *sizes, int num_threads);
  void (*place_of_largest)(const float *rows, int *place, int64_t num_rows, int64_t width, int num_threads);
  void (*eviction_victims)(const float *score, const int *position, const bool *is_protected, int *slot,
                           int64_t num_lines, int num_slots, int num_threads);
};

extern const FloatKernels kModelOfLanes, kEightLanes, kSixteenLanes;

}  // namespace hpu_duo
