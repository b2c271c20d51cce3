// PyTorch's allocator for the whole process, over the functions of libaquifer_ffi.
//
// torch.cuda.memory.CUDAPluggableAllocator calls an allocator by two function pointers. This subclass adds what that lacks:
//   - A request that cannot be served raises torch.OutOfMemoryError with the library's account of the holders. Otherwise it is
//     a null pointer, which the next kernel writes to.
//   - Graph captures and memory pools, which PyTorch announces by a std::function.
//   - Statistics, cacheInfo (for cuDNN's benchmark mode) and the memory fraction.
//   - History, snapshots and trackers, and the states of pools that CUDA graph trees restore.
//   - A pair of calls without the mutex and the hash map in which PyTorch stores the sizes of blocks.
//
// The wheel has it compiled against several versions of PyTorch. For others aquifer_torch compiles it at first use. It is loaded
// by ctypes, which calls the function at the end.

#include "aquifer.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/ApproximateClock.h>
#include <c10/util/Exception.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using c10::DeviceIndex;
using c10::GatheredContext;
using c10::cuda::MempoolId_t;
using c10::cuda::CUDACachingAllocator::AllocatorState;
using c10::cuda::CUDACachingAllocator::AllocatorTraceTracker;
using c10::cuda::CUDACachingAllocator::BlockInfo;
using c10::cuda::CUDACachingAllocator::CheckpointDelta;
using c10::cuda::CUDACachingAllocator::CreateContextFn;
using c10::cuda::CUDACachingAllocator::CUDAAllocator;
using c10::cuda::CUDACachingAllocator::DeviceStats;
using c10::cuda::CUDACachingAllocator::OutOfMemoryObserver;
using c10::cuda::CUDACachingAllocator::RecordContext;
using c10::cuda::CUDACachingAllocator::SegmentInfo;
using c10::cuda::CUDACachingAllocator::ShareableHandle;
using c10::cuda::CUDACachingAllocator::SnapshotInfo;
using c10::cuda::CUDACachingAllocator::TraceEntry;
using torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

// What is called of the library, by its names in aquifer.h. Found at run time, so that a program can name the file.
#define AQUIFER_CALLS(call)                                                                                              \
    call(aq_last_error) call(aq_status_name) call(aq_device_stats) call(aq_limit) call(aq_set_limit) call(aq_device)     \
    call(aq_reset_peaks) call(aq_torch_runtime) call(aq_torch_init) call(aq_torch_malloc) call(aq_torch_free)            \
    call(aq_torch_record_stream) call(aq_torch_base_alloc) call(aq_torch_reset) call(aq_torch_pool_begin)                \
    call(aq_torch_pool_end) call(aq_torch_pool_retain) call(aq_torch_pool_release) call(aq_torch_pool_uses)              \
    call(aq_torch_blocks) call(aq_torch_pool_blocks) call(aq_torch_pool_place) call(aq_torch_pool_use_on_oom)            \
    call(aq_torch_share) call(aq_torch_receive) call(aq_torch_close)

struct Calls {
#define AQUIFER_MEMBER(name) decltype(&::name) name;
    AQUIFER_CALLS(AQUIFER_MEMBER)
#undef AQUIFER_MEMBER
};
Calls aq;

// Texts are put together here and raised as they are: where compilers link the C++ library statically, its streams, which
// PyTorch's macros would use, have no locale within this file.
[[noreturn]] C10_NOINLINE void raise(aq_status status) {
    const std::string text = std::string(aq.aq_status_name(status)) + ": " + aq.aq_last_error();
    TORCH_CHECK(false, text);
}

// As PyTorch writes them.
std::string bytes_text(uint64_t bytes) {
    const char* const units[] = {" KiB", " MiB", " GiB"};
    if (bytes <= 1024) return std::to_string(bytes) + " bytes";
    double size = static_cast<double>(bytes) / 1024;
    int unit = 0;
    for (; size > 1024 && unit < 2; ++unit) size /= 1024;
    char text[64];
    std::snprintf(text, sizeof text, "%.2f", size);
    return std::string(text) + units[unit];
}

void check(aq_status status) {
    if (C10_UNLIKELY(status != AQ_OK)) raise(status);
}

// What PyTorch calls in destructors may raise nothing.
C10_NOINLINE void report(const char* what, aq_status status) {
    std::fprintf(stderr, "aquifer: %s: %s: %s\n", what, aq.aq_status_name(status), aq.aq_last_error());
}

DeviceIndex current_device() {
    DeviceIndex device = -1;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return device;
}

aq_runtime runtime() {
    aq_runtime found = 0;
    check(aq.aq_torch_runtime(&found));
    return found;
}

aq_stats stats_of(DeviceIndex device) {
    aq_stats stats{};
    stats.size = sizeof stats;
    check(aq.aq_device_stats(runtime(), static_cast<uint32_t>(device), &stats));
    return stats;
}

uint64_t limit_of(DeviceIndex device) {
    uint64_t limit = 0;
    check(aq.aq_limit(runtime(), static_cast<uint32_t>(device), &limit, nullptr));
    return limit;
}

aq_device_facts facts_of(DeviceIndex device) {
    aq_device_facts facts{};
    facts.size = sizeof facts;
    check(aq.aq_device(runtime(), static_cast<uint32_t>(device), &facts));
    return facts;
}

