// A device for tests, "sealed": the host cannot read its memory, and it does everything as late as it may.
//
// An address of its memory is a page that nobody may touch; what is in the memory lies elsewhere, so code on the host
// that follows such an address dies. Work is only noted in the queue of a stream when it is asked for, and done when
// somebody waits for it: for the stream, for an event recorded on it, or by a copy that blocks. Until then memory holds
// poison or what was there before, so whoever reads too soon gets wrong values, each time. `set_eager` turns to the other
// extreme, work that is done when it is asked for, which shows memory that is used anew too soon.
//
// Kernels are those of the CPU: inputs are copied to the host, in the order of the stream; results are noted like any
// other copy. Random numbers come from a generator of the device's own.

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr auto SEALED = c10::DeviceType::PrivateUse1;
constexpr int POISON = 0xA5;
constexpr size_t PAGE = 4096;
const Device HERE(SEALED, 0);

[[noreturn]] void die(const char* why) {
  std::fprintf(stderr, "sealed device: %s\n", why);
  std::abort();
}

// Memory and streams

struct Memory {
  std::vector<uint8_t> content;
  StreamId home;                // the stream it was made on, which alone may use it without a word
  std::set<StreamId> visitors;  // streams that said so
};

struct Task {
  std::function<void()> run;
  uintptr_t host;  // the memory of the host that it reads or writes
  size_t size;
};

struct Queue {
  std::deque<Task> tasks;
  uint64_t issued = 0, done = 0;
};

struct Event {
  StreamId stream = 0;
  uint64_t mark = 0;  // how much of that stream comes before it
};

std::recursive_mutex lock;
std::map<uintptr_t, Memory> memories;
std::map<uintptr_t, size_t> pinned;
std::map<StreamId, Queue> queues;
StreamId newest_stream = 0;
bool is_eager = false;
uint64_t late_copies = 0;  // that moved pinned memory after the call that asked for them
thread_local StreamId current_stream = 0;
thread_local bool in_kernel = false;

using Guarded = std::lock_guard<std::recursive_mutex>;

uintptr_t number(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

void drain(StreamId stream, uint64_t mark) {
  auto& queue = queues[stream];
  while (queue.done < mark) {
    auto task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    task.run();
    ++queue.done;
  }
}

void drain_stream(StreamId stream) {
  drain(stream, queues[stream].issued);
}

void drain_all() {
  for (StreamId stream = 0; stream <= newest_stream; ++stream) drain_stream(stream);
}

void note(std::function<void()> run, const void* host = nullptr, size_t size = 0) {
  auto& queue = queues[current_stream];
  queue.tasks.push_back({std::move(run), number(host), size});
  ++queue.issued;
  if (is_eager) drain_stream(current_stream);
}

bool is_waiting(uintptr_t host, size_t size) {
  for (auto& [stream, queue] : queues)
    for (auto& task : queue.tasks)
      if (task.size && task.host < host + size && host < task.host + task.size) return true;
  return false;
}

uint8_t* content_at(uintptr_t address, size_t size) {
  auto found = memories.upper_bound(address);
  if (found == memories.begin()) die("a copy from or to memory that was given back");
  --found;
  auto& content = found->second.content;
  if (address + size > found->first + content.size()) die("a copy from or to memory that was given back");
  return content.data() + (address - found->first);
}

void* make_memory(size_t size) {
  Guarded guard(lock);
  size_t pages = (size + PAGE - 1) / PAGE * PAGE;
  void* address = mmap(nullptr, pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) die("no room for addresses");
  memories[number(address)] = {std::vector<uint8_t>(size, POISON), current_stream, {}};
  return address;
}

void drop_memory(void* address) {
  Guarded guard(lock);
  auto& memory = memories.at(number(address));
  for (auto stream : memory.visitors) drain_stream(stream);
  StreamId before = current_stream;
  current_stream = memory.home;
  note([address] {
    size_t size = memories.at(number(address)).content.size();
    memories.erase(number(address));
    munmap(address, (size + PAGE - 1) / PAGE * PAGE);
  });
  current_stream = before;
}

struct SealedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? make_memory(size) : nullptr;
    return {data, data, data ? &drop_memory : &nothing, HERE};
  }
  static void nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return &drop_memory; }
  void copy_data(void* to, const void* from, size_t size) const override {
    Guarded guard(lock);
    note([=] { std::memmove(content_at(number(to), size), content_at(number(from), size), size); });
  }
};
SealedAllocator allocator;
REGISTER_ALLOCATOR(SEALED, &allocator);

