// The table of one number of lanes.

#include "floats.h"

#include "float_kernels.h"

namespace hpu_duo {

#if HPU_DUO_LANES == 16
const FloatKernels kSixteenLanes
#elif HPU_DUO_LANES == 8
const FloatKernels kEightLanes
#else
const FloatKernels kModelOfLanes
#endif
    {HPU_DUO_VARIANT::linear,           HPU_DUO_VARIANT::quantised_linears, HPU_DUO_VARIANT::int8_linears,
     HPU_DUO_VARIANT::attend_rows,      HPU_DUO_VARIANT::attend_codes,      HPU_DUO_VARIANT::widen_codes,
     HPU_DUO_VARIANT::attend,           HPU_DUO_VARIANT::column_sums,       HPU_DUO_VARIANT::place_of_largest,
     HPU_DUO_VARIANT::eviction_victims};

}  // namespace hpu_duo