uint64_t memory_of(DeviceIndex device) { return facts_of(device).memory; }

// The bytes of a request as the library rounds them.
size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

// The live blocks that `list` writes, by address. Other threads may allocate between its two calls.
template <typename List>
std::vector<aq_torch_block> blocks_of(List list) {
    std::vector<aq_torch_block> blocks;
    for (size_t count = 0;;) {
        check(list(blocks.data(), blocks.size(), &count));
        const bool all = count <= blocks.size();
        blocks.resize(all ? count : count + count / 8 + 8);
        if (all) break;
    }
    std::sort(blocks.begin(), blocks.end(), [](const auto& a, const auto& b) { return a.address < b.address; });
    return blocks;
}

std::vector<aq_torch_block> blocks_of_device(DeviceIndex device) {
    return blocks_of([&](auto* to, size_t room, size_t* count) { return aq.aq_torch_blocks(device, to, room, count); });
}

std::vector<aq_torch_block> blocks_of_pool(DeviceIndex device, MempoolId_t id) {
    return blocks_of([&](auto* to, size_t room, size_t* count) {
        return aq.aq_torch_pool_blocks(device, id.first, id.second, to, room, count);
    });
}

void* pointer_to(uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

using AnnotationEntry = decltype(SnapshotInfo::external_annotations)::value_type;

// The entries that torch.cuda.memory._record_memory_history asks for, and the trackers that get each of them. Called with
// no lock of the library held.
class History {
   public:
    // Whether there is a record or a tracker.
    bool watches() const { return watching.load(std::memory_order_relaxed); }
    // Whether it has to be told of frees: for entries, or since it has the stack of a live block, also of a record that has ended.
    bool follows_frees() const { return watches() || remembering.load(std::memory_order_relaxed); }
    bool records() const { return recording.load(std::memory_order_relaxed); }

    void set(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
             const std::vector<std::string>& skip) {
        TORCH_CHECK(!enabled || when == RecordContext::NEVER || recorder != nullptr, "stacks need a function that records them");
        const std::lock_guard<std::mutex> lock(mutex);
        context_recorder = enabled ? recorder : nullptr;
        record_context = enabled ? when : RecordContext::NEVER;
        most_entries = std::max<size_t>(most, 1);
        skipped = {skip.begin(), skip.end()};
        if (!enabled || clear) {
            entries.clear();
            annotations.clear();
        }
        recording = enabled;
        watching = enabled || !trackers.empty();
    }

    void track(AllocatorTraceTracker tracker) {
        const std::lock_guard<std::mutex> lock(mutex);
        trackers.push_back(std::move(tracker));
        watching = true;
    }

    C10_NOINLINE void allocated(void* memory, size_t size, DeviceIndex device, cudaStream_t stream) {
        auto [level, context] = gather(RecordContext::STATE);
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (recording) {
                live[memory] = {context, size, device, stream};
                remembering = true;
            }
        }
        if (level < RecordContext::ALLOC) context = nullptr;
        record("alloc", TraceEntry::ALLOC, memory, size, device, stream, std::move(context));
    }

    // Called before the free, since the address may be another block's right after it. `size` and `device` are used for a
    // block that is older than the history.
    C10_NOINLINE void freed(void* memory, size_t size, DeviceIndex device) {
        Live block{nullptr, size, device, nullptr};
        {
            const std::lock_guard<std::mutex> lock(mutex);
            const auto found = live.find(memory);
            if (found != live.end()) {
                block = std::move(found->second);
                live.erase(found);
                remembering = !live.empty();
            }
        }
        if (!watches()) return;
        auto context = gather(RecordContext::ALL).context;
        record("free_requested", TraceEntry::FREE_REQUESTED, memory, block.size, block.device, block.stream, context);
        record("free_completed", TraceEntry::FREE_COMPLETED, memory, block.size, block.device, block.stream, std::move(context));
    }

    void out_of_memory(uint64_t free, size_t size, DeviceIndex device, cudaStream_t stream) {
        record("oom", TraceEntry::OOM, pointer_to(free), size, device, stream, gather(RecordContext::ALLOC).context);
    }

    void annotate(DeviceIndex device, const std::vector<std::pair<std::string, std::string>>& pairs) {
        if (!records()) return;
        AnnotationEntry entry(device, c10::getApproximateTime());
        for (const auto& [name, value] : pairs) entry.recordUserMetadata(name, value);
        const std::lock_guard<std::mutex> lock(mutex);
        if (annotations.size() == most_entries) annotations.pop_front();
        annotations.push_back(std::move(entry));
    }

    // No two blocks of this pool are in one segment.
    void separate(MempoolId_t pool) {
        const std::lock_guard<std::mutex> lock(mutex);
        separated.insert(pool);
    }

    // The state of all devices, or of one pool.
    SnapshotInfo snapshot(MempoolId_t pool, bool with_traces) {
        const DeviceIndex devices = c10::cuda::device_count();
        SnapshotInfo state{};
        state.device_traces.resize(devices);
        std::unordered_map<void*, std::shared_ptr<GatheredContext>> contexts;
        std::set<MempoolId_t> apart;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            for (const auto& [memory, block] : live) contexts.emplace(memory, block.context);
            apart = separated;
        }
        if (with_traces) add_traces(devices, state);
        for (DeviceIndex device = 0; device < devices; ++device) {
            const auto blocks = pool == MempoolId_t{0, 0} ? blocks_of_device(device) : blocks_of_pool(device, pool);
            add_segments(device, blocks, contexts, apart, state.segments);
            // Only the next snapshot has this entry, as with the native allocator.
            if (records()) record("snapshot", TraceEntry::SNAPSHOT, nullptr, 0, device, nullptr, nullptr);
        }
        return state;
    }

    // What is being compiled, and what the program says of itself, by thread.
    static std::vector<std::string>& compile_contexts() {
        thread_local std::vector<std::string> contexts;
        return contexts;
    }
    static std::string& user_metadata() {
        thread_local std::string metadata;
        return metadata;
    }

   private:
    // What has been recorded so far.
    void add_traces(DeviceIndex devices, SnapshotInfo& state) {
        const auto to_ns = clock.makeConverter();
        const std::lock_guard<std::mutex> lock(mutex);
        for (TraceEntry entry : entries) {
            entry.time_.t_ = to_ns(entry.time_.approx_t_) / 1000;
            if (entry.device_ >= 0 && entry.device_ < devices) state.device_traces[entry.device_].push_back(std::move(entry));
        }
        for (auto entry : annotations) {
            entry.time_.t_ = to_ns(entry.time_.approx_t_) / 1000;
            state.external_annotations.push_back(std::move(entry));
        }
    }

    struct Live {
        std::shared_ptr<GatheredContext> context;
        size_t size = 0;
        DeviceIndex device = 0;
        cudaStream_t stream = nullptr;
    };

    struct Gathered {
        RecordContext level = RecordContext::NEVER;
        std::shared_ptr<GatheredContext> context;
    };

    // The level of the record, and the stacks if it is `least` at least. No lock is held while they are gathered: that may
    // take Python's.
    Gathered gather(RecordContext least) {
        Gathered gathered;
        CreateContextFn recorder = nullptr;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            gathered.level = record_context;
            if (record_context >= least) recorder = context_recorder;
        }
        if (recorder != nullptr) gathered.context = recorder();
        return gathered;
    }

    void record(const char* name, TraceEntry::Action action, void* memory, size_t size, DeviceIndex device,
                cudaStream_t stream, std::shared_ptr<GatheredContext> context) {
        const auto& compiled = compile_contexts();
        auto entry = entry_of<TraceEntry>(action, device, reinterpret_cast<size_t>(memory), size, stream, MempoolId_t{0, 0},
                                          c10::getApproximateTime(), std::move(context),
                                          compiled.empty() ? std::string("N/A") : compiled.back());
        std::vector<AllocatorTraceTracker> called;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            called = trackers;
            if (recording && skipped.count(name) == 0) {
                while (entries.size() >= most_entries) entries.pop_front();
                entries.push_back(entry);
            }
        }
        for (const auto& tracker : called) tracker(entry);
    }

    // With what the program says of itself, in the versions of PyTorch that have a place for it.
    template <typename Entry, typename... Parts>
    static Entry entry_of(Parts&&... parts) {
        if constexpr (std::is_constructible_v<Entry, Parts..., std::string>) {
            return Entry(std::forward<Parts>(parts)..., user_metadata());
        } else {
            return Entry(std::forward<Parts>(parts)...);
        }
    }

    // A run of blocks of one stream and pool, each where the last one ends, is a segment. So is a block that has a segment of
    // its own natively: one of 10 MiB and more, or of a pool `apart`. Free memory belongs to none.
    static void add_segments(DeviceIndex device, const std::vector<aq_torch_block>& blocks,
                             const std::unordered_map<void*, std::shared_ptr<GatheredContext>>& contexts,
                             const std::set<MempoolId_t>& apart, std::vector<SegmentInfo>& segments) {
        const auto is_alone = [&](const aq_torch_block& block) {
            return block.bytes >= 10 << 20 || apart.count({block.first, block.second}) != 0;
        };
        const aq_torch_block* before = nullptr;
        for (const auto& block : blocks) {
            const bool follows = before != nullptr && !is_alone(block) && !is_alone(*before) &&
                before->address + rounded(before->bytes) == block.address &&
                before->stream == block.stream && before->first == block.first && before->second == block.second;
            if (!follows) {
                SegmentInfo segment{};
                segment.device = device;
                segment.address = block.address;
                segment.stream = static_cast<cudaStream_t>(block.stream);
                segment.owner_private_pool_id = {block.first, block.second};
                segments.push_back(std::move(segment));
            }
            SegmentInfo& segment = segments.back();
            BlockInfo info{};
            info.size = rounded(block.bytes);
            info.requested_size = block.bytes;
            info.allocated = info.active = true;
            const auto found = contexts.find(pointer_to(block.address));
            if (found != contexts.end()) info.context_when_allocated = found->second;
            segment.total_size += info.size;
            segment.allocated_size += info.size;
            segment.active_size += info.size;
            segment.requested_size += info.requested_size;
            segment.is_large = segment.total_size > 1 << 20;
            segment.blocks.push_back(std::move(info));
            before = &block;
        }
    }

    std::atomic<bool> watching{false}, recording{false}, remembering{false};
    std::mutex mutex;
    CreateContextFn context_recorder = nullptr;
    RecordContext record_context = RecordContext::NEVER;
    size_t most_entries = 1;
    std::unordered_set<std::string> skipped;
    std::deque<TraceEntry> entries;
    std::deque<AnnotationEntry> annotations;
    // Blocks that were allocated under a record, until they are freed.
    std::unordered_map<void*, Live> live;
    std::vector<AllocatorTraceTracker> trackers;
    std::set<MempoolId_t> separated;
    c10::ApproximateClockToUnixTimeConverter clock;
};

