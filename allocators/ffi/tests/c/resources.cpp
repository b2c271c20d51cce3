// The memory resources of aquifer.hpp, by the names that libcu++ and RMM call, on a simulated
// device. The headers of libcu++ are those of stand_in.
#include "aquifer.hpp"
#include "check.h"
#include "resources/null_stream.h"
#include <stdexcept>
#include <string>
#include <type_traits>

static_assert(AQUIFER_CUDA_MR == 1, "the stand-in is found");

namespace per_thread {

// In resources/per_thread.cpp.
void *null_handle();
std::uint64_t pending_bytes();

}  // namespace per_thread

namespace {

using aquifer::device_resource;
using aquifer::pinned_resource;

// What libcu++ from 3.1 on requires of a resource, and what versions before it required.
template <class T>
T &value() noexcept;
template <class Expected, class Actual>
using require_same = std::enable_if_t<std::is_same_v<Expected, Actual>>;
using cuda::stream_ref;

template <class R, class = void>
struct is_resource : std::false_type {};
template <class R>
struct is_resource<
    R, std::void_t<
           require_same<void *, decltype(value<R>().allocate(value<stream_ref>(), 1u, 1u))>,
           require_same<void *, decltype(value<R>().allocate_sync(1u, 1u))>,
           std::enable_if_t<noexcept(
               value<R>().deallocate(value<stream_ref>(), value<void *>(), 1u, 1u))>,
           std::enable_if_t<noexcept(value<R>().deallocate_sync(value<void *>(), 1u, 1u))>,
           require_same<bool, decltype(value<const R>() == value<const R>())>,
           require_same<bool, decltype(value<const R>() != value<const R>())>>> : std::true_type {};

template <class R, class = void>
struct is_async_resource : std::false_type {};
template <class R>
struct is_async_resource<
    R, std::void_t<
           require_same<void *, decltype(value<R>().allocate_async(1u, 1u, value<stream_ref>()))>,
           require_same<void *, decltype(value<R>().allocate(1u, 1u))>,
           std::enable_if_t<noexcept(
               value<R>().deallocate_async(value<void *>(), 1u, 1u, value<stream_ref>()))>,
           std::enable_if_t<noexcept(value<R>().deallocate(value<void *>(), 1u, 1u))>>>
    : std::true_type {};

template <class R, class Property, class = void>
struct has_property : std::false_type {};
template <class R, class Property>
struct has_property<
    R, Property, std::void_t<decltype(get_property(value<const R>(), std::declval<Property>()))>>
    : std::true_type {};

static_assert(is_resource<device_resource>::value && is_resource<pinned_resource>::value);
static_assert(is_async_resource<device_resource>::value);
static_assert(is_async_resource<pinned_resource>::value);
static_assert(has_property<device_resource, cuda::mr::device_accessible>::value);
static_assert(!has_property<device_resource, cuda::mr::host_accessible>::value);
static_assert(has_property<pinned_resource, cuda::mr::device_accessible>::value);
static_assert(has_property<pinned_resource, cuda::mr::host_accessible>::value);
#if defined(CCCL_VERSION) && CCCL_VERSION >= 3002000
static_assert(std::is_same_v<device_resource::default_queries,
                             cuda::mr::properties_list<cuda::mr::device_accessible>>);
#endif
// A type-erased owner of libcu++ copies and moves them.
template <class R>
constexpr bool is_value =
    std::is_copy_constructible_v<R> && std::is_nothrow_move_constructible_v<R>;
static_assert(is_value<device_resource> && is_value<pinned_resource>);

struct other_out_of_memory : std::runtime_error {
    using std::runtime_error::runtime_error;
};
using throwing_device = aquifer::throwing<device_resource, other_out_of_memory>;
using throwing_pinned = aquifer::throwing<pinned_resource, other_out_of_memory>;
static_assert(is_resource<throwing_device>::value && is_async_resource<throwing_pinned>::value);
static_assert(has_property<throwing_device, cuda::mr::device_accessible>::value);
static_assert(!has_property<throwing_device, cuda::mr::host_accessible>::value);
static_assert(has_property<throwing_pinned, cuda::mr::host_accessible>::value);
static_assert(is_value<throwing_device>);

constexpr std::size_t MIB = 1u << 20;

stream_ref ref(const aquifer::sim_stream &stream) {
    return static_cast<cudaStream_t>(stream.get());
}

void touch(aquifer::runtime_view rt, void *stream, void *memory, std::uint32_t access = AQ_WRITE) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    OK(aq_sim_touch(rt.get(), 0, stream, address, MIB, access));
}

