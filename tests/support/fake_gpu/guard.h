// What a CPU build of torch lacks for tensors of device "cuda": a device guard that does nothing,
// and hooks that say that CUDA is the accelerator. No CUDA is linked.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace fake_gpu {
using namespace c10;

inline Device first() { return Device(DeviceType::CUDA, 0); }
inline Stream only_stream() { return Stream(Stream::DEFAULT, first()); }

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return first(); }
  Device getDevice() const override { return first(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return only_stream(); }
  Stream getDefaultStream(Device) const override { return only_stream(); }
  Stream getNewStream(Device, int) const override { return only_stream(); }
  Stream exchangeStream(Stream) const noexcept override { return only_stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return GetAllocator(kCPU); }
  Device getDeviceFromPtr(void*) const override { return first(); }
};

inline void install() {
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(new Guard());
  // The object that getCUDAHooks() has made holds no data: its class is exchanged.
  auto& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (&hooks) Hooks();
}
}  // namespace fake_gpu
