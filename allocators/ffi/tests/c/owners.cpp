// The owners, exceptions and containers of aquifer.hpp, on a simulated device, without any header
// of CUDA.
#include "aquifer.hpp"
#include "check.h"
#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

static_assert(AQUIFER_CUDA_MR == 0, "the program is compiled without libcu++");

namespace {

constexpr std::size_t MIB = 1u << 20;

template <class T>
constexpr bool is_owner = !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T> &&
                          std::is_nothrow_move_constructible_v<T> &&
                          std::is_nothrow_move_assignable_v<T> && std::is_nothrow_destructible_v<T>;
static_assert(is_owner<aquifer::runtime> && is_owner<aquifer::text> && is_owner<aquifer::transfer>);
static_assert(is_owner<aquifer::device_block> && is_owner<aquifer::device_buffer<int>>);
static_assert(is_owner<aquifer::pinned_block>);
static_assert(is_owner<aquifer::stream_registration> && is_owner<aquifer::torch_pool_user>);
static_assert(is_owner<aquifer::sim_stream> && is_owner<aquifer::sim_graph>);
// A runtime is no view that could be assigned, and views are made of runtimes and of nothing else.
static_assert(std::is_convertible_v<aquifer::runtime &, aquifer::runtime_view>);
static_assert(!std::is_base_of_v<aquifer::runtime_view, aquifer::runtime>);
static_assert(!std::is_assignable_v<aquifer::runtime &, aquifer::runtime_view>);
static_assert(std::is_convertible_v<aq_runtime, aquifer::runtime_view>);
static_assert(!std::is_constructible_v<aquifer::runtime_view, int>);
static_assert(!std::is_constructible_v<aquifer::runtime_view, bool>);

// Containers of a type derived from T are no containers of T.
struct base {
    int first;
};
struct derived : base {
    int second;
};
template <class T, class Container, class = void>
struct uploads : std::false_type {};
template <class T, class Container>
struct uploads<T, Container,
               std::void_t<decltype(std::declval<aquifer::device_buffer<T> &>().upload(
                   std::declval<Container &>(), nullptr))>> : std::true_type {};
template <class T, class Container, class = void>
struct downloads : std::false_type {};
template <class T, class Container>
struct downloads<T, Container,
                 std::void_t<decltype(std::declval<aquifer::device_buffer<T> &>().download(
                     std::declval<Container &>(), nullptr))>> : std::true_type {};
static_assert(uploads<base, std::vector<base>>::value && uploads<base, const base[3]>::value);
static_assert(downloads<base, std::vector<base>>::value && downloads<base, base[3]>::value);
static_assert(!uploads<base, std::vector<derived>>::value);
static_assert(!downloads<base, std::vector<derived>>::value);
static_assert(!downloads<base, const std::vector<base>>::value);

// Exceptions are copied while others are under way.
static_assert(std::is_nothrow_copy_constructible_v<aquifer::call_error>);
static_assert(std::is_nothrow_copy_constructible_v<aquifer::out_of_memory>);

// What was dropped, and why.
const char *dropped_call = nullptr;
aq_status dropped_status = AQ_OK;

void note(const char *call, aq_status status, const char *text) noexcept {
    CHECK(text[0] != 0);
    dropped_call = call;
    dropped_status = status;
}

void expect_dropped(const char *call, aq_status status) {
    CHECK(dropped_call != nullptr && strcmp(dropped_call, call) == 0 && dropped_status == status);
    dropped_call = nullptr;
}

template <class Exception, class Call>
void expect(aq_status status, Call call) {
    try {
        call();
    } catch (const Exception &error) {
        CHECK(error.status() == status && error.what()[0] != 0);
        return;
    }
    CHECK(!"it throws");
}

void exceptions() {
    const aquifer::runtime rt(simulated(1));
    expect<aquifer::call_error>(AQ_ERROR_NO_DEVICE, [&] { rt.stats(9); });
    expect<aquifer::error>(AQ_ERROR_NO_DEVICE, [&] { rt.device(9); });
    const aquifer::device_block nothing(rt, 0, 0, nullptr);
    CHECK(!nothing && nothing.size() == 0 && nothing.data() == nullptr);
    const aquifer::device_buffer<int> no_values(rt, 0, 0, nullptr);
    no_values.upload(std::vector<int>(), nullptr);
    CHECK(no_values.size() == 0);
    expect<aquifer::out_of_memory>(AQ_ERROR_OUT_OF_MEMORY, [&] {
        const aquifer::device_block most(rt, 0, 200 << 20, nullptr);
        aquifer::device_block(rt, 0, 1u << 30, nullptr);
    });
    expect<aquifer::error>(AQ_ERROR_BAD_RUNTIME, [] { aquifer::runtime_view().device_count(); });
    // As standard exceptions too, of one kind each.
    try {
        aquifer::device_block(rt, 0, 1u << 30, nullptr);
        CHECK(!"more than the limit");
    } catch (const std::runtime_error &) {
        CHECK(!"it is a bad_alloc");
    } catch (const std::bad_alloc &error) {
        CHECK(strstr(error.what(), "out of memory on device 0") != nullptr);
    }
    try {
        rt.stats(9);
        CHECK(!"no such device");
    } catch (const std::exception &error) {
        CHECK(strstr(error.what(), "device") != nullptr);
    }
    // The text is the exception's own: later errors do not change it.
    std::exception_ptr kept;
    try {
        rt.stats(9);
    } catch (...) {
        kept = std::current_exception();
    }
    ANSWERS(AQ_ERROR_NULL, aq_device_count(rt.get(), nullptr));
    try {
        std::rethrow_exception(kept);
    } catch (const aquifer::error &error) {
        CHECK(strcmp(error.what(), aq_last_error()) != 0 && error.status() == AQ_ERROR_NO_DEVICE);
    }
    expect<aquifer::call_error>(AQ_NOT_READY, [] { aquifer::check(AQ_NOT_READY); });
    aquifer::check(AQ_OK);
    aq_runtime_options options = simulated(1);
    options.driver = 9;
    expect<aquifer::call_error>(AQ_ERROR_BAD_ARGUMENT, [&] { aquifer::runtime bad(options); });
    try {
        aquifer::device_buffer<std::uint64_t>(rt, 0, SIZE_MAX / 4, nullptr);
        CHECK(!"more bytes than there are numbers");
    } catch (const std::bad_array_new_length &) {
    }
    in_order(rt.get(), 1);
}

void runtimes() {
    aquifer::runtime rt(simulated(2));
    CHECK(rt && rt.device_count() == 2 && rt.device(1).simulated);
    const aquifer::runtime_view view = rt;
    aquifer::runtime moved(std::move(rt));
    CHECK(!rt && moved == view && moved.device_count() == 2);
    aquifer::runtime other(simulated(1));
    const aq_runtime replaced = other.get();
    other = std::move(moved);
    uint32_t count = 0;
    ANSWERS(AQ_ERROR_CLOSED, aq_device_count(replaced, &count));
    aquifer::runtime &same = other;
    other = std::move(same);
    CHECK(other.device_count() == 2);

    const aq_runtime number = other.release();
    CHECK(!other && number == view.get());
    aquifer::runtime again = aquifer::runtime::adopt(number);
    CHECK(again.limit(0).limit == 256 * MIB && again.limit(0).used == 0);
    CHECK(again.set_limit(0, 128 * MIB) == 0 && again.limit(0).limit == 128 * MIB);
    CHECK(again.pinned_limit().limit == 256 * MIB && again.set_pinned_limit(100 * MIB) == 0);
    CHECK(again.snapshot().find("\"format\":\"aquifer-snapshot\"") != std::string::npos);
    aquifer::device_block(again, 0, MIB, nullptr).reset();
    CHECK(again.stats(0).peak_requested == MIB);
    again.reset_peaks(0);
    CHECK(again.stats(0).peak_requested == 0);
    CHECK(again.trim(0) > 0 && again.stats(0).physical == 0 && again.pinned_trim(0) == 0);
    expect<aquifer::call_error>(AQ_ERROR_UNSUPPORTED,
                                [&] { again.memory_snapshot(0, "/nowhere/memory.pickle"); });

    again.reset();
    again.reset();
    ANSWERS(AQ_ERROR_CLOSED, aq_device_count(number, &count));
    // What something else has destroyed is told of, and nothing is thrown.
    {
        aquifer::runtime twice(simulated(1));
        OK(aq_runtime_destroy(twice.get()));
    }
    expect_dropped("aq_runtime_destroy", AQ_ERROR_CLOSED);
}

void blocks() {
    aquifer::runtime rt(simulated(1));
    {
        const aquifer::sim_stream stream(rt, 0), other(rt, 0);
        const aquifer::stream_registration registered(rt, 0, stream.get());
        CHECK(registered && registered.get() == stream.get());
        {
            aquifer::device_block empty;
            CHECK(!empty && empty.get() == 0 && empty.data() == nullptr);
            aquifer::device_block one(rt, 0, MIB, stream.get());
            aquifer::device_block two(rt, 0, 100, stream.get(), 2 * MIB);
            CHECK(one && one.size() == MIB && one.runtime() == rt && one.device() == 0);
            CHECK(two.get() % (2 * MIB) == 0);
            const std::uint64_t address = one.get();
            empty = std::move(one);
            CHECK(!one && empty.get() == address);
            two = std::move(empty);
            CHECK(two.get() == address && rt.stats(0).blocks == 1);
            const std::uint64_t released = two.release();
            CHECK(!two && released == address && rt.stats(0).blocks == 1);
            aquifer::device_block adopted = aquifer::device_block::adopt(rt, 0, released);
            CHECK(adopted.size() == MIB);
            expect<aquifer::call_error>(AQ_ERROR_FOREIGN_BLOCK, [&] {
                aquifer::device_block::adopt(rt, 0, released + 4096);
            });

            OK(aq_sim_touch(rt.get(), 0, stream.get(), released, MIB, AQ_WRITE));
            other.wait(stream.get());
            OK(aq_sim_touch(rt.get(), 0, other.get(), released, MIB, AQ_READ));
            adopted.record_use(other.get(), AQ_READ);
            other.synchronize();
            adopted.free_on(other.get());
            CHECK(!adopted);
        }
        CHECK(rt.stats(0).blocks == 0);
        std::vector<aquifer::device_block> many;
        for (int n = 1; n < 50; n++) many.emplace_back(rt, 0, 4096u * n, stream.get());
        std::rotate(many.begin(), many.begin() + 20, many.end());
        many.erase(many.begin(), many.begin() + 30);
        CHECK(rt.stats(0).blocks == many.size());
        many.back().free();
        CHECK(!many.back());
        many.clear();

        aquifer::device_block twice(rt, 0, MIB, stream.get());
        OK(aq_free(rt.get(), 0, twice.get()));
        expect<aquifer::call_error>(AQ_ERROR_DOUBLE_FREE, [&] { twice.free(); });
        CHECK(twice);
        twice.reset();
        expect_dropped("aq_free", AQ_ERROR_DOUBLE_FREE);
    }
    in_order(rt.get(), 1);
    // A block outlives its runtime.
    aquifer::device_block last(rt, 0, MIB, nullptr);
    rt.reset();
    last.reset();
    CHECK(dropped_call == nullptr);
}

void copies() {
    const aquifer::runtime rt(simulated(1));
    std::vector<float> values(100000), back(values.size());
    std::iota(values.begin(), values.end(), 1.0f);
    {
        aquifer::device_buffer<float> x(rt, 0, values.size(), nullptr), y;
        CHECK(x.size() == values.size() && x.get() == x.data() && !y && y.size() == 0);
        x.upload(values, nullptr);
        y = std::move(x);
        CHECK(!x && y);
        y.download(back, nullptr);
        CHECK(back == values);
        const float changed[] = {-1, -2};
        y.upload(changed, 2, nullptr, 7);
        float part[3] = {};
        y.download(part, 3, nullptr, 6);
        CHECK(part[0] == 7 && part[1] == -1 && part[2] == -2);
        expect<aquifer::call_error>(AQ_ERROR_OUT_OF_BOUNDS,
                                    [&] { y.upload(changed, 2, nullptr, y.size() - 1); });

        std::fill(back.begin(), back.end(), 0.0f);
        const std::size_t bytes = values.size() * sizeof(float);
        aquifer::transfer up = y.block().upload_begin(values.data(), bytes, nullptr);
        CHECK(up);
        up.wait();
        CHECK(up.poll());
        aquifer::transfer down = y.block().download_begin(back.data(), bytes, nullptr);
        while (!down.poll()) {
        }
        CHECK(back == values);
        up = std::move(down);
        const aq_ticket ticket = up.release();
        CHECK(!up && ticket != 0);
        aquifer::transfer(ticket).reset();
        ANSWERS(AQ_ERROR_UNKNOWN_TICKET, aq_ticket_poll(ticket));
        expect<aquifer::call_error>(AQ_ERROR_UNKNOWN_TICKET, [] { aquifer::transfer().wait(); });
        // Cancelled where it stands.
        const aquifer::transfer unfinished =
            y.block().download_begin(back.data(), bytes, nullptr);
    }
    in_order(rt.get(), 1);
}

void streams_and_graphs() {
    const aquifer::runtime rt(simulated(1));
    aquifer::sim_stream stream(rt, 0), moved;
    void *const handle = stream.get();
    moved = std::move(stream);
    CHECK(!stream && moved.get() == handle);
    {
        aquifer::stream_registration registered(rt, 0, handle), other;
        aquifer::device_block(rt, 0, MIB, handle).reset();
        other = std::move(registered);
        CHECK(!registered && other);
        other.retire();
        CHECK(!other);
        other = aquifer::stream_registration(rt, 0, handle);
        CHECK(other.release() == handle);
        OK(aq_stream_retire(rt.get(), 0, handle));
    }
    std::uint64_t number = 0;
    OK(aq_sim_capture_begin(rt.get(), 0, handle));
    OK(aq_sim_capture_end(rt.get(), 0, handle, &number));
    aquifer::sim_graph graph(rt, 0, number);
    graph.launch(handle);
    moved.synchronize();
    aquifer::sim_graph taken = std::move(graph);
    CHECK(!graph && taken.get() == number && taken.release() == number);
    OK(aq_sim_graph_destroy(rt.get(), 0, number));
    expect<aquifer::call_error>(AQ_ERROR_NO_DEVICE, [&] { aquifer::sim_stream bad(rt, 9); });
    in_order(rt.get(), 1);
}

void pinned() {
    aquifer::runtime rt(simulated(1));
    {
        aquifer::pinned_block one(rt, 0, 1000), two(rt, 0, 5000, 4096);
        memset(one.data(), 7, one.size());
        CHECK(one && one.size() == 1000 && one.is_pinned());
        CHECK(reinterpret_cast<std::uintptr_t>(two.get()) % 4096 == 0);
        one.record_use(rt, 0, nullptr);
        two = std::move(one);
        CHECK(!one && two.size() == 1000 && *static_cast<char *>(two.data()) == 7);
        CHECK(rt.pinned_stats(0).blocks == 1);
        void *memory = two.release();
        OK(aq_pinned_free(memory));
        aquifer::pinned_block gone(rt, 0, 100);
        OK(aq_pinned_free(gone.get()));
    }
    expect_dropped("aq_pinned_free", AQ_ERROR_FOREIGN_BLOCK);
    expect<aquifer::call_error>(AQ_ERROR_BAD_ALIGNMENT,
                                [&] { aquifer::pinned_block bad(rt, 0, 100, 3); });
    CHECK(rt.pinned_stats(0).blocks == 0);
}

void allocators() {
    aquifer::runtime rt(simulated(2));
    using ints = std::vector<int, aquifer::pinned_allocator<int>>;
    const aquifer::pinned_allocator<int> near(rt, 0), far(rt, 1);
    static_assert(!std::allocator_traits<aquifer::pinned_allocator<int>>::is_always_equal::value);
    CHECK(near == aquifer::pinned_allocator<char>(near) && near != far && !(near != near));
    CHECK(near.runtime() == rt && far.device() == 1);
    {
        ints numbers(near);
        for (int n = 0; n < 100000; n++) numbers.push_back(n);
        int pinned = 0;
        OK(aq_pinned_is_pinned(numbers.data(), &pinned));
        CHECK(pinned == 1 && rt.pinned_stats(0).blocks == 1);
        const int *data = numbers.data();
        ints moved(std::move(numbers));
        CHECK(moved.data() == data && moved[99999] == 99999);
        // Its allocator moves along, and so does its memory.
        ints assigned(far);
        assigned.push_back(1);
        assigned = std::move(moved);
        CHECK(assigned.data() == data && assigned.get_allocator() == near);
        ints copied(assigned, far);
        CHECK(copied == assigned && copied.get_allocator() == far);
        swap(copied, assigned);
        CHECK(copied.data() == data && copied.get_allocator() == near);

        aquifer::device_buffer<int> x(rt, 0, copied.size(), nullptr);
        x.upload(copied, nullptr);
        ints back(copied.size(), 0, near);
        x.download(back, nullptr);
        CHECK(back == copied);
        // Through other types and with more alignment than a line.
        using pairs = aquifer::pinned_allocator<std::pair<const int, int>>;
        std::map<int, int, std::less<>, pairs> map(near);
        for (int n = 0; n < 100; n++) map[n] = n;
        struct alignas(256) wide {
            char bytes[256];
        };
        std::vector<wide, aquifer::pinned_allocator<wide>> wides(3, wide{}, near);
        CHECK(reinterpret_cast<std::uintptr_t>(wides.data()) % 256 == 0);
        auto shared = std::allocate_shared<int>(near, 5);
        CHECK(*shared == 5);
    }
    try {
        static_cast<void>(aquifer::pinned_allocator<int>(near).allocate(SIZE_MAX / 2));
        CHECK(!"more bytes than there are numbers");
    } catch (const std::bad_array_new_length &) {
    }
    expect<aquifer::out_of_memory>(AQ_ERROR_TOO_LARGE, [&] {
        static_cast<void>(aquifer::pinned_allocator<char>(near).allocate(SIZE_MAX / 2));
    });
    try {
        ints full(near);
        full.reserve(100 * MIB);
        CHECK(!"more than the limit");
    } catch (const std::bad_alloc &) {
    }
    CHECK(rt.pinned_stats(0).blocks == 0 && rt.pinned_stats(1).blocks == 0);

#if defined(__cpp_lib_memory_resource)
    aquifer::pinned_memory_resource resource(rt, 0), same(rt, 0), other(rt, 1);
    CHECK(resource == same && resource != other && resource != *std::pmr::new_delete_resource());
    {
        std::pmr::vector<double> values(&resource), elsewhere(&other);
        for (int n = 0; n < 50000; n++) values.push_back(n);
        int pinned = 0;
        OK(aq_pinned_is_pinned(values.data(), &pinned));
        CHECK(pinned == 1);
        elsewhere = values;
        CHECK(elsewhere == values && elsewhere.data() != values.data());
        void *empty = resource.allocate(0);
        CHECK(empty != nullptr);
        resource.deallocate(empty, 0);
        for (std::size_t align : {std::size_t{0}, std::size_t{3}, std::size_t{96}}) {
            for (std::size_t bytes : {0, 100}) {
                expect<aquifer::call_error>(AQ_ERROR_BAD_ALIGNMENT, [&] {
                    static_cast<void>(resource.allocate(bytes, align));
                });
            }
        }
        std::pmr::monotonic_buffer_resource arena(&resource);
        std::pmr::vector<std::pmr::string> words(&arena);
        for (int n = 0; n < 1000; n++) {
            words.emplace_back("a word that is too long to be kept in the string");
        }
        // Its runtime may end before it.
        rt.reset();
        CHECK(values[49999] == 49999);
        expect<aquifer::call_error>(AQ_ERROR_CLOSED, [&] { values.reserve(1000000); });
    }
#else
#error "the compilers of ci/c have std::pmr"
#endif
}

void pools_of_pytorch() {
    const aq_runtime_options options = simulated(1);
    OK(aq_torch_setup(&options));
    int uses = -1;
    {
        aquifer::torch_pool_user one(0, 5, 6), two(0, 5, 6), none;
        OK(aq_torch_pool_uses(0, 5, 6, &uses));
        CHECK(uses == 2 && one && !none);
        none = std::move(one);
        two.reset();
        OK(aq_torch_pool_uses(0, 5, 6, &uses));
        CHECK(uses == 1 && !one && none);
        none.release();
    }
    OK(aq_torch_pool_uses(0, 5, 6, &uses));
    CHECK(uses == 1);
    OK(aq_torch_pool_release(0, 5, 6));
    expect<aquifer::call_error>(AQ_ERROR_NO_DEVICE, [] { aquifer::torch_pool_user bad(7, 1, 1); });
}

}  // namespace

int main() {
    CHECK(aquifer::set_drop_error_handler(&note) != nullptr);
    exceptions();
    runtimes();
    blocks();
    copies();
    streams_and_graphs();
    pinned();
    allocators();
    pools_of_pytorch();
    CHECK(dropped_call == nullptr && aquifer::set_drop_error_handler(nullptr) == &note);
    std::puts("owners: what they own ends once");
    return 0;
}
