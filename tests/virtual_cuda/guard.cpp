// A device guard for a CUDA that is not there: one device; streams are numbers, kept per thread.
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>

using namespace c10;

static thread_local int64_t current_stream = 0;
static const Device GPU(DeviceType::CUDA, 0);

struct VirtualGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return Stream(Stream::UNSAFE, GPU, current_stream); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream getNewStream(Device, int = 0) const override {
    static std::atomic<int64_t> next{1};
    return Stream(Stream::UNSAFE, GPU, next++);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    auto before = current_stream;
    current_stream = stream.id();
    return Stream(Stream::UNSAFE, GPU, before);
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, VirtualGuard);