bool is_pinned(uintptr_t address, size_t size) {
  auto found = pinned.upper_bound(address);
  if (found == pinned.begin()) return false;
  --found;
  return address + size <= found->first + found->second;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Guarded guard(lock);
    void* data = std::aligned_alloc(PAGE, (size + PAGE) / PAGE * PAGE);
    pinned[number(data)] = size;
    return {data, data, &drop, Device(c10::kCPU)};
  }
  static void drop(void* data) {
    Guarded guard(lock);
    if (is_waiting(number(data), pinned.at(number(data)))) drain_all();  // as allocators do that note events
    pinned.erase(number(data));
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
PinnedAllocator pinned_allocator;

// Copies

size_t extent_bytes(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return (last + 1) * tensor.element_size();
}

// What lies between the first and the last element of a tensor of the device, seen as that tensor on the host.
Tensor on_host(const Tensor& tensor) {
  drain_stream(current_stream);
  auto bytes = extent_bytes(tensor);
  auto flat = at::empty({static_cast<int64_t>(bytes / tensor.element_size())}, tensor.options().device(c10::kCPU));
  std::memcpy(flat.mutable_data_ptr(), content_at(number(tensor.const_data_ptr()), bytes), bytes);
  return flat.as_strided(tensor.sizes(), tensor.strides(), 0);
}

void note_write(const Tensor& to, const void* bytes, size_t size) {
  auto staged = std::make_shared<std::vector<uint8_t>>(size);
  std::memcpy(staged->data(), bytes, size);
  auto address = number(to.const_data_ptr());
  note([=] { std::memcpy(content_at(address, size), staged->data(), size); });
}

void to_host(const Tensor& from, const Tensor& to, bool is_plain, bool non_blocking) {
  auto size = to.nbytes();
  void* host = to.mutable_data_ptr();
  if (!is_plain && non_blocking && to.is_contiguous() && is_pinned(number(host), size)) {
    auto bytes = extent_bytes(from);
    auto sizes = from.sizes().vec(), strides = from.strides().vec();
    auto target = at::from_blob(host, sizes, to.options());
    auto kind = from.options().device(c10::kCPU);
    auto address = number(from.const_data_ptr());
    std::memset(host, POISON, size);
    auto run = [=] { target.copy_(at::from_blob(content_at(address, bytes), sizes, strides, kind)), ++late_copies; };
    note(run, host, size);
  } else if (!is_plain) {
    to.copy_(on_host(from));
  } else if (non_blocking && is_pinned(number(host), size)) {
    auto address = number(from.const_data_ptr());
    std::memset(host, POISON, size);
    note([=] { std::memcpy(host, content_at(address, size), size), ++late_copies; }, host, size);
  } else {
    drain_stream(current_stream);
    std::memcpy(host, content_at(number(from.const_data_ptr()), size), size);
  }
}

void to_device(const Tensor& from, const Tensor& to, bool is_plain, bool non_blocking) {
  auto size = to.nbytes();
  const void* host = from.const_data_ptr();
  if (is_plain && non_blocking && is_pinned(number(host), size)) {
    auto address = number(to.const_data_ptr());
    note([=] { std::memcpy(content_at(address, size), host, size), ++late_copies; }, host, size);
    return;
  }
  if (is_plain) {
    note_write(to, host, size);
  } else {
    auto values = on_host(to);
    values.copy_(from);
    note_write(to, values.const_data_ptr(), extent_bytes(to));
  }
  if (!non_blocking && !in_kernel) drain_stream(current_stream);  // the results of kernels are late
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  Guarded guard(lock);
  bool is_plain = from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() && from.is_contiguous() &&
      to.is_contiguous() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
  if (!to.is_privateuseone()) {
    to_host(from, to, is_plain, non_blocking);
  } else if (!from.is_privateuseone()) {
    to_device(from, to, is_plain, non_blocking);
  } else if (is_plain) {
    auto source = number(from.const_data_ptr()), target = number(to.const_data_ptr());
    auto size = to.nbytes();
    note([=] { std::memmove(content_at(target, size), content_at(source, size), size); });
  } else {
    to_device(on_host(from), to, false, true);
  }
  return to;
}

void grow(const c10::Storage& storage, size_t size) {
  Guarded guard(lock);
  auto fresh = allocator.allocate(size);
  auto kept = std::min(size, storage.nbytes());
  if (kept) allocator.copy_data(fresh.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

const Tensor& resize_tensor(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* made = self.unsafeGetTensorImpl();
  made->set_sizes_contiguous(size);
  auto wanted = (self.storage_offset() + self.numel()) * self.element_size();
  if (wanted > static_cast<int64_t>(self.storage().nbytes())) grow(self.storage(), wanted);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resize_tensor(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

Tensor make_empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  auto kind = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), kind, format);
}

Tensor make_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device>,
    std::optional<bool>) {
  auto kind = c10::dtype_or_default(dtype);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, kind);
}

