// A device guard for the HPU device type that does nothing.
//
// torch asks the guard of a device type before it touches a tensor of that type, and stock torch has
// none for HPU. The simulated device keeps its data in host memory, so there is nothing to switch.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kOnlyDevice(DeviceType::HPU, 0);

struct SimulatedHpuGuard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::HPU; }
  Device exchangeDevice(Device) const override { return kOnlyDevice; }
  Device getDevice() const override { return kOnlyDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};

c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::HPU, new SimulatedHpuGuard());

}  // namespace
