// RMM's containers, adaptors and current resource over aquifer.hpp, on a GPU, and what an
// allocation and its free cost beside RMM's own resources.
//
// ci/rmm builds it. Needs C++20, as RMM 26.10 does.
//
// Exit: 0 if all of it holds, 1 if not.
#include <algorithm>
#include <aquifer.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime_api.h>
#include <random>
#include <rmm/cuda_stream.hpp>
#include <rmm/device_buffer.hpp>
#include <rmm/device_uvector.hpp>
#include <rmm/error.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/limiting_resource_adaptor.hpp>
#include <rmm/mr/per_device_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <rmm/mr/statistics_resource_adaptor.hpp>
#include <rmm/version_config.hpp>
#include <vector>

static_assert(AQUIFER_CUDA_MR == 1, "the concepts of libcu++ are found");
static_assert(
    cuda::mr::resource_with<aquifer::device_resource, cuda::mr::device_accessible>);
static_assert(cuda::mr::resource_with<aquifer::pinned_resource, cuda::mr::device_accessible,
                                      cuda::mr::host_accessible>);
using throwing = aquifer::throwing<aquifer::device_resource, rmm::out_of_memory>;
static_assert(cuda::mr::resource_with<throwing, cuda::mr::device_accessible>);

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

void check(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "not so: %s\n", what);
    std::exit(1);
}

void check(cudaError_t status) { check(status == cudaSuccess, cudaGetErrorString(status)); }

std::uint64_t live(const aquifer::runtime &rt) {
    aq_stats stats{};
    stats.size = sizeof stats;
    aquifer::check(aq_device_stats(rt.get(), 0, &stats));
    return stats.live;
}

// Fills vectors on several streams while others are freed, and reads them back.
void vectors_keep_their_values(rmm::device_async_resource_ref memory) {
    std::vector<rmm::cuda_stream> streams(4);
    std::mt19937 random(7);
    std::vector<std::pair<rmm::device_uvector<int>, int>> all;
    for (int round = 0; round < 400; ++round) {
        const auto &stream = streams[random() % streams.size()];
        const std::size_t count = 1 + random() % (512 << 10);
        rmm::device_uvector<int> numbers(count, stream, memory);
        check(cudaMemsetAsync(numbers.data(), round & 0x7f, count * sizeof(int), stream.value()));
        all.emplace_back(std::move(numbers), (round & 0x7f) * 0x01010101);
        if (all.size() > 32) {
            auto [old, value] = std::move(all[random() % all.size()]);
            all.erase(std::remove_if(all.begin(), all.end(),
                                     [](const auto &one) { return one.first.data() == nullptr; }),
                      all.end());
            std::vector<int> back(old.size());
            check(cudaMemcpyAsync(back.data(), old.data(), old.size() * sizeof(int),
                                  cudaMemcpyDeviceToHost, old.stream().get()));
            old.stream().sync();
            for (const int number : back) check(number == value, "a vector keeps its values");
        }
    }
}

// Nanoseconds for an allocation and its free, the best of five rounds.
double pair(rmm::device_async_resource_ref memory, std::size_t bytes, cuda::stream_ref stream) {
    double best = 1e300;
    for (int round = 0; round < 5; ++round) {
        constexpr int pairs = 20000;
        const auto begun = std::chrono::steady_clock::now();
        for (int n = 0; n < pairs; ++n) {
            void *block = memory.allocate(stream, bytes, 256);
            memory.deallocate(stream, block, bytes, 256);
        }
        const std::chrono::duration<double, std::nano> took =
            std::chrono::steady_clock::now() - begun;
        best = std::min(best, took.count() / pairs);
        stream.sync();
    }
    return best;
}

}  // namespace

int main() try {
    check(cudaFree(nullptr));
    aquifer::runtime rt(aquifer::default_options());
    aquifer::device_resource memory(rt, 0);
    vectors_keep_their_values(memory);
    check(live(rt) == 0, "all of it is back");
    {
        // For all of RMM.
        auto before = rmm::mr::set_current_device_resource(memory);
        rmm::cuda_stream stream;
        rmm::device_buffer first(3 * mib, stream);
        check(live(rt) == 3 * mib, "the current resource serves");
        check(cudaMemsetAsync(first.data(), 5, first.size(), stream.value()));
        rmm::device_buffer copy(first, stream);
        copy.resize(4 * mib, stream);
        std::vector<unsigned char> back(first.size());
        check(cudaMemcpyAsync(back.data(), copy.data(), back.size(), cudaMemcpyDeviceToHost,
                              stream.value()));
        stream.synchronize();
        for (const unsigned char byte : back) check(byte == 5, "a resized copy keeps its bytes");
        rmm::mr::set_current_device_resource(before);
    }
    {
        throwing translated(rt, 0);
        bool refused = false;
        try {
            rmm::device_buffer more(std::size_t{1} << 50, rmm::cuda_stream_view{}, translated);
        } catch (const rmm::out_of_memory &) {
            refused = true;
        }
        check(refused, "a refusal is RMM's exception");
    }
    {
        rmm::mr::statistics_resource_adaptor counted(memory);
        rmm::mr::limiting_resource_adaptor limited(counted, 8 * mib);
        rmm::cuda_stream stream;
        rmm::device_uvector<char> held(6 * mib, stream, limited);
        bool refused = false;
        try {
            rmm::device_uvector<char> more(3 * mib, stream, limited);
        } catch (const std::bad_alloc &) {
            refused = true;
        }
        check(refused, "RMM's limit holds");
        check(static_cast<std::uint64_t>(counted.get_bytes_counter().value) == 6 * mib,
              "RMM's statistics count");
        refused = false;
        try {
            rmm::device_uvector<char> more(std::size_t{1} << 44, stream, memory);
        } catch (const std::bad_alloc &) {
            refused = true;
        }
        check(refused, "more than the device has is out of memory");
    }
    check(live(rt) == 0, "all of it is back");

    rmm::mr::cuda_memory_resource plain;
    rmm::mr::cuda_async_memory_resource async;
    rmm::mr::pool_memory_resource pool(plain, 4096 * mib, 4096 * mib);
    rmm::cuda_stream stream;
    rmm::cuda_stream registered;
    aquifer::stream_registration registration(rt, 0, registered.value());
    std::printf("| ns a pair | aquifer | on a registered stream | pool_memory_resource "
                "| cuda_async_memory_resource |\n");
    std::printf("|---|---|---|---|---|\n");
    for (const std::size_t bytes : {std::size_t{256}, mib, 64 * mib}) {
        std::printf("| %zu B | %.0f | %.0f | %.0f | %.0f |\n", bytes, pair(memory, bytes, stream),
                    pair(memory, bytes, registered), pair(pool, bytes, stream),
                    pair(async, bytes, stream));
    }
    std::printf("RMM " RMM_VERSION " over aquifer.hpp: all of it holds\n");
    return 0;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
