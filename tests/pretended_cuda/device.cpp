// A CUDA device that is only pretended: registered in the CPU build of torch under the dispatch key CUDA itself.
//
// Tensors on it report "cuda", autograd runs on its device threads, operators that mix devices raise, and memory is
// 0xFF at birth (NaN) and 0xFE at death. Kernels are the CPU's, run at once, in the order in which they are queued.
// What streams, events, allocations and registrations do is written to a log, from which Python takes what is ordered.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::SymInt;
using c10::SymIntArrayRef;

namespace {

constexpr int kMaxDevices = 16;
constexpr size_t kBlockBytes = 512;

// ---- What happened, in order -------------------------------------------------------------------------------------

enum Kind : int32_t { ALLOCATE, FREE, RECORD, BLOCK, WAIT_EVENT, WAIT_STREAM, WAIT_DEVICE, KEEP_FOR, REGISTER, UNREGISTER };

struct Entry {
  int32_t kind;
  int32_t thread;
  int64_t device;
  int64_t stream;
  int64_t first;   // an address, or an event
  int64_t second;  // bytes
};

std::mutex the_mutex;
std::vector<Entry> the_log;
std::atomic<bool> is_logging{false};
std::atomic<int32_t> num_threads{0};
thread_local int32_t this_thread = num_threads++;

thread_local DeviceIndex this_device = 0;
thread_local int64_t this_stream[kMaxDevices] = {0};
int num_devices = 1;
std::atomic<int64_t> num_streams{0};
std::atomic<int64_t> num_events{0};

DeviceIndex index_of(Device device) { return device.index() < 0 ? this_device : device.index(); }

void note_locked(Kind kind, int64_t device, int64_t stream, int64_t first = 0, int64_t second = 0) {
  if (is_logging) the_log.push_back({kind, this_thread, device, stream, first, second});
}

void note(Kind kind, int64_t device, int64_t stream, int64_t first = 0, int64_t second = 0) {
  if (!is_logging) return;
  std::lock_guard<std::mutex> lock(the_mutex);
  note_locked(kind, device, stream, first, second);
}

// ---- Memory ------------------------------------------------------------------------------------------------------

struct Memory {
  int64_t total = int64_t(80) << 30;
  int64_t allowed = int64_t(80) << 30;
  int64_t allocated = 0, peak = 0;
  int64_t reserved = 0, reserved_peak = 0;
};
Memory memories[kMaxDevices];
struct Block {
  size_t bytes;
  DeviceIndex device;
};
std::map<uintptr_t, Block> blocks;      // on a device
std::map<uintptr_t, size_t> registered; // on the host

size_t rounded(size_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

void free_block(void* pointer) {
  if (!pointer) return;
  std::lock_guard<std::mutex> lock(the_mutex);
  auto block = blocks.find(reinterpret_cast<uintptr_t>(pointer));
  memories[block->second.device].allocated -= block->second.bytes;
  note_locked(FREE, block->second.device, 0, int64_t(pointer));
  memset(pointer, 0xFE, block->second.bytes);
  blocks.erase(block);
  free(pointer);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto device = Device(c10::kCUDA, this_device);
    if (!bytes) return {nullptr, nullptr, &free_block, device};
    size_t length = rounded(bytes);
    std::lock_guard<std::mutex> lock(the_mutex);
    auto& memory = memories[this_device];
    TORCH_CHECK_WITH(OutOfMemoryError, memory.allocated + int64_t(length) <= memory.allowed,
                     "CUDA out of memory. Tried to allocate ", bytes, " bytes on the pretended device ", int(this_device),
                     ", which may hold ", memory.allowed, " and holds ", memory.allocated);
    void* pointer = aligned_alloc(kBlockBytes, length);
    TORCH_CHECK(pointer, "the host has no ", length, " bytes for the pretended device");
    memset(pointer, 0xFF, length);
    blocks[reinterpret_cast<uintptr_t>(pointer)] = {length, this_device};
    memory.allocated += length;
    memory.peak = std::max(memory.peak, memory.allocated);
    memory.reserved = std::max(memory.reserved, memory.allocated);
    memory.reserved_peak = std::max(memory.reserved_peak, memory.reserved);
    note_locked(ALLOCATE, this_device, this_stream[this_device], int64_t(pointer), length);
    return {pointer, pointer, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override { memcpy(target, source, bytes); }
};
DeviceAllocator device_allocator;

int register_host(uintptr_t address, size_t bytes, bool by_a_call) {
  std::lock_guard<std::mutex> lock(the_mutex);
  for (auto& [start, length] : registered)
    if (address < start + length && start < address + bytes) return 712;  // cudaErrorHostMemoryAlreadyRegistered
  registered[address] = bytes;
  note_locked(REGISTER, by_a_call, 0, address, bytes);
  return 0;
}

int unregister_host(uintptr_t address) {
  std::lock_guard<std::mutex> lock(the_mutex);
  if (!registered.erase(address)) return 713;  // cudaErrorHostMemoryNotRegistered
  note_locked(UNREGISTER, 0, 0, address);
  return 0;
}

bool is_registered(uintptr_t address) {
  std::lock_guard<std::mutex> lock(the_mutex);
  auto after = registered.upper_bound(address);
  return after != registered.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

void free_pinned(void* pointer) {
  if (!pointer) return;
  {
    std::lock_guard<std::mutex> lock(the_mutex);
    // torch's own pinned allocator gives a block to nobody before the copies from and to it have ended: second = 1.
    registered.erase(reinterpret_cast<uintptr_t>(pointer));
    note_locked(UNREGISTER, 0, 0, int64_t(pointer), 1);
  }
  free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_pinned, Device(c10::kCPU)};
    size_t length = rounded(bytes);
    void* pointer = aligned_alloc(kBlockBytes, length);
    TORCH_CHECK(pointer, "the host has no ", length, " bytes to pin");
    memset(pointer, 0xFF, length);
    register_host(reinterpret_cast<uintptr_t>(pointer), length, false);
    return {pointer, pointer, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override { memcpy(target, source, bytes); }
};
PinnedAllocator pinned_allocator;

// ---- Streams and events ------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device device) const override {
    auto before = this_device;
    uncheckedSetDevice(device);
    return Device(c10::kCUDA, before);
  }
  Device getDevice() const override { return Device(c10::kCUDA, this_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "CUDA error: invalid device ordinal ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) this_device = device.index();
  }
  Stream getStream(Device device) const override {
    auto index = index_of(device);
    return Stream(Stream::UNSAFE, Device(c10::kCUDA, index), this_stream[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(c10::kCUDA, index_of(device)), 0);
  }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, Device(c10::kCUDA, index_of(device)), ++num_streams);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto index = stream.device_index();
    auto before = this_stream[index];
    this_stream[index] = stream.id();
    return Stream(Stream::UNSAFE, Device(c10::kCUDA, index), before);
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    auto name = ++num_events;
    *event = reinterpret_cast<void*>(name);
    note(RECORD, stream.device_index(), stream.id(), name);
  }
  void block(void* event, const Stream& stream) const override {
    note(BLOCK, stream.device_index(), stream.id(), int64_t(event));
  }
  bool queryEvent(void* event) const override {
    note(WAIT_EVENT, 0, 0, int64_t(event));
    return true;
  }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeEvent(void* event) const override { note(WAIT_EVENT, 0, 0, int64_t(event)); }
  void synchronizeStream(const Stream& stream) const override { note(WAIT_STREAM, stream.device_index(), stream.id()); }
  void synchronizeDevice(const DeviceIndex index) const override { note(WAIT_DEVICE, index, 0); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    note(KEEP_FOR, stream.device_index(), stream.id(), int64_t(data.get()));
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};

// ---- Random numbers ----------------------------------------------------------------------------------------------

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index, uint64_t seed)
      : c10::GeneratorImpl(Device(c10::kCUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inner(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index(), 0);
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};
std::vector<at::Generator> default_generators;
bool is_given[kMaxDevices] = {false};

at::Generator inner_of(const at::Generator& generator) { return generator.get<DeviceGenerator>()->inner; }

}  // namespace

namespace pretended_hooks {

struct CUDAHooks final : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasCUDA() const override { return num_devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generators.at(index < 0 ? this_device : index);
  }
  // Python has no other way to a device's own generator: it is the first that is asked for.
  at::Generator getNewGenerator(DeviceIndex asked) const override {
    auto index = asked < 0 ? this_device : asked;
    if (!std::exchange(is_given[index], true)) return default_generators.at(index);
    return at::make_generator<DeviceGenerator>(index, c10::default_rng_seed_val);
  }
  bool isPinnedPtr(const void* address) const override { return is_registered(reinterpret_cast<uintptr_t>(address)); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void* address) const override {
    std::lock_guard<std::mutex> lock(the_mutex);
    return Device(c10::kCUDA, blocks.at(reinterpret_cast<uintptr_t>(address)).device);
  }
  DeviceIndex current_device() const override { return this_device; }
  DeviceIndex getCurrentDevice() const override { return this_device; }
  void setCurrentDevice(DeviceIndex index) const override { this_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(this_device, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? this_device : exchangeDevice(index);
  }
  DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  void deviceSynchronize(DeviceIndex index) const override { note(WAIT_DEVICE, index, 0); }
};

}  // namespace pretended_hooks

namespace at {
using pretended_hooks::CUDAHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)
}  // namespace at

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, ::Guard)
}

