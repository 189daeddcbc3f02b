// What the sources that are compiled for one number of lanes define, in a namespace of its own for each.

#pragma once

#include <vector>

#include "floats.h"

#if defined(HPU_DUO_VNNI)
#define HPU_DUO_VARIANT lanes16_vnni
#elif HPU_DUO_LANES == 16
#define HPU_DUO_VARIANT lanes16
#elif HPU_DUO_LANES == 8
#define HPU_DUO_VARIANT lanes8
#else
#define HPU_DUO_VARIANT lanes_model
#endif

namespace hpu_duo {
namespace HPU_DUO_VARIANT {

void linear(const float *x, const FloatWeight *weights, int64_t num_weights, const int *live, int64_t rows,
            int64_t inputs, int num_threads);

void quantised_linears(const float *x, const QuantisedWeight *weights, int64_t num_weights, const int *live,
                       int64_t rows, int64_t inputs, int num_threads);

void fp8_linears(const float *x, const std::vector<QuantisedWeight> &weights, int64_t rows, int64_t inputs,
                 int num_threads);

void int8_linears(const Int8Inputs &in, const Int8Weight *weights, int64_t num_weights, const int *live, int64_t rows,
                  int num_threads);

void attend_rows(const float *q, const void *k, const void *v, Store store, const RowPlan &plan, float *attn,
                 float *largest, float *total, const int64_t *strides, const int *sizes, int num_threads);

void attend_codes(const float *q, bool is_rounded, const CodedVectors &k, const CodedVectors &v, const RowPlan &plan,
                  float *attn, float *largest, float *total, const int64_t *strides, const int *sizes,
                  int num_threads);

void widen_codes(const CodedVectors &from, const int64_t *unit, int64_t num_units, const int *sizes, void *to,
                 Store store, int num_threads);

void attend(const float *q, const void *k, const void *v, Store store, float *attn, float *largest, float *total,
            float *workspace, const int64_t *strides, const int *sizes, int num_threads);

void column_sums(const float *q, const void *k, Store store, const float *lse, float *sums, const int64_t *strides,
                 const int *sizes, int num_threads);

void place_of_largest(const float *rows, int *place, int64_t num_rows, int64_t width, int num_threads);

void eviction_victims(const float *score, const int *position, const bool *is_protected, int *slot, int64_t num_lines,
                      int num_slots, int num_threads);

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
