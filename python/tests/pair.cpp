// What PyTorch pays for a tensor's memory: an allocation and its free, as tensors make them, in ns a pair.
#include <c10/cuda/CUDACachingAllocator.h>

#include <chrono>
#include <vector>

// `held` blocks are out at any time, of sizes that go round; the oldest of them is freed before the next is allocated.
extern "C" __attribute__((visibility("default"))) double pair_ns(const size_t* sizes, size_t count, size_t held, size_t pairs) {
    auto* allocator = c10::cuda::CUDACachingAllocator::get();
    std::vector<c10::DataPtr> out(held);
    const auto round = [&](size_t times) {
        for (size_t n = 0; n < times; n++) {
            auto& slot = out[n % held];
            slot.clear();
            slot = allocator->allocate(sizes[n % count]);
        }
    };
    round(held + 2000);
    const auto begun = std::chrono::steady_clock::now();
    round(pairs);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begun;
    return took.count() / static_cast<double>(pairs);
}
