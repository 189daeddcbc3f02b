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
    {HPU_DUO_VARIANT::linear};

}  // namespace hpu_duo