/* A device whose queued work runs late, with so little memory that blocks get what others had. */
aquifer::runtime late(std::uint64_t seed) {
    aq_runtime_options options = simulated(1);
    options.sim_seed = seed;
    options.device_limit = 2 * MIB;
    return aquifer::runtime(options);
}

void a_block_is_reused_after_the_work_of_the_stream_that_deallocates_it() {
    const aquifer::runtime rt = late(7);
    device_resource memory(rt, 0);
    {
        const aquifer::sim_stream a(rt, 0), b(rt, 0);
        for (int n = 0; n < 50; n++) {
            void *block = memory.allocate(ref(a), MIB, 256);
            touch(rt, a.get(), block);
            b.wait(a.get());
            touch(rt, b.get(), block, AQ_READ);
            memory.deallocate(ref(b), block, MIB, 256);
            block = memory.allocate_async(MIB, 256, ref(a));
            touch(rt, a.get(), block);
            memory.deallocate_async(block, MIB, 256, ref(a));
        }
        a.synchronize();
        b.synchronize();
    }
    in_order(rt.get(), 1);
}

void a_resource_throws_the_type_that_its_user_chooses() {
    const aquifer::runtime rt = late(7);
    throwing_device memory(rt, 0);
    const aquifer::sim_stream stream(rt, 0);
    void *block = memory.allocate(ref(stream), MIB);
    CHECK(memory == throwing_device(rt, 0) && memory != throwing_device(rt, 1));
    int thrown = 0;
    for (const bool is_sync : {false, true}) {
        try {
            is_sync ? memory.allocate_sync(64 * MIB) : memory.allocate(ref(stream), 64 * MIB);
        } catch (const other_out_of_memory &error) {
            thrown += std::string(error.what()).find("out of memory") == 0;
        }
    }
    CHECK(thrown == 2);
    memory.deallocate(ref(stream), block, MIB);
    stream.synchronize();
    in_order(rt.get(), 1);
}

void synchronous_memory_is_usable_on_any_stream_at_once() {
    for (std::uint64_t seed = 1; seed < 20; seed++) {
        const aquifer::runtime rt = late(seed);
        device_resource memory(rt, 0);
        const aquifer::sim_stream a(rt, 0), b(rt, 0);
        for (int n = 0; n < 10; n++) {
            void *blocks[] = {memory.allocate(ref(a), MIB), memory.allocate(ref(a), MIB)};
            for (void *block : blocks) touch(rt, a.get(), block);
            for (void *block : blocks) memory.deallocate(ref(a), block, MIB);
            void *ready = n % 2 == 0 ? memory.allocate_sync(MIB) : memory.allocate(MIB);
            touch(rt, b.get(), ready);
            b.synchronize();
            memory.deallocate_sync(ready, MIB);
        }
        in_order(rt.get(), 1);
    }
}

template <class Call>
void refuses(std::size_t align, Call call) {
    try {
        call();
    } catch (const aquifer::call_error &error) {
        CHECK(error.status() == AQ_ERROR_BAD_ALIGNMENT);
        return;
    }
    fprintf(stderr, "an alignment of %zu is not refused\n", align);
    exit(1);
}

