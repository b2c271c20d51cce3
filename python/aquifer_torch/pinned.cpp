// PyTorch's allocator of pinned host memory, over the functions of libaquifer_ffi.
//
// PyTorch calls one at::HostAllocator for Tensor.pin_memory(), empty(pin_memory=True) and the pinning thread of a
// DataLoader. Its own rounds each size up to a power of two. This one allocates exact sizes, on the NUMA node next to the
// current device.
//
// When memory is reused:
//   - PyTorch names the streams that use a block (record_event). When the block is freed, an event is recorded on each of
//     them, and the memory is reused when all events are complete.
//   - A block that is allocated in a graph capture is kept until the pool of the graph is released, since each launch uses
//     its address again. If no stream has used it, it serves the next request of its size for that pool.
//   - No event can be recorded on a stream that is capturing. A block that such a stream uses is kept until the capture ends.
//
// aquifer_torch compiles it against the installed PyTorch, and calls the functions at the end by ctypes.

#include "aquifer.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using c10::DeviceIndex;
using c10::MempoolId_t;

#define AQUIFER_CALLS(call)                                                                                              \
    call(aq_last_error) call(aq_status_name) call(aq_torch_runtime) call(aq_device_count) call(aq_device)                \
    call(aq_pinned_alloc) call(aq_pinned_free) call(aq_pinned_is_pinned) call(aq_pinned_record_use)                      \
    call(aq_pinned_trim) call(aq_pinned_stats)

struct Calls {
#define AQUIFER_MEMBER(name) decltype(&::name) name;
    AQUIFER_CALLS(AQUIFER_MEMBER)
#undef AQUIFER_MEMBER
};
Calls aq;

constexpr MempoolId_t NO_POOL{0, 0};

std::string error_text(aq_status status) {
    return std::string(aq.aq_status_name(status)) + ": " + aq.aq_last_error();
}

void check(aq_status status) {
    if (C10_LIKELY(status == AQ_OK)) return;
    const std::string text = error_text(status);
    TORCH_CHECK(false, text);
}

// Destructors must not throw.
void report(const char* what, aq_status status) {
    std::fprintf(stderr, "aquifer: %s: %s: %s\n", what, aq.aq_status_name(status), aq.aq_last_error());
}

// The device that pinned_empty() was called with, in this thread, or -1.
thread_local DeviceIndex wanted_device = -1;

DeviceIndex current_device() {
    if (wanted_device >= 0) return wanted_device;
    DeviceIndex device = -1;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return device;
}

// Whether events cannot be recorded on the stream. A stream whose capture was invalidated counts too.
bool is_capturing(const c10::cuda::CUDAStream& stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream.stream(), &status) != cudaSuccess) {
        // The legacy default stream refuses the question while another stream is in a global capture.
        (void)cudaGetLastError();
        return true;
    }
    return status != cudaStreamCaptureStatusNone;
}

// Fills the statistics in the form that PyTorch has had since 2.10.
template <typename Stats>
auto fill(Stats& stats, const c10::CachingAllocator::Stat& requests, const c10::CachingAllocator::Stat& bytes, int)
    -> decltype(void(stats.active_requests)) {
    stats.allocations.allocated = stats.num_host_alloc;
    stats.allocations.freed = stats.num_host_free;
    stats.active_requests = requests;
    stats.active_bytes = bytes;
}
// The same for 2.9, where `allocated_bytes` are the live ones.
template <typename Stats>
void fill(Stats& stats, const c10::CachingAllocator::Stat& requests, const c10::CachingAllocator::Stat& bytes, long) {
    stats.segment.allocated = stats.num_host_alloc;
    stats.segment.freed = stats.num_host_free;
    stats.reserved_bytes = stats.allocated_bytes;
    stats.allocation = requests;
    stats.allocated_bytes = bytes;
}

// What the previous allocator does for pools, which PyTorch has since 2.11.
template <typename Allocator>
auto end_pool(Allocator& previous, MempoolId_t id, int) -> decltype(previous.end_allocate_to_pool(id)) {
    previous.end_allocate_to_pool(id);
}
template <typename Allocator>
void end_pool(Allocator&, MempoolId_t, long) {}
template <typename Allocator>
auto release_pool_of(Allocator& previous, MempoolId_t id, int) -> decltype(previous.release_pool(id)) {
    previous.release_pool(id);
}
template <typename Allocator>
void release_pool_of(Allocator&, MempoolId_t, long) {}