// Streams, events, the device

struct SealedGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SEALED; }
  Device exchangeDevice(Device) const override { return HERE; }
  Device getDevice() const override { return HERE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return stream_of(current_stream); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return getNewStream(HERE, 0); }
  Stream getNewStream(Device, int) const override {
    Guarded guard(lock);
    return stream_of(++newest_stream);
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = stream_of(current_stream);
    current_stream = stream.id();
    return before;
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Guarded guard(lock);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {stream.id(), queues[stream.id()].issued};
  }
  void block(void* event, const Stream& stream) const override {
    Guarded guard(lock);
    if (!event) return;
    auto [other, mark] = *static_cast<Event*>(event);
    auto before = exchangeStream(stream);
    note([other = other, mark = mark] { drain(other, mark); });
    exchangeStream(before);
  }
  bool queryEvent(void* event) const override {
    Guarded guard(lock);
    return !event || queues[static_cast<Event*>(event)->stream].done >= static_cast<Event*>(event)->mark;
  }
  void synchronizeEvent(void* event) const override {
    Guarded guard(lock);
    if (event) drain(static_cast<Event*>(event)->stream, static_cast<Event*>(event)->mark);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const Stream& stream) const override {
    Guarded guard(lock);
    return queues[stream.id()].tasks.empty();
  }
  void synchronizeStream(const Stream& stream) const override {
    Guarded guard(lock);
    drain_stream(stream.id());
  }
  void synchronizeDevice(DeviceIndex) const override {
    Guarded guard(lock);
    drain_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Guarded guard(lock);
    if (data.get()) memories.at(number(data.get())).visitors.insert(stream.id());
  }
  static Stream stream_of(StreamId id) { return Stream(Stream::UNSAFE, HERE, id); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SealedGuard);

// Random numbers

struct SealedGenerator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();

  SealedGenerator() : GeneratorImpl(HERE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  SealedGenerator* clone_impl() const override {
    auto* made = new SealedGenerator;
    made->inner = inner.clone();
    return made;
  }
};

const at::Generator& default_generator() {
  static auto made = at::make_generator<SealedGenerator>();
  return made;
}

Tensor kept_elements(const Tensor& like, double probability) {
  return at::empty_like(like, like.options().dtype(at::kBool)).bernoulli_(probability);
}

std::tuple<Tensor, Tensor> drop_out(const Tensor& input, double probability, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = kept_elements(input, 1 - probability);
  return {at::mul(at::mul(input, mask), 1 / (1 - probability)), mask};
}

// Kernels

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto type = arguments[at].type();
    if (auto inner = type->cast<c10::OptionalType>()) type = inner->getElementType();
    if (type->kind() != c10::TypeKind::GeneratorType) continue;
    auto& value = (*stack)[first + at];
    auto given = value.isNone() ? default_generator() : value.toGenerator();
    if (given.device().type() == SEALED) value = static_cast<SealedGenerator*>(given.unsafeGetGeneratorImpl())->inner;
  }
  struct Inside {
    bool before = in_kernel;
    Inside() { in_kernel = true; }
    ~Inside() { in_kernel = before; }
  } inside;
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", make_empty);
  library.impl("empty_strided", make_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize_tensor);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("native_dropout", drop_out);
}

struct SealedHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<SealedGenerator>(); }
  Device getDeviceFromPtr(void*) const override { return HERE; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    Guarded guard(lock);
    return is_pinned(number(data), 1);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { grow(storage, size); }
};

int register_host(uintptr_t address, size_t size, unsigned) {
  Guarded guard(lock);
  pinned[address] = size;
  return 0;
}

int unregister_host(uintptr_t address) {
  Guarded guard(lock);
  if (is_waiting(address, pinned.at(address))) die("memory that copies wait for was unregistered");
  pinned.erase(address);
  return 0;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new SealedHooks);
  module.def("default_generator", [] { return default_generator(); });
  module.def("register_host", register_host);
  module.def("unregister_host", unregister_host);
  module.def("late_copies", [] { return late_copies; });
  module.def("set_eager", [](bool value) { is_eager = value; });
}