// ---- Operators ---------------------------------------------------------------------------------------------------

namespace {

Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias = alias.conj();
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

Tensor& copy_(Tensor& target, const Tensor& source, bool) {
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  at::NoGradGuard no_grad;
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

Device chosen(std::optional<Device> device) {
  auto found = device.value_or(Device(c10::kCUDA, this_device));
  return found.has_index() ? found : Device(c10::kCUDA, this_device);
}

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype), format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           at::dtype_or_default(dtype));
}

at::Scalar item(const Tensor& tensor) { return at::_local_scalar_dense(on_cpu(tensor)); }

void record_stream(Tensor& tensor, Stream stream) {
  note(KEEP_FOR, stream.device_index(), stream.id(), int64_t(tensor.storage().data()));
}

const Tensor& resize_(const Tensor& tensor, SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(tensor.device());
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor as_strided(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

// Operators that take tensors of both devices on a real card, too.
const std::set<std::string> takes_both{"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
                                       "aten::copy_", "aten::_foreach_copy_", "aten::_fused_adamw_",
                                       "aten::_fused_adam_", "aten::_fused_sgd_"};

template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      if (tensor) visit(*tensor);
  }
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  bool has_cpu = false;
  DeviceIndex device = -1;
  for (size_t i = begin; i < stack->size(); ++i) {
    each_tensor((*stack)[i], [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      if (tensor.is_cuda()) {
        TORCH_CHECK(device < 0 || device == tensor.device().index() || !tensor.dim(), "Expected all tensors to be on the ",
                    "same device, but found at least two devices, cuda:", int(device), " and cuda:",
                    int(tensor.device().index()), ", in ", schema.name());
        if (device < 0 || tensor.dim()) device = tensor.device().index();
      } else if (tensor.device().is_cpu() && tensor.dim()) {
        has_cpu = true;
      }
    });
  }
  TORCH_CHECK(device < 0 || !has_cpu || takes_both.count(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(device),
              " and cpu, in ", schema.name());
  c10::DeviceGuard guard(Device(c10::kCUDA, device < 0 ? this_device : device));
  bool is_drawn = op.hasTag(at::Tag::nondeterministic_seeded);
  bool takes_generator = false;
  for (size_t i = begin; i < stack->size(); ++i) {
    const auto& argument = schema.arguments()[i - begin];
    if (argument.name() != "generator") continue;
    takes_generator = true;
    auto& value = (*stack)[i];
    if (value.isNone() && is_drawn) {
      value = inner_of(default_generators.at(this_device));
    } else if (!value.isNone()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                  generator.device().str(), "'");
      value = inner_of(generator);
    }
  }
  if (!is_drawn || takes_generator) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  // Such as dropout: it draws from the CPU's default generator, which stands in for the device's meanwhile.
  auto cpu = at::detail::getDefaultCPUGenerator();
  auto mine = inner_of(default_generators.at(this_device));
  struct Restored {
    at::Generator generator;
    Tensor state = generator.get_state();
    ~Restored() { generator.set_state(state); }
  } kept{cpu};
  cpu.set_state(mine.get_state());
  at::native::cpu_fallback(op, stack);
  mine.set_state(cpu.get_state());
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_local_scalar_dense", item);
  library.impl("record_stream", record_stream);
  library.impl("resize_", resize_);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  // One kernel on a card; without this torch takes it apart.
  library.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&fall_back>());
  library.impl("set_", at::native::set_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
}

