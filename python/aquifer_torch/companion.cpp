// PyTorch's allocator for the whole process, over the functions of libaquifer_ffi.
//
// torch.cuda.memory.CUDAPluggableAllocator calls an allocator by two function pointers. That leaves four things undone,
// which are what this file is for:
//   - what has no memory answers with null, which a kernel then writes to: here it raises torch.OutOfMemoryError, with the
//     library's account of who holds what;
//   - graph captures and memory pools are announced by a std::function, which C has not;
//   - statistics, cacheInfo (cuDNN's benchmark mode asks it) and the memory fraction are refused;
//   - every pair goes through a mutex and a hash map that remember sizes, which the library knows itself.
// So this is a subclass that overrides those and sets the hooks for everything else.
//
// aquifer_torch compiles it on the user's machine, against his PyTorch, and loads it by ctypes: the functions at the end.

#include "aquifer.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

using c10::DeviceIndex;
using c10::cuda::MempoolId_t;
using c10::cuda::CUDACachingAllocator::CUDAAllocator;
using c10::cuda::CUDACachingAllocator::DeviceStats;
using c10::cuda::CUDACachingAllocator::OutOfMemoryObserver;
using torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

// What is called of the library, by its names in aquifer.h. Found at run time, so that a program can name the file.
#define AQUIFER_CALLS(call)                                                                                              \
    call(aq_last_error) call(aq_status_name) call(aq_device_stats) call(aq_limit) call(aq_set_limit) call(aq_device)     \
    call(aq_reset_peaks) call(aq_torch_runtime) call(aq_torch_init) call(aq_torch_malloc) call(aq_torch_free) call(aq_torch_record_stream)    \
    call(aq_torch_base_alloc) call(aq_torch_reset) call(aq_torch_pool_begin) call(aq_torch_pool_end)                     \
    call(aq_torch_pool_retain) call(aq_torch_pool_release) call(aq_torch_pool_uses)

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

// Of a tensor's destructor.
void drop(void* memory) {
    if (memory == nullptr) return;
    const aq_status status = aq.aq_torch_free(memory, 0, -1, nullptr);
    if (C10_UNLIKELY(status != AQ_OK)) report("a tensor's memory was not freed", status);
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

// Who wants to be told before there is an error for lack of memory: they stay for good, as PyTorch has it.
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
[[noreturn]] C10_NOINLINE void refuse(aq_status status, size_t size, DeviceIndex device) {
    const std::string text = aq.aq_last_error();
    const bool absurd = size >= 1152921504606846976ULL;
    const bool memory = status == AQ_ERROR_OUT_OF_MEMORY || status == AQ_ERROR_OUT_OF_BUDGET || status == AQ_ERROR_TOO_LARGE;
    if (absurd || memory) tell_observers(device, size);
    TORCH_CHECK_WITH(OutOfMemoryError, !absurd, "CUDA out of memory. Tried to allocate more than 1EB memory.");
    const std::string said = "CUDA out of memory. Tried to allocate " + bytes_text(size) + ". GPU " + std::to_string(device) +
        " has a total capacity of " + bytes_text(memory_of(device)) + ".\n" + text;
    TORCH_CHECK_WITH(OutOfMemoryError, !memory, said);
    raise(status);
}

void* take(size_t size, DeviceIndex device, cudaStream_t stream) {
    void* memory = nullptr;
    const aq_status status = aq.aq_torch_malloc(static_cast<ptrdiff_t>(size), device, stream, &memory);
    if (C10_UNLIKELY(status != AQ_OK)) refuse(status, size, device);
    return memory;
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

// Functions that PyTorch's versions declare differently are not marked `override`: where one does not match, PyTorch's
// own refusal stands.
struct Aquifer final : CUDAPluggableAllocator {
    Aquifer()
        : CUDAPluggableAllocator(
              [](size_t size, int device, cudaStream_t stream) {
                  return take(size, static_cast<DeviceIndex>(device), stream);
              },
              [](void* memory, size_t, int, cudaStream_t) { drop(memory); }) {
        set_init_fn([](int devices) { check(aq.aq_torch_init(devices)); });
        set_reset_fn([] {
            // Also of a MemPool's destructor.
            const aq_status status = aq.aq_torch_reset();
            if (status != AQ_OK) report("memory was not given back", status);
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
        set_release_pool([](int device, MempoolId_t id) {
            // Of a graph's destructor, or a MemPool's.
            const aq_status status = aq.aq_torch_pool_release(device, id.first, id.second);
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
        if (memory != nullptr) check(aq.aq_torch_free(memory, 0, -1, nullptr));
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
        to.allocation[0].allocated = static_cast<int64_t>(from.allocations);
        to.allocation[0].freed = static_cast<int64_t>(from.frees);
        set(to.active, from.blocks, from.blocks);
        set(to.allocated_bytes, from.live, from.peak_live);
        set(to.active_bytes, active, std::max(active, from.peak_live));
        set(to.requested_bytes, from.requested, from.peak_requested);
        set(to.reserved_bytes, from.physical, from.peak_physical);
        set(to.inactive_split_bytes, from.cached, from.cached);
        to.num_ooms = static_cast<int64_t>(from.failures);
        to.num_device_alloc = static_cast<int64_t>(from.growths);
        return to;
    }
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
    bool isHistoryEnabled() { return false; }
    void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
        const std::lock_guard<std::mutex> lock(observers_mutex);
        observers.push_back(std::move(observer));
    }

    // torch.cuda.MemPool over this allocator: graphs may be captured into it, and all else is served as ever.
    void createOrIncrefPool(DeviceIndex device, MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator) {
        TORCH_CHECK(!allocator, "a MemPool with an allocator of its own needs PyTorch's own allocator underneath");
        check(aq.aq_torch_pool_retain(device, id.first, id.second));
    }
    // A MemPool's destructor takes this back, whether it was asked or not, and may raise nothing.
    void setUseOnOOM(DeviceIndex, MempoolId_t, bool use) {
        TORCH_CHECK(!use, "pools are not taken from when memory is out: aquifer moves memory together by itself");
    }
    int getPoolUseCount(DeviceIndex device, MempoolId_t id) {
        int uses = 0;
        check(aq.aq_torch_pool_uses(device, id.first, id.second, &uses));
        return uses;
    }
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
        torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(std::make_shared<Aquifer>());
    });
}