void sizes_alignments_and_errors() {
    const aquifer::runtime rt(simulated(2)), other(simulated(1));
    device_resource memory(rt, 0);
    CHECK(memory == device_resource(rt, 0));
    CHECK(memory != device_resource(rt, 1) && memory != device_resource(other, 0));
    CHECK(memory.runtime() == rt && memory.device() == 0);
    const aquifer::sim_stream stream(rt, 0);
    CHECK(memory.allocate(ref(stream), 0) == nullptr && memory.allocate_sync(0) == nullptr);
    memory.deallocate(ref(stream), nullptr, 0);
    memory.deallocate_sync(nullptr, 0);
    void *aligned = memory.allocate(ref(stream), 100, MIB);
    CHECK(reinterpret_cast<std::uintptr_t>(aligned) % MIB == 0);
    memory.deallocate(ref(stream), aligned, 100, MIB);
    pinned_resource pinned(rt, 0);
    for (std::size_t align : {std::size_t{0}, std::size_t{3}, std::size_t{96}}) {
        for (std::size_t bytes : {0, 100}) {
            refuses(align, [&] { memory.allocate(ref(stream), bytes, align); });
            refuses(align, [&] { memory.allocate_sync(bytes, align); });
            refuses(align, [&] { pinned.allocate(ref(stream), bytes, align); });
            refuses(align, [&] { pinned.allocate_sync(bytes, align); });
        }
    }
    refuses(4 * MIB, [&] { memory.allocate(ref(stream), 100, 4 * MIB); });
    refuses(4 * MIB, [&] { memory.allocate_sync(100, 4 * MIB); });
    aligned = memory.allocate_sync(100, 1024);
    CHECK(reinterpret_cast<std::uintptr_t>(aligned) % 1024 == 0);
    memory.deallocate_sync(aligned, 100, 1024);
    try {
        memory.allocate(ref(stream), std::size_t{1} << 40);
        CHECK(!"more than there is");
    } catch (const std::bad_alloc &error) {
        CHECK(strstr(error.what(), "device 0") != nullptr);
    }
    in_order(rt.get(), 2);
}

int dropped = 0;

void a_destroyed_runtime_takes_its_blocks_back() {
    aquifer::runtime rt(simulated(1));
    device_resource memory(rt, 0);
    pinned_resource pinned(rt, 0);
    aquifer::sim_stream stream(rt, 0);
    void *one = memory.allocate(ref(stream), MIB), *two = memory.allocate_sync(MIB);
    void *three = pinned.allocate_sync(MIB, 64);
    rt.reset();
    CHECK(!rt);
    aquifer::set_drop_error_handler(
        [](const char *, aq_status, const char *) noexcept { dropped++; });
    memory.deallocate(ref(stream), one, MIB);
    memory.deallocate_sync(two, MIB);
    pinned.deallocate(ref(stream), three, MIB, 64);
    CHECK(dropped == 0);
    memory.deallocate_sync(two, MIB);
    CHECK(dropped == 1);
    aquifer::set_drop_error_handler(nullptr);
    try {
        memory.allocate(ref(stream), MIB);
        CHECK(!"memory of a runtime that is over");
    } catch (const aquifer::error &error) {
        CHECK(error.status() == AQ_ERROR_CLOSED);
    }
}

void pinned_memory_for_both_sides() {
    const aquifer::runtime rt(simulated(1));
    pinned_resource memory(rt, 0);
    CHECK(memory == pinned_resource(rt, 0) && memory.runtime() == rt && memory.device() == 0);
    const aquifer::sim_stream stream(rt, 0);
    void *first = memory.allocate(ref(stream), MIB, 64), *second = memory.allocate_sync(MIB, 4096);
    CHECK(reinterpret_cast<std::uintptr_t>(second) % 4096 == 0);
    CHECK(memory.allocate_sync(0, 64) == nullptr);
    memset(first, 1, MIB);
    memset(second, 2, MIB);
    CHECK(rt.pinned_stats(0).blocks == 2);
    memory.deallocate(ref(stream), first, MIB, 64);
    memory.deallocate(ref(stream), nullptr, 0, 64);
    memory.deallocate_sync(second, MIB, 4096);
    CHECK(rt.pinned_stats(0).blocks == 0);
}

void files_differ_in_the_null_stream() {
    CHECK(handle_of_null() == nullptr);
    CHECK(per_thread::null_handle() == reinterpret_cast<void *>(2));
    CHECK(pending_after_deallocation_elsewhere() == 0);
    CHECK(per_thread::pending_bytes() != 0);
}

}  // namespace

int main() {
    a_block_is_reused_after_the_work_of_the_stream_that_deallocates_it();
    a_resource_throws_the_type_that_its_user_chooses();
    synchronous_memory_is_usable_on_any_stream_at_once();
    sizes_alignments_and_errors();
    a_destroyed_runtime_takes_its_blocks_back();
    pinned_memory_for_both_sides();
    files_differ_in_the_null_stream();
    puts("resources: as libcu++ calls them");
    return 0;
}
