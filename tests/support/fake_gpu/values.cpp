// A pretended CUDA device for a CPU build of torch: tensors of device "cuda" with real numbers in
// host memory. An operator runs its CPU kernel on the memory of its arguments. Autograd, FSDP, views,
// storages and c10d see device "cuda" throughout. No CUDA is linked.
#include "guard.h"

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {
using namespace at;

std::atomic<int64_t> live{0}, peak{0}, syncs{0};

// ---- memory --------------------------------------------------------------------------------------

struct Block {
  void* data;
  size_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  live -= block->size;
  c10::free_cpu(block->data);
  delete block;
}

struct Memory final : c10::Allocator {
  DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    // Memory that was freed is not zero on a GPU either: NaN in every floating dtype.
    if (data) memset(data, 0xFF, bytes);
    int64_t now = live += bytes, before = peak.load();
    while (now > before && !peak.compare_exchange_weak(before, now)) {
    }
    return {data, new Block{data, bytes}, &release, fake_gpu::first()};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

Memory& memory() {
  static Memory made;
  return made;
}

// ---- one memory, two devices ---------------------------------------------------------------------

// The same memory with the tag of another device; the result keeps the storage alive.
Storage retagged(const Storage& storage, DeviceType type) {
  auto* kept = new Storage(storage);
  auto drop = [](void* context) { delete static_cast<Storage*>(context); };
  auto device = type == DeviceType::CPU ? Device(type) : fake_gpu::first();
  DataPtr data(storage.mutable_data(), kept, drop, device);
  return Storage(c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(type),
      /*resizable=*/true));
}

// A tensor of the sizes and strides of `like`, on `storage`.
Tensor viewed(const Tensor& like, Storage storage, DispatchKey key) {
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) out._set_conj(true);
  if (like.is_neg()) out._set_neg(true);
  return out;
}

Tensor on_host(const Tensor& tensor) {
  return viewed(tensor, retagged(tensor.storage(), DeviceType::CPU), DispatchKey::CPU);
}

// The numbers of a host tensor in memory of the pretended device, which is counted.
Tensor on_device(const Tensor& host) {
  size_t bytes = host.storage().nbytes();
  auto storage = Storage(c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), bytes, memory().allocate(bytes), &memory(), true));
  if (bytes) memcpy(storage.mutable_data(), host.storage().data(), bytes);
  return viewed(host, std::move(storage), DispatchKey::CUDA);
}

// ---- an operator ---------------------------------------------------------------------------------

// These take host tensors beside tensors of the device.
const std::set<std::string> MIXED = {
    "aten::index",  "aten::_index_put_impl_", "aten::index_put_",
    "aten::index_put", "aten::set_", "aten::_fused_adamw_",
    "aten::_foreach_add_", "aten::is_same_size"};
const std::set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"};

struct Call {
  std::vector<std::pair<Tensor, Tensor>> tensors;  // as given, and on the host
  bool from_host = false;                          // a host tensor with dimensions is an argument