// Never destroyed: tensors are freed until the process ends.
History& history() {
    static History& the_history = *new History;
    return the_history;
}

// Tells the profiler and the tracer of kernels, if there are any.
void tell_tools(void* memory, size_t size, DeviceIndex device, bool allocated) {
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
        const aq_stats stats = stats_of(device);
        const auto bytes = static_cast<int64_t>(size);
        c10::reportMemoryUsageToProfiler(memory, allocated ? bytes : -bytes, stats.live, stats.physical,
                                         c10::Device(c10::DeviceType::CUDA, device));
    }
    const c10::impl::PyInterpreter* tracer = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(tracer != nullptr)) {
        const auto address = reinterpret_cast<uintptr_t>(memory);
        if (allocated) (*tracer)->trace_gpu_memory_allocation(c10::kCUDA, address);
        else (*tracer)->trace_gpu_memory_deallocation(c10::kCUDA, address);
    }
}

// Tells the history and the tools of a new block.
void tell_of_alloc(void* memory, size_t size, DeviceIndex device, cudaStream_t stream) {
    if (C10_UNLIKELY(history().watches())) history().allocated(memory, size, device, stream);
    tell_tools(memory, size, device, true);
}

// Tells them of a free. Raises nothing.
C10_NOINLINE void tell_of_free(void* memory) {
    try {
        const DeviceIndex device = current_device();
        size_t size = 0;
        aq.aq_torch_base_alloc(memory, &size);
        if (history().follows_frees()) history().freed(memory, size, device);
        tell_tools(memory, size, device, false);
    } catch (const std::exception& thrown) {
        std::fprintf(stderr, "aquifer: a free was not recorded: %s\n", thrown.what());
    }
}