// A live block: the context of a tensor's DataPtr.
struct Block {
    void* memory;
    size_t bytes;
    // The current device when it was allocated.
    DeviceIndex device;
    // The graph pool that the block belongs to, or NO_POOL.
    MempoolId_t pool;
    std::vector<c10::Stream> streams;
};

class PinnedAllocator final : public at::HostAllocator {
   public:
    PinnedAllocator(at::HostAllocator* previous, aq_runtime runtime) : previous_(previous), runtime_(runtime) {}

    // Whether new blocks are allocated here. Without it they come from the previous allocator; live blocks stay here.
    void serve(bool serves) { serves_.store(serves); }

    c10::DataPtr allocate(size_t bytes) override {
        if (!serves_.load(std::memory_order_relaxed)) return previous_->allocate(bytes);
        if (bytes == 0) return {nullptr, nullptr, &PinnedAllocator::free, c10::DeviceType::CPU};
        free_after_captures();
        const DeviceIndex device = current_device();
        const MempoolId_t pool = pool_of_capture();
        if (pool != NO_POOL) {
            if (Block* unused = take_unused(pool, device, bytes)) return serve_block(unused);
        }
        void* memory = nullptr;
        const aq_status status = aq.aq_pinned_alloc(runtime_, static_cast<uint32_t>(device), bytes, 0, &memory);
        if (C10_UNLIKELY(status != AQ_OK)) {
            const std::string text =
                "pinned memory: tried to allocate " + std::to_string(bytes) + " bytes. " + error_text(status);
            const bool is_full =
                status == AQ_ERROR_OUT_OF_MEMORY || status == AQ_ERROR_OUT_OF_BUDGET || status == AQ_ERROR_TOO_LARGE;
            TORCH_CHECK_WITH(OutOfMemoryError, !is_full, text);
            TORCH_CHECK(false, text);
        }
        // Where the kernel refuses to pin memory, the pool has pageable memory. PyTorch has no such case.
        int pinned = 0;
        if (aq.aq_pinned_is_pinned(memory, &pinned) != AQ_OK || !pinned) {
            aq.aq_pinned_free(memory);
            return previous_->allocate(bytes);
        }
        return serve_block(new Block{memory, bytes, device, pool, {}});
    }

    void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