  Tensor give(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      from_host |= tensor.device().is_cpu() && tensor.dim();
      return tensor;
    }
    tensors.emplace_back(tensor, on_host(tensor));
    return tensors.back().second;
  }

  IValue give(const IValue& value) {
    if (value.isTensor()) return give(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor& tensor : value.toTensorVector()) out.push_back(give(tensor));
      return out;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> out;
      for (const auto& each : value.toListRef()) {
        if (each.isNone()) out.push_back(std::nullopt);
        else out.push_back(give(each.toTensor()));
      }
      return out;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return IValue(Device(kCPU));
    if (value.isGenerator()) return IValue();
    return value;
  }

  // A result that is an argument, or a view of one, is so on the device too.
  Tensor take(const Tensor& host) const {
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (const auto& [given, alias] : tensors)
      if (host.is_same(alias)) return given;
    if (host.storage().data())
      for (const auto& [given, alias] : tensors)
        if (host.storage().unsafeGetStorageImpl() == alias.storage().unsafeGetStorageImpl())
          return viewed(host, given.storage(), DispatchKey::CUDA);
    return on_device(host);
  }

  IValue take(const IValue& value) const {
    if (value.isTensor()) return take(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> out;
    for (const Tensor& tensor : value.toTensorVector()) out.push_back(take(tensor));
    return out;
  }

  // Arguments that the kernel has resized, for instance with out=.
  void resize() const {
    for (const auto& [given, host] : tensors) {
      auto* impl = given.unsafeGetTensorImpl();
      if (host.storage().data() != given.storage().data() && host.storage().nbytes())
        impl->set_storage_keep_dtype(on_device(host).storage());
      else if (host.sizes() == given.sizes() && host.strides() == given.strides())
        continue;
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }
};

std::vector<IValue> popped(torch::jit::Stack* stack, size_t count) {
  std::vector<IValue> out;
  for (auto& value : torch::jit::last(*stack, count)) out.push_back(value);
  torch::jit::drop(*stack, count);
  return out;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  auto arguments = popped(stack, schema.arguments().size());
  Call call;
  bool for_device = false;
  for (auto& value : arguments) {
    for_device |= value.isDevice() && value.toDevice().is_cuda();
    stack->push_back(call.give(value));
  }
  for_device |= !call.tensors.empty();
  TORCH_CHECK(
      !call.from_host || call.tensors.empty() || MIXED.count(name),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
      "cpu! (", name, ")");
  if (WAITING.count(name)) ++syncs;
  op.callBoxed(stack);
  auto results = popped(stack, schema.returns().size());
  call.resize();
  for (auto& value : results) stack->push_back(for_device ? call.take(value) : value);
}

// ---- operators that make, move and view memory ---------------------------------------------------

Tensor empty(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>,
    std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory(), DispatchKeySet(DispatchKey::CUDA), dtype.value_or(kFloat), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory(), DispatchKeySet(DispatchKey::CUDA), dtype.value_or(kFloat));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_cuda() != from.is_cuda() && !non_blocking) ++syncs;
  auto a = to.is_cuda() ? on_host(to) : to;
  auto b = from.is_cuda() ? on_host(from) : from;
  at::AutoDispatchBelowADInplaceOrView guard;
  a.copy_(b);
  return to;
}

Tensor as_strided(
    const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  auto out = viewed(self, self.storage(), DispatchKey::CUDA);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(
      size, stride, offset.value_or(self.storage_offset()));
  return out;
}

Tensor view(const Tensor& self, IntArrayRef size) {
  auto sizes = at::infer_size_dv(size, self.numel());
  auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with input tensor's size and stride; use reshape");
  return as_strided(self, sizes, *strides, self.storage_offset());
}

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return as_strided(self, size, stride, self.storage_offset());
}

void resize_storage(StorageImpl* storage, size_t bytes) {
  auto data = memory().allocate(bytes);
  size_t kept = std::min<size_t>(bytes, storage->nbytes());
  if (kept) memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  size_t needed = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes())
    resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(
    Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (stride.empty()) {
    strides.resize(size.size());
    int64_t step = 1;
    for (int dim = static_cast<int>(size.size()) - 1; dim >= 0; --dim) {
      strides[dim] = step;
      step *= size[dim];
    }
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& from) {
  return set_storage(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

void record_stream(Tensor&, Stream) {}

bool is_pinned(const Tensor&, std::optional<Device>) { return false; }

int64_t plain_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("is_pinned", &is_pinned);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &plain_attention);
  // These have a composite kernel, which a GPU does not take.
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

// In the place of NCCL: a collective of host tensors (gloo) on the same memory.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (auto name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "send", "recv_",
        "recv_any_source_", "allgather_", "reduce_scatter_", "_reduce_scatter_base_",
        "_allgather_base_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier",
        "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

extern "C" {
void install() {
  c10::SetAllocator(DeviceType::CUDA, &memory());
  fake_gpu::install();
}
long long live_bytes() { return live; }
long long peak_bytes() { return peak; }
void reset_peak() { peak = live.load(); }
long long sync_count() { return syncs; }
void storage_resize(void* storage, long long bytes) {
  resize_storage(static_cast<c10::StorageImpl*>(storage), bytes);
}
}