const bool is_allocator_set = [] {
  c10::SetAllocator(c10::kCUDA, &device_allocator, 255);
  return true;
}();

}  // namespace

// ---- For Python --------------------------------------------------------------------------------------------------

extern "C" {

// Needed before the first operator that draws.
void pretended_set_devices(int count) {
  num_devices = count;
  while (int(default_generators.size()) < count)
    default_generators.push_back(at::make_generator<DeviceGenerator>(DeviceIndex(default_generators.size()),
                                                                      c10::default_rng_seed_val));
}
int pretended_num_devices() { return num_devices; }
int pretended_device() { return this_device; }
void pretended_set_device(int index) { this_device = DeviceIndex(index); }
int64_t pretended_stream(int device) { return this_stream[device]; }
void pretended_set_stream(int device, int64_t stream) { this_stream[device] = stream; }
int pretended_thread() { return this_thread; }

// Total, allowed, allocated, its peak, reserved, its peak: int64 each.
void pretended_memory(int device, int64_t* found) {
  std::lock_guard<std::mutex> lock(the_mutex);
  memcpy(found, &memories[device], sizeof(Memory));
}
void pretended_limit(int device, int64_t total, int64_t allowed) {
  std::lock_guard<std::mutex> lock(the_mutex);
  memories[device].total = total;
  memories[device].allowed = allowed;
}
void pretended_reset_peak(int device) {
  std::lock_guard<std::mutex> lock(the_mutex);
  memories[device].peak = memories[device].allocated;
  memories[device].reserved_peak = memories[device].reserved;
}
void pretended_empty_cache(int device) {
  std::lock_guard<std::mutex> lock(the_mutex);
  memories[device].reserved = memories[device].allocated;
}

int pretended_register(uintptr_t address, size_t bytes) { return register_host(address, bytes, true); }
int pretended_unregister(uintptr_t address) { return unregister_host(address); }

// Returns 1 if the device has no such memory: no exception may leave a function that Python calls.
int pretended_resize_storage(void* storage, size_t bytes) {
  try {
    auto* impl = static_cast<c10::StorageImpl*>(storage);
    c10::DeviceGuard guard(impl->device());
    auto data = device_allocator.allocate(bytes);
    if (size_t kept = std::min(bytes, impl->nbytes())) memcpy(data.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

void pretended_log(int is_on) {
  std::lock_guard<std::mutex> lock(the_mutex);
  is_logging = is_on;
  the_log.clear();
}
// Moves at most `capacity` entries, the earliest first.
int pretended_take(Entry* target, int capacity) {
  std::lock_guard<std::mutex> lock(the_mutex);
  int count = std::min<int>(capacity, the_log.size());
  std::copy_n(the_log.begin(), count, target);
  the_log.erase(the_log.begin(), the_log.begin() + count);
  return count;
}

}  // extern "C"
