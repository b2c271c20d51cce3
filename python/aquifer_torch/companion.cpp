// PyTorch's allocator for the whole process, over the functions of libaquifer_ffi.
//
// torch.cuda.memory.CUDAPluggableAllocator calls an allocator by two function pointers. This subclass adds what that lacks:
//   - A request that cannot be served raises torch.OutOfMemoryError with the library's account of the holders. Otherwise it is
//     a null pointer, which the next kernel writes to.
//   - Graph captures and memory pools, which PyTorch announces by a std::function. MemPools with an allocator of their own are
//     served by PyTorch's native allocator, as without aquifer, and count against the limit.
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
#include <c10/util/ScopeExit.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
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
    call(aq_torch_share) call(aq_torch_receive) call(aq_torch_close) call(aq_charge) call(aq_uncharge)       \
    call(aq_registered_has)

struct Calls {
#define AQUIFER_MEMBER(name) decltype(&::name) name;
    AQUIFER_CALLS(AQUIFER_MEMBER)
#undef AQUIFER_MEMBER
};
Calls aq;

// PyTorch's native allocator, or null with another backend, and whether it was in use before. What it has is its: memory of
// before, and MemPools with an allocator of their own.
CUDAAllocator* native = nullptr;
bool native_was_used = false;

// Whether it is there, and CUDA is initialised.
bool has_native() { return native != nullptr && native->initialized(); }

// Calls it, where its version of PyTorch declares the function so.
template <typename Call>
void tell_native(const Call& call) {
    if constexpr (std::is_invocable_v<Call, CUDAAllocator*>) {
        if (has_native()) call(native);
    }
}

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
                segment.is_expandable = true;
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

// What allocators of MemPools have given to the native one, by address.
class Segments {
   public:
    // Returns null where it does not fit.
    void* allocate(CUDAAllocator& owner, size_t bytes) {
        Segment segment{bytes, current_device(), true};
        const aq_status status = aq.aq_charge(runtime(), static_cast<uint32_t>(segment.device), bytes);
        if (status == AQ_ERROR_OUT_OF_BUDGET) return nullptr;
        check(status);
        void* memory = nullptr;
        const auto undo = c10::make_scope_exit([&] {
            if (memory == nullptr) uncharge(segment);
        });
        memory = owner.raw_alloc(bytes);
        if (memory == nullptr) {
            // The driver may lack what the library caches. Its error would be the next kernel's as well.
            (void)cudaGetLastError();
            if (aq.aq_torch_reset() == AQ_OK) memory = owner.raw_alloc(bytes);
        }
        if (memory == nullptr) return nullptr;
        // The chunks of a registered pool count already.
        segment.counts = aq.aq_registered_has(memory) == 0;
        if (!segment.counts) uncharge(segment);
        const std::lock_guard<std::mutex> lock(mutex);
        segments[static_cast<const char*>(memory)] = segment;
        count.store(segments.size());
        return memory;
    }

    void free(CUDAAllocator& owner, void* memory) {
        std::unique_lock<std::mutex> lock(mutex);
        const Segment segment = segments.extract(static_cast<const char*>(memory)).mapped();
        count.store(segments.size());
        lock.unlock();
        owner.raw_delete(memory);
        if (segment.counts) uncharge(segment);
    }

    size_t number() const { return count.load(std::memory_order_relaxed); }

    // Whether memory lies in one of them.
    bool hold(const void* memory) {
        if (C10_LIKELY(number() == 0)) return false;
        const std::lock_guard<std::mutex> lock(mutex);
        const auto after = segments.upper_bound(static_cast<const char*>(memory));
        if (after == segments.begin()) return false;
        const auto& [start, segment] = *std::prev(after);
        return memory < start + segment.bytes;
    }

    uint64_t bytes_of(DeviceIndex device) {
        uint64_t sum = 0;
        const std::lock_guard<std::mutex> lock(mutex);
        for (const auto& [start, segment] : segments) sum += segment.counts && segment.device == device ? segment.bytes : 0;
        return sum;
    }