bool frees_are_told() {
    return history().follows_frees() || c10::memoryProfilingEnabled() || c10::impl::GPUTrace::get_trace() != nullptr;
}

// Memory of the driver itself, while torch.cuda.caching_allocator_enable(False) is set. It is outside of the limit.
class Uncached {
   public:
    // Whether all memory comes from here.
    std::atomic<bool> serves{false};

    void* allocate(size_t size) {
        void* memory = nullptr;
        const cudaError_t refused = cudaMalloc(&memory, size);
        if (refused == cudaErrorMemoryAllocation) {
            // It would be the next kernel's error as well.
            (void)cudaGetLastError();
            const std::string text = "CUDA out of memory. Tried to allocate " + bytes_text(size) + " without a cache.";
            TORCH_CHECK_WITH(OutOfMemoryError, false, text);
        }
        C10_CUDA_CHECK(refused);
        const std::lock_guard<std::mutex> lock(mutex);
        blocks.insert(memory);
        holds.store(true);
        return memory;
    }

    // Frees a block that has come from here, which waits for the device. Returns whether it has.
    bool free(void* memory) {
        if (C10_LIKELY(!holds.load(std::memory_order_relaxed))) return false;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (blocks.erase(memory) == 0) return false;
            holds.store(!blocks.empty());
        }
        const cudaError_t refused = cudaFree(memory);
        if (refused != cudaSuccess) std::fprintf(stderr, "aquifer: memory was not freed: %s\n", cudaGetErrorString(refused));
        return true;
    }

   private:
    std::atomic<bool> holds{false};
    std::mutex mutex;
    std::unordered_set<void*> blocks;
};

// Never destroyed: tensors are freed until the process ends.
Uncached& uncached() {
    static Uncached& the_uncached = *new Uncached;
    return the_uncached;
}

// The bytes that have been requested so far, by device. Threads have several counters, so that they rarely meet at one.
class Requested {
   public:
    void add(DeviceIndex device, uint64_t bytes) {
        static std::atomic<unsigned> threads{0};
        thread_local const unsigned mine = threads.fetch_add(1, std::memory_order_relaxed) % COUNTERS;
        counters[device][mine].bytes.fetch_add(bytes, std::memory_order_relaxed);
    }
    uint64_t sum(DeviceIndex device) const {
        uint64_t sum = 0;
        for (const Counter& counter : counters[device]) sum += counter.bytes.load(std::memory_order_relaxed);
        return sum;
    }

   private:
    static constexpr unsigned COUNTERS = 8;
    struct alignas(64) Counter {
        std::atomic<uint64_t> bytes{0};
    };
    Counter counters[C10_COMPILE_TIME_MAX_GPUS][COUNTERS];
};
Requested requested;

aq_status free_block(void* memory) {
    if (memory == nullptr || C10_UNLIKELY(uncached().free(memory))) return AQ_OK;
    if (C10_UNLIKELY(frees_are_told())) tell_of_free(memory);
    return aq.aq_torch_free(memory, 0, -1, nullptr);
}