    bool record_event(void* memory, void* context, c10::Stream stream) override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (Block* block = find(memory, context)) {
                auto& streams = block->streams;
                if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
                return true;
            }
        }
        return previous_->record_event(memory, context, stream);
    }

    void empty_cache() override {
        free_after_captures();
        for (const uint32_t device : devices_of_pools()) {
            check(aq.aq_pinned_trim(runtime_, device, 0, nullptr));
        }
        previous_->empty_cache();
    }

    at::HostStats get_stats() override {
        at::HostStats stats;
        for (const uint32_t device : devices_of_pools()) {
            aq_stats from{};
            from.size = sizeof from;
            check(aq.aq_pinned_stats(runtime_, device, &from));
            stats.allocated_bytes.current += static_cast<int64_t>(from.physical);
            stats.allocated_bytes.peak += static_cast<int64_t>(from.peak_physical);
            stats.num_host_alloc += static_cast<int64_t>(from.growths);
            stats.num_host_free += static_cast<int64_t>(from.reaped);
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        fill(stats, requests_, bytes_, 0);
        return stats;
    }
    void reset_accumulated_stats() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        requests_.reset_accumulated();
        bytes_.reset_accumulated();
    }
    void reset_peak_stats() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        requests_.reset_peak();
        bytes_.reset_peak();
    }

    // PyTorch has these since 2.11, so they are not marked `override`.
    void begin_allocate_to_pool(MempoolId_t id, std::function<bool(c10::Stream)> filter) {
        const std::lock_guard<std::mutex> lock(pools_mutex_);
        const auto same = [&](const auto& capture) { return capture.first == id; };
        const bool twice = std::any_of(captures_.begin(), captures_.end(), same);
        TORCH_CHECK(!twice, "pinned memory is already allocated to this pool");
        captures_.emplace_back(id, std::move(filter));
        ++pools_[id].uses;
        any_capture_.store(true);
    }
    void end_allocate_to_pool(MempoolId_t id) {
        {
            const std::lock_guard<std::mutex> lock(pools_mutex_);
            const auto same = [&](const auto& capture) { return capture.first == id; };
            const auto found = std::find_if(captures_.begin(), captures_.end(), same);
            if (found != captures_.end()) {
                captures_.erase(found);
                any_capture_.store(!captures_.empty());
                return;
            }
        }
        // Of a capture that began before this allocator was installed.
        end_pool(*previous_, id, 0);
    }
    void release_pool(MempoolId_t id) {
        std::vector<Block*> kept;
        bool known = false;
        {
            const std::lock_guard<std::mutex> lock(pools_mutex_);
            const auto found = pools_.find(id);
            known = found != pools_.end();
            if (known && --found->second.uses == 0) {
                kept = std::move(found->second.kept);
                pools_.erase(found);
            }
        }
        // Of a capture that began before this allocator was installed.
        if (!known) release_pool_of(*previous_, id, 0);
        for (Block* block : kept) retire(block);
    }

   private:
    // A pool of graphs. Its freed blocks are kept until no graph uses it.
    struct GraphPool {
        int uses = 0;
        std::vector<Block*> kept;
    };

    static void free(void* context);

    // Counts the block as live.
    c10::DataPtr serve_block(Block* block) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            blocks_.insert(block);
            requests_.increase(1);
            bytes_.increase(block->bytes);
        }
        return {block->memory, block, &PinnedAllocator::free, c10::DeviceType::CPU};
    }

    // Takes a freed block of this size that no stream has used from those that a graph pool keeps. Null without one.
    Block* take_unused(MempoolId_t pool, DeviceIndex device, size_t bytes) {
        const std::lock_guard<std::mutex> lock(pools_mutex_);
        const auto found = pools_.find(pool);
        if (found == pools_.end()) return nullptr;
        auto& kept = found->second.kept;
        const auto serves = [&](const Block* block) {
            return block->bytes == bytes && block->device == device && block->streams.empty();
        };
        // The last freed first: its memory may still be in the processor's caches.
        const auto unused = std::find_if(kept.rbegin(), kept.rend(), serves);
        if (unused == kept.rend()) return nullptr;
        Block* block = *unused;
        kept.erase(std::next(unused).base());
        return block;
    }

    // The block of a context, or of the memory if the context is not one of ours. Null if neither is.
    Block* find(void* memory, void* context) const {
        auto* block = static_cast<Block*>(context);
        if (C10_LIKELY(blocks_.count(block) > 0)) return block;
        const auto holds = [&](const Block* live) { return live->memory == memory; };
        const auto found = std::find_if(blocks_.begin(), blocks_.end(), holds);
        return found != blocks_.end() ? *found : nullptr;
    }

    MempoolId_t pool_of_capture() {
        if (C10_LIKELY(!any_capture_.load(std::memory_order_relaxed))) return NO_POOL;
        const c10::Stream stream = c10::cuda::getCurrentCUDAStream().unwrap();
        const std::lock_guard<std::mutex> lock(pools_mutex_);
        for (const auto& [id, filter] : captures_) {
            if (filter(stream)) return id;
        }
        return NO_POOL;
    }

    void drop(Block* block) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            blocks_.erase(block);
            requests_.decrease(1);
            bytes_.decrease(block->bytes);
        }
        if (block->pool != NO_POOL) {
            const std::lock_guard<std::mutex> lock(pools_mutex_);
            const auto found = pools_.find(block->pool);
            if (found != pools_.end()) {
                found->second.kept.push_back(block);
                return;
            }
        }
        retire(block);
    }

    // Frees a block whose uses are all queued, or keeps it while one of its streams is capturing.
    void retire(Block* block) {
        for (const c10::Stream stream : block->streams) {
            if (is_capturing(c10::cuda::CUDAStream(stream))) {
                const std::lock_guard<std::mutex> lock(mutex_);
                captured_.push_back(block);
                any_captured_.store(true);
                return;
            }
        }
        release(block);
    }

    void release(Block* block) {
        for (const c10::Stream stream : block->streams) {
            cudaStream_t handle = c10::cuda::CUDAStream(stream).stream();
            const auto device = static_cast<uint32_t>(stream.device_index());
            const aq_status status = aq.aq_pinned_record_use(block->memory, runtime_, device, handle);
            if (status != AQ_OK) {
                // Work that is still queued may use it, so it is never reused.
                report("pinned memory stays allocated, since its use could not be recorded", status);
                delete block;
                return;
            }
        }
        const aq_status status = aq.aq_pinned_free(block->memory);
        if (status != AQ_OK) report("pinned memory was not freed", status);
        delete block;
    }

    void free_after_captures() {
        if (C10_LIKELY(!any_captured_.load(std::memory_order_relaxed))) return;
        std::vector<Block*> waiting;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            waiting.swap(captured_);
            any_captured_.store(false);
        }
        for (Block* block : waiting) retire(block);
    }

    // A device for each pool: pools are one a NUMA node.
    std::vector<uint32_t> devices_of_pools() const {
        uint32_t count = 0;
        check(aq.aq_device_count(runtime_, &count));
        std::set<int32_t> nodes;
        std::vector<uint32_t> devices;
        for (uint32_t device = 0; device < count; ++device) {
            aq_device_facts facts{};
            facts.size = sizeof facts;
            check(aq.aq_device(runtime_, device, &facts));
            if (nodes.insert(facts.node).second) devices.push_back(device);
        }
        return devices;
    }

    at::HostAllocator* const previous_;
    const aq_runtime runtime_;
    std::atomic<bool> serves_{true};

    std::mutex mutex_;
    std::unordered_set<Block*> blocks_;
    // Freed blocks that a capturing stream uses.
    std::vector<Block*> captured_;
    std::atomic<bool> any_captured_{false};
    c10::CachingAllocator::Stat requests_;
    c10::CachingAllocator::Stat bytes_;

    std::mutex pools_mutex_;
    std::map<MempoolId_t, GraphPool> pools_;
    std::vector<std::pair<MempoolId_t, std::function<bool(c10::Stream)>>> captures_;
    std::atomic<bool> any_capture_{false};
};