   private:
    struct Segment {
        size_t bytes;
        DeviceIndex device;
        bool counts;
    };
    static void uncharge(const Segment& segment) {
        const aq_status status = aq.aq_uncharge(runtime(), static_cast<uint32_t>(segment.device), segment.bytes);
        if (status != AQ_OK) report("a segment stays charged", status);
    }
    std::atomic<size_t> count{0};
    std::mutex mutex;
    std::map<const char*, Segment> segments;
};
// Never destroyed: tensors are freed until the process ends.
Segments& segments = *new Segments;

// Whether memory that is not the library's may be the native allocator's.
bool may_be_native(const void* memory) { return native_was_used || segments.hold(memory); }

void free_block(void* memory) {
    if (memory == nullptr || C10_UNLIKELY(uncached().free(memory))) return;
    if (C10_UNLIKELY(segments.hold(memory))) return native->raw_delete(memory);
    if (C10_UNLIKELY(frees_are_told())) tell_of_free(memory);
    const aq_status status = aq.aq_torch_free(memory, 0, -1, nullptr);
    if (C10_UNLIKELY(status == AQ_ERROR_FOREIGN_BLOCK && native_was_used)) native->raw_delete(memory);
    else check(status);
}

// Of a tensor's destructor, which may raise nothing.
void drop(void* memory) {
    try {
        free_block(memory);
    } catch (const c10::Error& thrown) {
        std::fprintf(stderr, "aquifer: a tensor's memory was not freed: %s\n", thrown.what_without_backtrace());
    }
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
    std::string text = aq.aq_last_error();
    const uint64_t pooled = segments.bytes_of(device);
    if (pooled > 0) text += "\nMemPools with an allocator of their own hold " + bytes_text(pooled) + ".";
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

// The pools that have begun, in this order, and the MemPools that the native allocator serves: those with one of their own.
class Pools {
    // Stands in the native allocator for all pools of the library.
    static constexpr MempoolId_t OURS{~0ULL, ~0ULL};

    struct Begun {
        DeviceIndex device;
        MempoolId_t id;
        bool natives;
        Filter filter;
    };
    using List = std::vector<Begun>;

    template <typename Of>
    static auto find(Of& all, DeviceIndex device, MempoolId_t id) {
        return std::find_if(all.begin(), all.end(), [&](const Begun& one) { return one.device == device && one.id == id; });
    }
    static bool has_ours(const List& all, DeviceIndex device) {
        return std::any_of(all.begin(), all.end(), [&](const Begun& one) { return one.device == device && !one.natives; });
    }

   public:
    bool is_native(DeviceIndex device, MempoolId_t id) {
        const std::lock_guard<std::mutex> lock(mutex);
        return pools.count({device, id}) != 0;
    }

    // Adds a user of a pool of the native allocator, and creates it.
    void retain_native(DeviceIndex device, MempoolId_t id, std::shared_ptr<CUDAAllocator> owner) {
        TORCH_CHECK(has_native(), "a MemPool with an allocator of its own needs PyTorch's native allocator beneath aquifer; "
                    "remove the backend from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF");
        if (owner != nullptr) {
            owner = std::make_shared<CUDAPluggableAllocator>(
                [owner](size_t size, int, cudaStream_t) { return segments.allocate(*owner, size); },
                [owner](void* memory, size_t, int, cudaStream_t) { segments.free(*owner, memory); });
        }
        const std::lock_guard<std::mutex> changing(changes);
        tell_native([&](auto* to) -> decltype(to->createOrIncrefPool(device, id, owner)) {
            to->createOrIncrefPool(device, id, owner);
        });
        const std::lock_guard<std::mutex> lock(mutex);
        pools.try_emplace({device, id}, false);
    }

    // Removes a user. Returns whether the pool is the native allocator's.
    bool release_native(DeviceIndex device, MempoolId_t id) {
        const std::lock_guard<std::mutex> changing(changes);
        if (!is_native(device, id)) return false;
        const bool is_last = native->getPoolUseCount(device, id) == 1;
        native->releasePool(device, id);
        const std::lock_guard<std::mutex> lock(mutex);
        if (is_last) pools.erase({device, id});
        return true;
    }

    // Makes the free memory of a pool serve other requests, or ends that. Returns whether the pool is the native allocator's.
    bool spare_native(DeviceIndex device, MempoolId_t id, bool serves_last) {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto pool = pools.find({device, id});
        if (pool != pools.end()) pool->second = serves_last;
        return pool != pools.end();
    }

    void begin(DeviceIndex device, MempoolId_t id, const Filter& filter) {
        const bool natives = is_native(device, id);
        // The filter is the library's from here on.
        if (!natives) check(aq.aq_torch_pool_begin(device, id.first, id.second, belongs, new Filter(filter), drop_filter));
        const std::lock_guard<std::mutex> changing(changes);
        List next = *list();
        if (natives) {
            native->beginAllocateToPool(device, id, filter);
        } else if (has_native() && !has_ours(next, device)) {
            // It may query no event and free no memory meanwhile.
            native->beginAllocateToPool(device, OURS, [](cudaStream_t) { return false; });
        }
        next.push_back({device, id, natives, filter});
        publish(std::move(next));
    }

    void end(DeviceIndex device, MempoolId_t id) {
        std::unique_lock<std::mutex> changing(changes);
        List next = *list();
        const auto found = find(next, device, id);
        const bool known = found != next.end(), natives = known && found->natives;
        if (known) next.erase(found);
        if (natives) native->endAllocateToPool(device, id);
        if (known && !natives && has_native() && !has_ours(next, device)) {
            native->endAllocateToPool(device, OURS);
            native->releasePool(device, OURS);
        }
        publish(std::move(next));
        changing.unlock();
        if (!natives) check(aq.aq_torch_pool_end(device, id.first, id.second));
    }

    // Prepares the native allocator for captures of the library.
    static void prepare(int devices) {
        for (int device = 0; device < devices; ++device) native->createOrIncrefPool(static_cast<DeviceIndex>(device), OURS);
    }

    bool any_native() const { return natives_begun.load(std::memory_order_relaxed) != 0; }

    // Whether the innermost pool that serves a stream is the native allocator's; nothing if none serves it.
    std::optional<bool> serving(DeviceIndex device, cudaStream_t stream) {
        const auto all = list();
        for (auto one = all->rbegin(); one != all->rend(); ++one) {
            if (one->device == device && one->filter(stream)) return one->natives;
        }
        return std::nullopt;
    }

    // Has the native allocator free what pools that are gone have cached. Returns whether there was any.
    bool empty_native() {
        const size_t before = segments.number();
        if (before == 0 || !list()->empty()) return false;
        native->emptyCache();
        return segments.number() < before;
    }

    // Allocates from free memory of the native allocator's pools that serve other requests, for a thread that no pool serves.
    // Null if none has as much.
    void* take_spare(size_t size, DeviceIndex device, cudaStream_t stream) {
        if (serving(device, stream)) return nullptr;
        const auto fits = [&](const SegmentInfo& segment) {
            return segment.device == device && segment.stream == stream && segment.is_large == (size > 1 << 20) &&
                std::any_of(segment.blocks.begin(), segment.blocks.end(), [&](const BlockInfo& block) {
                    return !block.active && static_cast<size_t>(block.size) >= rounded(size);
                });
        };
        // No pool begins or ends meanwhile, so what is found stays free. Nothing here calls the driver.
        const std::lock_guard<std::mutex> changing(changes);
        const auto current = list();
        for (const auto& [key, serves_last] : known()) {
            const MempoolId_t id = key.second;
            if (!serves_last || key.first != device || find(*current, device, id) != current->end()) continue;
            // A request that the native allocator refuses would be counted, and told to observers.
            const auto held = native->snapshot(id).segments;
            if (std::none_of(held.begin(), held.end(), fits)) continue;
            native->beginAllocateToPool(device, id, [thread = std::this_thread::get_id()](cudaStream_t) {
                return std::this_thread::get_id() == thread;
            });
            const auto end = c10::make_scope_exit([&] {
                native->endAllocateToPool(device, id);
                native->releasePool(device, id);
            });
            return native->raw_alloc_with_stream(size, stream);
        }
        return nullptr;
    }

   private:
    std::shared_ptr<const List> list() {
        const std::lock_guard<std::mutex> lock(mutex);
        return begun;
    }
    // The native allocator's pools, each with whether it serves other requests.
    using Known = std::map<std::pair<DeviceIndex, MempoolId_t>, bool>;
    Known known() {
        const std::lock_guard<std::mutex> lock(mutex);
        return pools;
    }
    void publish(List next) {
        natives_begun.store(std::count_if(next.begin(), next.end(), [](const Begun& one) { return one.natives; }));
        std::shared_ptr<const List> made = std::make_shared<List>(std::move(next));
        const std::lock_guard<std::mutex> lock(mutex);
        begun.swap(made);
    }

    // Held while pools begin, end and are released. Filters run without it.
    std::mutex changes;
    std::mutex mutex;
    Known pools;
    std::shared_ptr<const List> begun = std::make_shared<List>();
    std::atomic<ptrdiff_t> natives_begun{0};
};
// Never destroyed: pools are released until the process ends.
Pools& pools = *new Pools;

void* take(size_t size, DeviceIndex device, cudaStream_t stream) {
    if (C10_UNLIKELY(uncached().serves.load(std::memory_order_relaxed))) return uncached().allocate(size);
    if (C10_UNLIKELY(pools.any_native()) && pools.serving(device, stream) == true) {
        return native->raw_alloc_with_stream(size, stream);
    }
    void* memory = nullptr;
    const auto bytes = static_cast<ptrdiff_t>(size);
    aq_status status = aq.aq_torch_malloc(bytes, device, stream, &memory);
    const auto is_short = [&] { return status == AQ_ERROR_OUT_OF_MEMORY || status == AQ_ERROR_OUT_OF_BUDGET; };
    if (C10_UNLIKELY(is_short()) && (run_free_memory_callbacks() | pools.empty_native())) {
        status = aq.aq_torch_malloc(bytes, device, stream, &memory);
    }
    if (C10_UNLIKELY(is_short())) {
        if (void* spare = pools.take_spare(size, device, stream)) return spare;
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
struct Aquifer final : CUDAPluggableAllocator {
    Aquifer()
        : CUDAPluggableAllocator(
              [](size_t size, int device, cudaStream_t stream) {
                  return take(size, static_cast<DeviceIndex>(device), stream);
              },
              [](void* memory, size_t, int, cudaStream_t) { drop(memory); }) {
        set_init_fn([](int devices) {
            check(aq.aq_torch_init(devices));
            if (native == nullptr) return;
            native->init(devices);
            Pools::prepare(devices);
        });
        set_reset_fn([] {
            // Also of a MemPool's destructor.
            const aq_status status = aq.aq_torch_reset();
            if (status != AQ_OK) report("memory was not given back", status);
            if (has_native()) native->emptyCache();
        });
        set_memory_fraction_fn([](double fraction, int device) {
            const std::string invalid = "invalid fraction: " + std::to_string(fraction) + ". Please set within [0, 1]";
            TORCH_CHECK(fraction >= 0 && fraction <= 1, invalid);
            const auto bytes = static_cast<uint64_t>(fraction * static_cast<double>(memory_of(static_cast<DeviceIndex>(device))));
            check(aq.aq_set_limit(runtime(), static_cast<uint32_t>(device), bytes, nullptr));
            fraction_of(static_cast<DeviceIndex>(device)) = {fraction, bytes};
        });
        set_base_alloc_fn([](void* memory, size_t* size) {
            void* base = aq.aq_torch_base_alloc(memory, size);
            if (base == nullptr && may_be_native(memory)) return native->getBaseAllocation(memory, size);
            const std::string said = base == nullptr ? aq.aq_last_error() : "";
            TORCH_CHECK(base != nullptr, said);
            return base;
        });
        set_record_stream_fn([](void* memory, cudaStream_t stream) {
            const aq_status status = aq.aq_torch_record_stream(memory, stream);
            // Memory that is not the allocator's own is its owner's business, as with PyTorch's.
            if (status != AQ_ERROR_FOREIGN_BLOCK && status != AQ_ERROR_DOUBLE_FREE) check(status);
        });
        set_begin_allocate_to_pool([](int device, MempoolId_t id, const Filter& filter) {
            pools.begin(static_cast<DeviceIndex>(device), id, filter);
        });
        set_end_allocate_to_pool_fn([](int device, MempoolId_t id) { pools.end(static_cast<DeviceIndex>(device), id); });
        set_release_pool([](int device, MempoolId_t id) {
            // Of a graph's destructor, or a MemPool's.
            if (pools.release_native(static_cast<DeviceIndex>(device), id)) return;
            const aq_status status = aq.aq_torch_pool_release(device, id.first, id.second);
            if (status == AQ_ERROR_BAD_ARGUMENT && native_was_used) {
                native->releasePool(static_cast<DeviceIndex>(device), id);
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
    void raw_delete(void* memory) override { free_block(memory); }
    void recordStream(const c10::DataPtr& memory, c10::cuda::CUDAStream stream) override {
        if (C10_UNLIKELY(memory.get_deleter() == &drop && segments.hold(memory.get()))) {
            // It looks for its own deleter.
            c10::DataPtr seen(memory.get(), memory.get(), native->raw_deleter(), memory.device());
            const auto keep = c10::make_scope_exit([&] { seen.release_context(); });
            return native->recordStream(seen, stream);
        }
        CUDAPluggableAllocator::recordStream(memory, stream);
        // It leaves out what is not its own.
        if (C10_UNLIKELY(has_native())) native->recordStream(memory, stream);
    }

    DeviceStats getDeviceStats(DeviceIndex device) override {
        const aq_stats from = stats_of(device);
        // Peaks add up to one that is never too low.
        DeviceStats to = has_native() ? native->getDeviceStats(device) : DeviceStats{};
        const auto set = [](auto& stat, uint64_t current, uint64_t peak) {
            stat[0].current += static_cast<int64_t>(current);
            stat[0].peak += static_cast<int64_t>(peak);
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
            stat[0].allocated += static_cast<int64_t>(allocated);
            stat[0].freed += static_cast<int64_t>(freed);
        };
        accumulate(to.allocation, now.allocations - reset.allocations, now.frees - reset.frees);
        accumulate(to.active, now.allocations - reset.allocations, now.frees - reset.frees);
        // All in requested sizes.
        for (auto* bytes : {&to.allocated_bytes, &to.active_bytes, &to.requested_bytes}) {
            accumulate(*bytes, now.requested - reset.requested, now.freed - reset.freed);
        }
        accumulate(to.reserved_bytes, now.taken - reset.taken, now.released - reset.released);
        to.num_ooms += static_cast<int64_t>(now.failures - reset.failures);
        to.num_device_alloc += static_cast<int64_t>(now.growths - reset.growths);
        return to;
    }
    void resetAccumulatedStats(DeviceIndex device) override {
        if (has_native()) native->resetAccumulatedStats(device);
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
        const uint64_t limit = limit_of(device), used = stats.live + stats.pending + segments.bytes_of(device);
        *largest = limit > used ? limit - used : 0;
    }
    void resetPeakStats(DeviceIndex device) override {
        check(aq.aq_reset_peaks(runtime(), static_cast<uint32_t>(device)));
        if (has_native()) native->resetPeakStats(device);
    }
    // What was set, to the bit, unless the limit has been changed since.
    double getMemoryFraction(DeviceIndex device) {
        const auto [fraction, bytes] = fraction_of(device);
        const uint64_t limit = limit_of(device);
        if (limit == bytes) return fraction;
        return std::min(1.0, static_cast<double>(limit) / static_cast<double>(memory_of(device)));
    }

    bool isHistoryEnabled() { return history().records(); }
    // The native allocator records its own pools, and its trackers and observers are told of them.
    void recordHistory(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
                       const std::vector<std::string>& skipped) {
        history().set(enabled, recorder, most, when, clear, skipped);
        tell_native([&](auto* to) -> decltype(to->recordHistory(enabled, recorder, most, when, clear, skipped)) {
            to->recordHistory(enabled, recorder, most, when, clear, skipped);
        });
    }
    void recordHistory(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear) {
        history().set(enabled, recorder, most, when, clear, {});
        tell_native([&](auto* to) -> decltype(to->recordHistory(enabled, recorder, most, when, clear)) {
            to->recordHistory(enabled, recorder, most, when, clear);
        });
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
    void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
        if (has_native()) native->attachAllocatorTraceTracker(tracker);
        history().track(std::move(tracker));
    }
    SnapshotInfo snapshot(MempoolId_t pool, bool with_traces) {
        SnapshotInfo state = history().snapshot(pool, with_traces);
        if (!has_native()) return state;
        SnapshotInfo other = native->snapshot(pool);
        std::move(other.segments.begin(), other.segments.end(), std::back_inserter(state.segments));
        for (size_t device = 0; with_traces && device < other.device_traces.size(); ++device) {
            auto& traces = state.device_traces.at(device);
            for (auto& entry : other.device_traces[device]) {
                if (entry.action_ != TraceEntry::SNAPSHOT) traces.push_back(std::move(entry));
            }
            std::stable_sort(traces.begin(), traces.end(), [](const auto& a, const auto& b) { return a.time_.t_ < b.time_.t_; });
        }
        return state;
    }
    SnapshotInfo snapshot(MempoolId_t pool) { return snapshot(pool, true); }

    // CUDA graph trees capture one graph behind another whose results are live. They bring the pool back to the state
    // behind the first, whose launches allocate nothing.
    std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t id) override {
        if (pools.is_native(device, id)) return native->getCheckpointState(device, id);
        return std::make_shared<PoolState>(id, blocks_of_pool(device, id));
    }
    CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<AllocatorState> to) override {
        const auto state = std::dynamic_pointer_cast<PoolState>(to);
        if (state == nullptr && has_native()) return native->setCheckpointPoolState(device, to);
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
        if (pools.is_native(device, id)) return native->checkPoolLiveAllocations(device, id, expected);
        const auto blocks = blocks_of_pool(device, id);
        return blocks.size() == expected.size() &&
            std::all_of(blocks.begin(), blocks.end(), [&](const auto& block) { return expected.count(pointer_to(block.address)) != 0; });
    }
    void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
        if (has_native()) native->attachOutOfMemoryObserver(observer);
        const std::lock_guard<std::mutex> lock(observers_mutex);
        observers.push_back(std::move(observer));
    }

    // torch.cuda.MemPool: graphs may be captured into it, and all else is served as ever.
    void createOrIncrefPool(DeviceIndex device, MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator) {
        if (allocator != nullptr || pools.is_native(device, id)) return pools.retain_native(device, id, std::move(allocator));
        check(aq.aq_torch_pool_retain(device, id.first, id.second));
    }
    // A block takes its own size, so none is split. Only snapshots differ.
    void setNoSplit(DeviceIndex device, MempoolId_t id) {
        history().separate(id);
        if (!pools.is_native(device, id)) return;
        tell_native([&](auto* to) -> decltype(to->setNoSplit(device, id)) { to->setNoSplit(device, id); });
    }
    // A MemPool's destructor takes this back, whether it was asked or not, and may raise nothing.
    void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use) {
        if (pools.spare_native(device, id, use)) return;
        const aq_status status = aq.aq_torch_pool_use_on_oom(device, id.first, id.second, use ? 1 : 0);
        if (use) check(status);
        else if (status != AQ_OK) report("a pool serves other requests", status);
    }
    void setUseOnOOM(DeviceIndex device, MempoolId_t id) { setUseOnOOM(device, id, true); }
    int getPoolUseCount(DeviceIndex device, MempoolId_t id) {
        if (pools.is_native(device, id)) return native->getPoolUseCount(device, id);
        int uses = 0;
        check(aq.aq_torch_pool_uses(device, id.first, id.second, &uses));
        return uses == 0 && native_was_used ? native->getPoolUseCount(device, id) : uses;
    }

    // torch.multiprocessing: a tensor's block stays in place until it is freed, which PyTorch's reference counts put off until
    // no process uses it.
    ShareableHandle shareIpcHandle(void* memory) override {
        ShareableHandle shared{0, std::string(AQ_TORCH_SHARE_BYTES, '\0')};
        size_t offset = 0;
        const aq_status status = aq.aq_torch_share(memory, &shared.handle[0], &offset);
        if (status == AQ_ERROR_FOREIGN_BLOCK && may_be_native(memory)) return native->shareIpcHandle(memory);
        check(status);
        shared.offset = static_cast<ptrdiff_t>(offset);
        return shared;
    }
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return received().open(handle, current_device()); }

   private:
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
        if (previous->name() == "native") native = previous;
        if (!previous->initialized()) {
            torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(std::make_shared<Aquifer>());
            return;
        }
        // Any other keeps no account of which memory is its own.
        TORCH_CHECK(native != nullptr, "PyTorch's allocator is already initialized, and is not its native one");
        native_was_used = true;
        // Never destroyed: tensors are freed until the process ends.
        auto* const ours = new Aquifer;
        native->emptyCache();
        ours->init(c10::cuda::device_count());
        current.store(ours);
    });
}