// Of a tensor's destructor.
void drop(void* memory) {
    const aq_status status = free_block(memory);
    if (C10_UNLIKELY(status != AQ_OK)) report("a tensor's memory was not freed", status);
}

// Observers of out-of-memory errors. As in PyTorch, they stay until the process ends.
std::mutex observers_mutex;
std::vector<OutOfMemoryObserver> observers;

void tell_observers(DeviceIndex device, size_t asked) {
    std::vector<OutOfMemoryObserver> told;
    {
        const std::lock_guard<std::mutex> lock(observers_mutex);
        told = observers;
    }
    if (told.empty()) return;
    const aq_device_facts facts = facts_of(device);
    for (const auto& observer : told) observer(device, asked, facts.memory, facts.free_memory);
}

// There is no memory: begins as PyTorch's own error does, which programs look for, and goes on with our account.
[[noreturn]] C10_NOINLINE void refuse(aq_status status, size_t size, DeviceIndex device, cudaStream_t stream) {
    const std::string text = aq.aq_last_error();
    const bool absurd = size >= 1152921504606846976ULL;
    const bool memory = status == AQ_ERROR_OUT_OF_MEMORY || status == AQ_ERROR_OUT_OF_BUDGET || status == AQ_ERROR_TOO_LARGE;
    if (absurd || memory) {
        tell_observers(device, size);
        const aq_stats stats = stats_of(device);
        if (history().watches()) history().out_of_memory(facts_of(device).free_memory, size, device, stream);
        c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(size), stats.live, stats.physical,
                                         c10::Device(c10::DeviceType::CUDA, device));
    }
    TORCH_CHECK_WITH(OutOfMemoryError, !absurd, "CUDA out of memory. Tried to allocate more than 1EB memory.");
    const std::string said = "CUDA out of memory. Tried to allocate " + bytes_text(size) + ". GPU " + std::to_string(device) +
        " has a total capacity of " + bytes_text(memory_of(device)) + ".\n" + text;
    TORCH_CHECK_WITH(OutOfMemoryError, !memory, said);
    raise(status);
}

// Has PyTorch free what it has kept for other processes and they have released. Returns whether there was any.
C10_NOINLINE bool run_free_memory_callbacks() {
    bool freed = false;
    auto* callbacks = c10::FreeCudaMemoryCallbacksRegistry();
    for (const auto& name : callbacks->Keys()) freed |= callbacks->Create(name)->Execute();
    return freed;
}

void* take(size_t size, DeviceIndex device, cudaStream_t stream) {
    if (C10_UNLIKELY(uncached().serves.load(std::memory_order_relaxed))) return uncached().allocate(size);
    void* memory = nullptr;
    const auto bytes = static_cast<ptrdiff_t>(size);
    aq_status status = aq.aq_torch_malloc(bytes, device, stream, &memory);
    const bool shortage = status == AQ_ERROR_OUT_OF_MEMORY || status == AQ_ERROR_OUT_OF_BUDGET;
    if (C10_UNLIKELY(shortage) && run_free_memory_callbacks()) {
        status = aq.aq_torch_malloc(bytes, device, stream, &memory);
    }
    if (C10_UNLIKELY(status != AQ_OK)) refuse(status, size, device, stream);
    requested.add(device, size);
    tell_of_alloc(memory, size, device, stream);
    return memory;
}

// Memory of other processes that is mapped here, by handle. Two tensors of one block map it once. Never destroyed: tensors
// are freed until the process ends.
class Received {
   public:
    std::shared_ptr<void> open(const std::string& handle, DeviceIndex device) {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = blocks.find(handle);
        if (found != blocks.end()) {
            if (auto known = found->second.lock()) return known;
        }
        void* memory = nullptr;
        check(aq.aq_torch_receive(device, handle.data(), handle.size(), &memory));
        std::shared_ptr<void> opened(memory, [this, handle](void* closed) { close(handle, closed); });
        blocks[handle] = opened;
        return opened;
    }

   private:
    // Waits for the device. PyTorch then tells the process that has shared the block that it is free of this one.
    void close(const std::string& handle, void* memory) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            const auto found = blocks.find(handle);
            // It may have been opened again since.
            if (found != blocks.end() && found->second.expired()) blocks.erase(found);
        }
        const aq_status status = aq.aq_torch_close(memory);
        if (status != AQ_OK) report("another process's memory was not unmapped", status);
    }

    std::mutex mutex;
    std::unordered_map<std::string, std::weak_ptr<void>> blocks;
};

Received& received() {
    static Received& the_received = *new Received;
    return the_received;
}

// The memory fraction that was set last, and the limit that it made.
struct Fraction {
    double fraction;
    uint64_t bytes;
};
Fraction& fraction_of(DeviceIndex device) {
    static Fraction set[C10_COMPILE_TIME_MAX_GPUS];
    return set[device];
}

// Whether work on a stream belongs to a capture or a pool. What PyTorch's filter throws must not pass through the library.
using Filter = std::function<bool(cudaStream_t)>;
int belongs(void* filter, void* stream) {
    try {
        return (*static_cast<Filter*>(filter))(static_cast<cudaStream_t>(stream)) ? 1 : 0;
    } catch (...) {
        return 0;
    }
}
void drop_filter(void* filter) { delete static_cast<Filter*>(filter); }