// Never destroyed: tensors are freed after static objects.
PinnedAllocator* installed = nullptr;

void PinnedAllocator::free(void* context) {
    if (context != nullptr) installed->drop(static_cast<Block*>(context));
}

template <typename F>
void find_call(void* library, const char* name, F& to) {
    to = reinterpret_cast<F>(dlsym(library, name));
    const std::string text = std::string("the library has no ") + name + ": it is of another version than aquifer_torch";
    TORCH_CHECK(to != nullptr, text);
}

// Runs `work`. Returns 0, or 1 with the text of what it throws in `error`.
template <typename Work>
int run(char* error, size_t bytes, Work work) {
    try {
        work();
        return 0;
    } catch (const c10::Error& thrown) {
        std::strncpy(error, thrown.what_without_backtrace(), bytes - 1);
    } catch (const std::exception& thrown) {
        std::strncpy(error, thrown.what(), bytes - 1);
    }
    error[bytes - 1] = '\0';
    return 1;
}

}  // namespace

#define AQUIFER_EXPORT extern "C" __attribute__((visibility("default")))

// Makes the library at `path` PyTorch's allocator of pinned memory. Must not run beside another call of these functions, nor
// while other threads allocate pinned memory, since PyTorch's setter is not thread-safe.
AQUIFER_EXPORT int aquifer_pinned_install(const char* path, char* error, size_t bytes) {
    return run(error, bytes, [&] {
        if (installed == nullptr) {
            void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
            const std::string text = library == nullptr ? dlerror() : "";
            TORCH_CHECK(library != nullptr, text);
#define AQUIFER_FIND(name) find_call(library, #name, aq.name);
            AQUIFER_CALLS(AQUIFER_FIND)
#undef AQUIFER_FIND
            at::HostAllocator* previous = at::getHostAllocator(c10::DeviceType::CUDA);
            TORCH_CHECK(previous != nullptr, "PyTorch has no allocator of pinned memory for CUDA");
            aq_runtime runtime = 0;
            check(aq.aq_torch_runtime(&runtime));
            auto* made = new PinnedAllocator(previous, runtime);
            at::setHostAllocator(c10::DeviceType::CUDA, made);
            if (at::getHostAllocator(c10::DeviceType::CUDA) != made) {
                delete made;
                TORCH_CHECK(false, "another allocator of pinned memory was installed with a higher priority");
            }
            installed = made;
        }
        installed->serve(true);
    });
}

// New blocks come from the previous allocator. Live blocks and their streams are still handled here.
AQUIFER_EXPORT void aquifer_pinned_uninstall() {
    if (installed != nullptr) installed->serve(false);
}

// The device whose node new blocks of this thread are allocated on, or -1 for the current device. Returns the previous value.
AQUIFER_EXPORT int aquifer_pinned_device(int device) {
    const int previous = wanted_device;
    wanted_device = static_cast<DeviceIndex>(device);
    return previous;
}