// What was live in a pool at some time.
struct PoolState final : AllocatorState {
    PoolState(MempoolId_t id, std::vector<aq_torch_block> blocks) : id(id), blocks(std::move(blocks)) {}
    MempoolId_t id;
    std::vector<aq_torch_block> blocks;
};

bool is_same(const aq_torch_block& a, const aq_torch_block& b) {
    return a.address == b.address && a.bytes == b.bytes && a.stream == b.stream;
}

// Functions that PyTorch's versions declare differently are not marked `override`: where one does not match, PyTorch's
// own refusal stands.
//
// `previous` is PyTorch's own allocator if it was in use before. What is not ours is its memory, which stays valid.
struct Aquifer final : CUDAPluggableAllocator {
    explicit Aquifer(CUDAAllocator* previous)
        : CUDAPluggableAllocator(
              [](size_t size, int device, cudaStream_t stream) {
                  return take(size, static_cast<DeviceIndex>(device), stream);
              },
              [](void* memory, size_t, int, cudaStream_t) { drop(memory); }),
          previous(previous) {
        set_init_fn([](int devices) { check(aq.aq_torch_init(devices)); });
        set_reset_fn([previous] {
            // Also of a MemPool's destructor.
            const aq_status status = aq.aq_torch_reset();
            if (status != AQ_OK) report("memory was not given back", status);
            if (previous != nullptr) previous->emptyCache();
        });
        set_memory_fraction_fn([](double fraction, int device) {
            const std::string invalid = "invalid fraction: " + std::to_string(fraction) + ". Please set within [0, 1]";
            TORCH_CHECK(fraction >= 0 && fraction <= 1, invalid);
            const auto bytes = static_cast<uint64_t>(fraction * static_cast<double>(memory_of(static_cast<DeviceIndex>(device))));
            check(aq.aq_set_limit(runtime(), static_cast<uint32_t>(device), bytes, nullptr));
            fraction_of(static_cast<DeviceIndex>(device)) = {fraction, bytes};
        });
        set_base_alloc_fn([previous](void* memory, size_t* size) {
            void* base = aq.aq_torch_base_alloc(memory, size);
            if (base == nullptr && previous != nullptr) return previous->getBaseAllocation(memory, size);
            const std::string said = base == nullptr ? aq.aq_last_error() : "";
            TORCH_CHECK(base != nullptr, said);
            return base;
        });
        set_record_stream_fn([](void* memory, cudaStream_t stream) {
            const aq_status status = aq.aq_torch_record_stream(memory, stream);
            // Memory that is not the allocator's own is its owner's business, as with PyTorch's.
            if (status != AQ_ERROR_FOREIGN_BLOCK && status != AQ_ERROR_DOUBLE_FREE) check(status);
        });
        set_begin_allocate_to_pool([](int device, MempoolId_t id, Filter filter) {
            // The library's from here on.
            check(aq.aq_torch_pool_begin(device, id.first, id.second, belongs, new Filter(std::move(filter)), drop_filter));
        });
        set_end_allocate_to_pool_fn([](int device, MempoolId_t id) {
            check(aq.aq_torch_pool_end(device, id.first, id.second));
        });
        set_release_pool([previous](int device, MempoolId_t id) {
            // Of a graph's destructor, or a MemPool's.
            const aq_status status = aq.aq_torch_pool_release(device, id.first, id.second);
            if (status == AQ_ERROR_BAD_ARGUMENT && previous != nullptr) {
                previous->releasePool(static_cast<DeviceIndex>(device), id);
                return;
            }
            if (status != AQ_OK) report("a pool was not released", status);
        });
    }

    c10::DataPtr allocate(size_t size) override {
        const DeviceIndex device = current_device();
        void* memory = size == 0 ? nullptr : take(size, device, c10::cuda::getCurrentCUDAStream(device));
        return {memory, memory, &drop, c10::Device(c10::DeviceType::CUDA, device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &drop; }

    void* raw_alloc(size_t size) override {
        if (size == 0) return nullptr;
        const DeviceIndex device = current_device();
        return take(size, device, c10::cuda::getCurrentCUDAStream(device));
    }
    void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
        return size == 0 ? nullptr : take(size, current_device(), stream);
    }
    void raw_delete(void* memory) override {
        const aq_status status = free_block(memory);
        if (status == AQ_ERROR_FOREIGN_BLOCK && previous != nullptr) previous->raw_delete(memory);
        else check(status);
    }
    void recordStream(const c10::DataPtr& memory, c10::cuda::CUDAStream stream) override {
        CUDAPluggableAllocator::recordStream(memory, stream);
        // It leaves out what is not its own.
        if (C10_UNLIKELY(previous != nullptr)) previous->recordStream(memory, stream);
    }

    DeviceStats getDeviceStats(DeviceIndex device) override {
        const aq_stats from = stats_of(device);
        DeviceStats to{};
        const auto set = [](auto& stat, uint64_t current, uint64_t peak) {
            stat[0].current = static_cast<int64_t>(current);
            stat[0].peak = static_cast<int64_t>(peak);
        };
        const uint64_t active = from.live + from.pending;
        // Blocks are counted, but not how many there have been at once.
        set(to.allocation, from.blocks, from.blocks);
        set(to.active, from.blocks, from.blocks);
        set(to.allocated_bytes, from.live, from.peak_live);
        set(to.active_bytes, active, std::max(active, from.peak_live));
        set(to.requested_bytes, from.requested, from.peak_requested);
        set(to.reserved_bytes, from.physical, from.peak_physical);
        set(to.inactive_split_bytes, from.cached, from.cached);
        const Counts now = counts_of(device, from), reset = counts_at_reset(device);
        const auto accumulate = [](auto& stat, uint64_t allocated, uint64_t freed) {
            stat[0].allocated = static_cast<int64_t>(allocated);
            stat[0].freed = static_cast<int64_t>(freed);
        };
        accumulate(to.allocation, now.allocations - reset.allocations, now.frees - reset.frees);
        accumulate(to.active, now.allocations - reset.allocations, now.frees - reset.frees);
        // All in requested sizes.
        for (auto* bytes : {&to.allocated_bytes, &to.active_bytes, &to.requested_bytes}) {
            accumulate(*bytes, now.requested - reset.requested, now.freed - reset.freed);
        }
        accumulate(to.reserved_bytes, now.taken - reset.taken, now.released - reset.released);
        to.num_ooms = static_cast<int64_t>(now.failures - reset.failures);
        to.num_device_alloc = static_cast<int64_t>(now.growths - reset.growths);
        return to;
    }
    void resetAccumulatedStats(DeviceIndex device) override {
        const Counts now = counts_of(device, stats_of(device));
        const std::lock_guard<std::mutex> lock(resets_mutex);
        if (resets.size() <= static_cast<size_t>(device)) resets.resize(device + 1);
        resets[device] = now;
    }
    // Until it is enabled again, all memory is the driver's own.
    void enable(bool value) override { uncached().serves.store(!value); }
    bool isEnabled() const override { return !uncached().serves.load(); }
    // Memory of any size comes together from free parts, so the largest block is all that is not in use.
    void cacheInfo(DeviceIndex device, size_t* largest) override {
        const aq_stats stats = stats_of(device);
        const uint64_t limit = limit_of(device), used = stats.live + stats.pending;
        *largest = limit > used ? limit - used : 0;
    }
    void resetPeakStats(DeviceIndex device) override {
        check(aq.aq_reset_peaks(runtime(), static_cast<uint32_t>(device)));
    }
    // What was set, to the bit, unless the limit has been changed since.
    double getMemoryFraction(DeviceIndex device) {
        const auto [fraction, bytes] = fraction_of(device);
        const uint64_t limit = limit_of(device);
        if (limit == bytes) return fraction;
        return std::min(1.0, static_cast<double>(limit) / static_cast<double>(memory_of(device)));
    }

    bool isHistoryEnabled() { return history().records(); }
    void recordHistory(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
                       const std::vector<std::string>& skipped) {
        history().set(enabled, recorder, most, when, clear, skipped);
    }
    void recordHistory(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear) {
        history().set(enabled, recorder, most, when, clear, {});
    }
    void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) {
        history().annotate(current_device(), pairs);
    }
    void pushCompileContext(std::string& context) { History::compile_contexts().push_back(context); }
    void popCompileContext() {
        if (!History::compile_contexts().empty()) History::compile_contexts().pop_back();
    }
    void setUserMetadata(const std::string& metadata) { History::user_metadata() = metadata; }
    std::string getUserMetadata() { return History::user_metadata(); }
    void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override { history().track(std::move(tracker)); }
    SnapshotInfo snapshot(MempoolId_t pool, bool with_traces) { return history().snapshot(pool, with_traces); }
    SnapshotInfo snapshot(MempoolId_t pool) { return history().snapshot(pool, true); }

    // CUDA graph trees capture one graph behind another whose results are live. They bring the pool back to the state
    // behind the first, whose launches allocate nothing.
    std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t id) override {
        return std::make_shared<PoolState>(id, blocks_of_pool(device, id));
    }
    CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<AllocatorState> to) override {
        const auto state = std::dynamic_pointer_cast<PoolState>(to);
        TORCH_CHECK(state != nullptr, "a state of another allocator");
        CheckpointDelta delta;
        std::unordered_map<uint64_t, aq_torch_block> kept;
        for (const auto& wanted : state->blocks) kept.emplace(wanted.address, wanted);
        std::unordered_set<uint64_t> live;
        for (const auto& block : blocks_of_pool(device, state->id)) {
            delta.ptrs_freed.push_back(pointer_to(block.address));
            const auto wanted = kept.find(block.address);
            if (wanted != kept.end() && is_same(wanted->second, block)) live.insert(block.address);
            else raw_delete(pointer_to(block.address));
        }
        for (const auto& wanted : state->blocks) {
            if (live.count(wanted.address) != 0) continue;
            check(aq.aq_torch_pool_place(device, &wanted));
            requested.add(device, wanted.bytes);
            tell_of_alloc(pointer_to(wanted.address), wanted.bytes, device, static_cast<cudaStream_t>(wanted.stream));
        }
        for (const auto& wanted : state->blocks) {
            void* memory = pointer_to(wanted.address);
            delta.dataptrs_allocd.emplace_back(memory, memory, &drop, c10::Device(c10::DeviceType::CUDA, device));
        }
        return delta;
    }
    bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t id, const std::unordered_set<void*>& expected) {
        const auto blocks = blocks_of_pool(device, id);
        return blocks.size() == expected.size() &&
            std::all_of(blocks.begin(), blocks.end(), [&](const auto& block) { return expected.count(pointer_to(block.address)) != 0; });
    }
    void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
        const std::lock_guard<std::mutex> lock(observers_mutex);
        observers.push_back(std::move(observer));
    }

    // torch.cuda.MemPool over this allocator: graphs may be captured into it, and all else is served as ever.
    void createOrIncrefPool(DeviceIndex device, MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator) {
        TORCH_CHECK(!allocator, "a MemPool with an allocator of its own needs PyTorch's own allocator underneath");
        check(aq.aq_torch_pool_retain(device, id.first, id.second));
    }
    // A block takes its own size, so none is split. Only snapshots differ.
    void setNoSplit(DeviceIndex, MempoolId_t id) { history().separate(id); }
    // A MemPool's destructor takes this back, whether it was asked or not, and may raise nothing.
    void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use) {
        const aq_status status = aq.aq_torch_pool_use_on_oom(device, id.first, id.second, use ? 1 : 0);
        if (use) check(status);
        else if (status != AQ_OK) report("a pool serves other requests", status);
    }
    void setUseOnOOM(DeviceIndex device, MempoolId_t id) { setUseOnOOM(device, id, true); }
    int getPoolUseCount(DeviceIndex device, MempoolId_t id) {
        int uses = 0;
        check(aq.aq_torch_pool_uses(device, id.first, id.second, &uses));
        return uses == 0 && previous != nullptr ? previous->getPoolUseCount(device, id) : uses;
    }

    // torch.multiprocessing: a tensor's block stays in place until it is freed, which PyTorch's reference counts put off until
    // no process uses it.
    ShareableHandle shareIpcHandle(void* memory) override {
        ShareableHandle shared{0, std::string(AQ_TORCH_SHARE_BYTES, '\0')};
        size_t offset = 0;
        const aq_status status = aq.aq_torch_share(memory, &shared.handle[0], &offset);
        if (status == AQ_ERROR_FOREIGN_BLOCK && previous != nullptr) return previous->shareIpcHandle(memory);
        check(status);
        shared.offset = static_cast<ptrdiff_t>(offset);
        return shared;
    }
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return received().open(handle, current_device()); }

   private:
    CUDAAllocator* const previous;

    // What is counted from the beginning. Bytes `taken` from the driver, and `released` to it.
    struct Counts {
        uint64_t allocations = 0, frees = 0, failures = 0, growths = 0;
        uint64_t requested = 0, freed = 0, taken = 0, released = 0;
    };
    static Counts counts_of(DeviceIndex device, const aq_stats& from) {
        // Blocks that others hold in the library's pool are live, and were not requested here.
        const uint64_t total = std::max(requested.sum(device), from.requested);
        return {from.allocations, from.frees, from.failures, from.growths,
                total, total - from.requested, from.physical + from.reaped, from.reaped};
    }
    // As they were when PyTorch's counters were set to zero.
    Counts counts_at_reset(DeviceIndex device) {
        const std::lock_guard<std::mutex> lock(resets_mutex);
        return static_cast<size_t>(device) < resets.size() ? resets[device] : Counts{};
    }
    std::mutex resets_mutex;
    std::vector<Counts> resets;
};

template <typename F>
void find(void* library, const char* name, F& to) {
    to = reinterpret_cast<F>(dlsym(library, name));
    const std::string said = std::string("the library has no ") + name + ": it is of another version than aquifer_torch";
    TORCH_CHECK(to != nullptr, said);
}

// Runs `work`, and writes what it throws to `error`: 0, 1 for an allocator that is in use already, or 2.
template <typename Work>
int told(char* error, size_t bytes, Work work) {
    const auto say = [&](const char* text) {
        std::strncpy(error, text, bytes - 1);
        error[bytes - 1] = '\0';
    };
    try {
        work();
        return 0;
    } catch (const c10::Error& thrown) {
        say(thrown.what_without_backtrace());
        return std::strstr(error, "already initialized") != nullptr ? 1 : 2;
    } catch (const std::exception& thrown) {
        say(thrown.what());
        return 2;
    }
}

}  // namespace

// Makes the library at `path` the allocator of the process.
extern "C" __attribute__((visibility("default"))) int aquifer_companion_install(const char* path, char* error, size_t bytes) {
    return told(error, bytes, [&] {
        void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        const std::string said = library == nullptr ? dlerror() : "";
        TORCH_CHECK(library != nullptr, said);
#define AQUIFER_FIND(name) find(library, #name, aq.name);
        AQUIFER_CALLS(AQUIFER_FIND)
#undef AQUIFER_FIND
        auto& current = c10::cuda::CUDACachingAllocator::allocator;
        CUDAAllocator* const previous = current.load();
        if (!previous->initialized()) {
            torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(std::make_shared<Aquifer>(nullptr));
            return;
        }
        // Any other keeps no account of which memory is its own.
        TORCH_CHECK(previous->name() == "native", "PyTorch's allocator is already initialized, and is not its native one");
        // Never destroyed: tensors are freed until the process ends.
        auto* const ours = new Aquifer(previous);
        previous->emptyCache();
        ours->init(c10::cuda::device_count());
        current.store(ours);
    });
}
